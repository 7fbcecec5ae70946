"""What a model directory says of text: where answers end, how texts begin, and its templates.

Several files say it, and often not all of them the same. Here is the one place that knows which of
them there are and which counts. It opens no file but through ``Folder``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.model.files import RECOMMENDED
from ridgeline.model.files.folder import Folder
from ridgeline.model.files.tensors import ModelFileError

_MAX_TOKENIZER_BYTES = 64 << 20  # the largest published tokenizer.json has half of this
_MAX_TEMPLATE_BYTES = 1 << 20
_TOOL_USE = "tool_use"  # transformers' name for the template of conversations with tools
_TEMPLATES = ("chat_template.jinja", f"additional_chat_templates/{_TOOL_USE}.jinja")
_Templates = tuple[str | None, ...]  # of any conversation, and of those with tools


class TextFacts(NamedTuple):
    """What is said of text; ids are those that the model can produce.

    Attributes:
        eos_ids: tokens that end an answer, the tokenizer's own first.
        bos_id: token that begins a text, None where there is none.
        begin_ids: what a plain prompt gets in front.
        end_ids: what it gets behind it, None where tokenizer.json says it.
        between_ids: what stands between two texts that are read together.
        chat_template: jinja2 source, None where there is none.
        tool_template: that of conversations with tools, where they have one of their own.
        sampling: what is recommended.
        notes: what was found and is of no use, a line each.
    """

    eos_ids: tuple[int, ...]
    bos_id: int | None
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...] | None
    between_ids: tuple[int, ...]
    chat_template: str | None
    tool_template: str | None
    sampling: Mapping[str, float | int]
    notes: tuple[str, ...]


def text_facts(folder: Folder, config: Mapping[str, Any], vocab_size: int) -> TextFacts:
    """Return what the files of a directory say of text.

    ``config`` is its config.json; ids from ``vocab_size`` on can be neither produced nor looked up,
    and are left out.

    Raises:
        ModelFileError: a value is damaged; the message names the file.
    """
    tokenizer = folder.json("tokenizer.json", _MAX_TOKENIZER_BYTES) or {}
    generation = folder.json("generation_config.json") or {}
    said = _of_tokenizer(folder)
    notes: list[str] = []
    roles = {}
    for role in ("eos", "bos"):
        own = _own_ids(said, tokenizer, f"{role}_token", notes)
        ids = [*own, *_ids_of_configs(f"{role}_token_id", generation, config, folder.path)]
        roles[role] = [i for i in dict.fromkeys(ids) if i < vocab_size]
        if lost := [i for i in ids if i >= vocab_size]:
            notes.append(f"{role} token {lost[0]} is beyond the vocabulary of {vocab_size}")
    eos_ids, bos_ids = roles["eos"], roles["bos"]
    chat_template, tool_template = _templates(folder, said.get("chat_template"))
    begins, ends = said.get("add_bos_token"), said.get("add_eos_token")
    begin_ids = bos_ids[:1] if begins else []
    if begins is None:
        begin_ids = [i for i in _beginning(tokenizer) if i < vocab_size]
        bos_ids = begin_ids or bos_ids
    return TextFacts(
        eos_ids=tuple(eos_ids),
        bos_id=bos_ids[0] if bos_ids else None,
        begin_ids=tuple(begin_ids),
        end_ids=None if ends is None else tuple(eos_ids[:1] if ends else ()),
        between_ids=_ids_between(tokenizer),
        chat_template=chat_template,
        tool_template=tool_template,
        sampling=_sampling(generation, folder.path),
        notes=tuple(notes),
    )


def _of_tokenizer(folder: Folder) -> dict[str, Any]:
    """Return tokenizer_config.json, with what stands in older directories' special_tokens_map.json.

    As in transformers, that file counts where the other has no table of added tokens, and fills in
    what it leaves out elsewhere.
    """
    said = folder.json("tokenizer_config.json") or {}
    older = folder.json("special_tokens_map.json") or {}
    named = {key: value for key, value in said.items() if value is not None}
    return {**older, **named} if "added_tokens_decoder" in said else {**named, **older}


def _own_ids(
    said: Mapping[str, Any], tokenizer: Mapping[str, Any], role: str, notes: list[str]
) -> list[int]:
    """Return the ids of the token to which a tokenizer gives ``role``, if it says one.

    Its id stands in the table of added tokens, which directories that transformers 5 saved have
    not, among the added tokens of tokenizer.json, or in its vocabulary.
    """
    token = said.get(role)
    content = token.get("content") if type(token) is dict else token
    if type(content) is not str or not content:
        return []
    table = said.get("added_tokens_decoder")
    entries = list(table.items()) if type(table) is dict else []
    added = tokenizer.get("added_tokens")
    rows = added if type(added) is list else []
    entries += [(row.get("id"), row) for row in rows if type(row) is dict]
    ids = [
        int(number)
        for number, entry in entries
        if type(entry) is dict and entry.get("content") == content and str(number).isdecimal()
    ]
    ids = ids or _in_vocabulary(tokenizer, content)
    if not ids:
        notes.append(f"the tokenizer's {role} is {content[:40]!r}, which is none of its tokens")
    return list(dict.fromkeys(ids))


def _in_vocabulary(tokenizer: Mapping[str, Any], content: str) -> list[int]:
    """Return the id of a token of the vocabulary: pieces to ids, or pieces with their scores."""
    model = tokenizer.get("model")
    pieces = model.get("vocab") if type(model) is dict else None
    token_id: Any = None
    if type(pieces) is dict:
        token_id = pieces.get(content)
    elif type(pieces) is list:
        rows = enumerate(pieces)
        token_id = next((i for i, row in rows if type(row) is list and row[:1] == [content]), None)
    return [token_id] if type(token_id) is int and token_id >= 0 else []


def _ids_of_configs(
    key: str, generation: Mapping[str, Any], config: Mapping[str, Any], where: Path
) -> list[int]:
    """Return the ids that generation_config.json, config.json and its text half have at a key."""
    half = config.get("text_config")
    said = (generation, config, half if type(half) is dict else {})
    return [number for one in said for number in _ids(one.get(key), key, where)]


def _ids(value: Any, key: str, where: Path) -> list[int]:
    ids = value if type(value) is list else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ModelFileError(f"{where}: {key} is {value!r}, not a token id or a list of them")
    return list(ids)


def _beginning(tokenizer: Mapping[str, Any]) -> list[int]:
    """Return the ids that tokenizer.json's post-processor puts in front of a single text."""
    step = tokenizer.get("post_processor")
    steps = step.get("processors", [step]) if type(step) is dict else []
    try:
        for step in steps:
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                return _ids(step["cls"][1], "cls", Path("tokenizer.json"))
            if step["type"] == "TemplateProcessing":
                first = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
                tokens = [step["special_tokens"][piece["SpecialToken"]["id"]] for piece in first]
                ids = [number for token in tokens for number in token["ids"]]
                return _ids(ids, "ids", Path("tokenizer.json"))
    except (KeyError, IndexError, TypeError):
        pass  # the tokenizers library will say what is wrong with it
    return []


