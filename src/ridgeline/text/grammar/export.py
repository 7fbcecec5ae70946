"""A model's tokenizer as Hugging Face's files, for programs that ask for one beside a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.model.files.gguf.tokenizer import tokenizer_json
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import check_room, write_text
from ridgeline.text.tokenizers.tokenizer import Tokenizer
from ridgeline.text.tokenizers.vocabulary import checked

_FILES = (
    "tokenizer*", "special_tokens_map.json", "chat_template*", "additional_chat_templates/*.jinja",
    "vocab.*", "merges.txt",
)  # fmt: skip


def tokenizer_config(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a tokenizer_config.json says of a model's tokenizer."""

    def spell(token: int | None) -> str | None:
        return None if token is None else tokenizer.token_bytes(token).decode(errors="replace")

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.arch.max_position,
        "add_bos_token": bool(checkpoint.begin_ids),
        "bos_token": spell(checkpoint.bos_id),
        "eos_token": spell(checkpoint.eos_ids[0] if checkpoint.eos_ids else None),
        "chat_template": _templates(checkpoint),
    }


def export_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Write tokenizer.json and tokenizer_config.json; return all files written.

    A Hugging Face directory's own files are copied. Raises OSError if the folder cannot be written,
    and DiskFull if its disk has too little room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(checkpoint.tokenizer, Mapping):
        files = sorted({one for name in _FILES for one in checkpoint.path.glob(name)})
        _check_room(folder, sum(one.stat().st_size for one in files))
        return [_copied(one, folder / one.relative_to(checkpoint.path)) for one in files]
    contents = {
        "tokenizer.json": _complete(tokenizer_json(checkpoint.tokenizer), checkpoint),
        "tokenizer_config.json": tokenizer_config(checkpoint, tokenizer),
    }
    texts = {
        name: json.dumps(content, ensure_ascii=False, indent=1)
        for name, content in contents.items()
    }
    _check_room(folder, sum(len(text.encode()) for text in texts.values()))
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in contents]


def _check_room(folder: Path, num_bytes: int) -> None:
    check_room(folder, num_bytes, "the tokenizer", "name another folder")


def _templates(checkpoint: Checkpoint) -> str | list[dict[str, str]] | None:
    """Return the chat template, or a list of named ones where there is one for tools."""
    named = {"default": checkpoint.chat_template, "tool_use": checkpoint.tool_template}
    pairs = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    return checkpoint.chat_template if checkpoint.tool_template is None else pairs


def _copied(file: Path, target: Path) -> Path:
    target.parent.mkdir(exist_ok=True)
    return Path(shutil.copyfile(file, target))


def _complete(spec: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a whole tokenizer.json: what the library reads, and the token that begins a text."""
    model, pieces = spec["model"], checked(spec)[0]
    if model["type"] != "Unigram":
        model["vocab"] = {piece: i for i, piece in enumerate(pieces)}
    if model["type"] == "BPE":
        pairs = (one.split(" ", 1) if isinstance(one, str) else one for one in model["merges"])
        model["merges"] = list(pairs)
    spec = {"version": "1.0", "truncation": None, "padding": None} | spec
    around = checkpoint.begin_ids, checkpoint.end_ids or ()
    if any(around):
        names = {i: pieces[i] for ids in around for i in ids}
        first, last = (
            [{"SpecialToken": {"id": names[i], "type_id": 0}} for i in ids] for ids in around
        )
        text, second_text = (
            {"Sequence": {"id": which, "type_id": i}} for i, which in enumerate("AB")
        )
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [*first, text, *last],
            "pair": [*first, text, *last, second_text, *last],
            "special_tokens": {
                name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()
            },
        }
    return spec