def _templates(folder: Folder, inline: Any) -> _Templates:
    """Return the chat template, and that of conversations with tools, of the first place with any.

    Files of their own come first, then tokenizer_config.json, then chat_template.json, which some
    models that also see have alone.
    """
    own = tuple(_text(folder, name) for name in _TEMPLATES)
    if own != (None, None):
        return own
    if inline is not None:
        return _named(inline, folder.path / "tokenizer_config.json")
    older = folder.json("chat_template.json") or {}
    return _named(older.get("chat_template"), folder.path / "chat_template.json")


def _text(folder: Folder, name: str) -> str | None:
    content = folder.read(name, _MAX_TEMPLATE_BYTES)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        raise ModelFileError(f"{folder.path / name}: not UTF-8") from None


def _named(said: Any, where: Path) -> _Templates:
    """Return the templates that a file has as one text, as a list of named ones, or by names."""
    if type(said) is list:
        rows: Sequence[Any] = said
        said = {row.get("name"): row.get("template") for row in rows if type(row) is dict}
    if type(said) is not dict:
        said = {"default": said}
    templates = said.get("default"), said.get(_TOOL_USE)
    if any(text is not None and type(text) is not str for text in templates):
        raise ModelFileError(f"{where}: chat_template is {json.dumps(templates)[:80]}, not text")
    return templates


def _sampling(generation: Mapping[str, Any], path: Path) -> dict[str, float | int]:
    defaults = {key: generation[key] for key in RECOMMENDED if generation.get(key) is not None}
    for key, value in defaults.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelFileError(
                f"{path}: {key} in generation_config.json is {value!r:.80}, not a number"
            )
    return defaults


def _ids_between(tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that a tokenizer.json's post-processor puts between the texts of a pair.

    None where it does not say, or cannot be read.
    """
    step = tokenizer.get("post_processor")
    steps = step.get("processors", [step]) if type(step) is dict else []
    ids: list[Any] = []
    try:
        for step in steps:
            if step["type"] == "BertProcessing":
                ids = [step["sep"][1]]
            elif step["type"] == "RobertaProcessing":
                ids = [step["sep"][1]] * 2
            elif step["type"] == "TemplateProcessing":
                parts = step["pair"]
                first, second = (i for i, part in enumerate(parts) if "Sequence" in part)
                names = [part["SpecialToken"]["id"] for part in parts[first + 1 : second]]
                ids = [number for name in names for number in step["special_tokens"][name]["ids"]]
    except (KeyError, IndexError, TypeError, ValueError):
        return ()
    return tuple(ids) if all(type(number) is int for number in ids) else ()
