"""One door for every model on disk: a GGUF file or a Hugging Face directory becomes a Checkpoint.

This module decides which reader a path needs and what a GGUF file says about text; it never looks
into a tensor.

    checkpoint = load_checkpoint(Path("smollm2.gguf"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import model_from_gguf
from ridgeline.model.files.gguf.file import MAGIC
from ridgeline.model.files.gguf.parts import part_paths, read_gguf_parts
from ridgeline.model.files.gguf.pre_tokenizers import BEGIN_WITH_BOS, pre_tokenizer
from ridgeline.model.files.gguf.tokenizer import TokenType
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.model.files.safetensors_dir import load_directory
from ridgeline.model.files.sentence_transformers import check_dense
from ridgeline.model.files.tensors import Checkpoint, Dense, ModelFileError, naming, refuse_pointer

_BEGINNING_BYTES = 64
_DENSE = ("dense_2.weight", "dense_3.weight")  # what vectors go through, in order
_OF_THE_TOKENIZER = ("tokenizer.", "general.architecture")
# A control token with one of these texts ends a turn, whatever the file's eos is.
_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
    }
)
# In files of Gemma 4 these end an answer, whatever their types; behind the last, the result of a
# call is to come.
_ENDS_OF_GEMMA_4 = ("<eos>", "<turn|>", "<|tool_response>")


def load_checkpoint(path: Path) -> Checkpoint:
    """Open the model at ``path``: a .gguf file (or a part of one), or a Hugging Face directory.

    Weights are mapped, not read, except for rows that must move.

    Raises:
        ModelFileError: nothing is there, or it is damaged, hostile or not supported.
    """
    if path.is_dir():
        return load_directory(path)
    if not path.is_file():
        raise ModelFileError(f"{path}: no such model file or directory")
    with naming(path), path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    refuse_pointer(path, beginning)
    magic = beginning[: len(MAGIC)]
    if not magic:
        raise ModelFileError(f"{path}: the file is empty; fetch it again")
    if magic != MAGIC:
        raise ModelFileError(f"{path}: not a GGUF file; {_way_out(path.suffix)}")

    metadata, raw = read_gguf_parts(path)
    path = next(part_paths(path))
    config = ConfigReader(metadata, str(path))
    is_dense = config.text("general.architecture") == "gemma-embedding"
    names = [name for name in _DENSE if is_dense and name in raw]
    dense = tuple(Dense(raw[name]) for name in names)
    of_model = {name: tensor for name, tensor in raw.items() if name not in names}
    notes: list[str] = []
    arch, tensors = model_from_gguf(metadata, of_model, str(path), notes.append)
    check_dense(dense, arch.hidden_size, path)
    kind = config.text("tokenizer.ggml.model")
    bos, begins, end_ids = _around_text(config, kind, arch.vocab_size)
    return Checkpoint(
        path=path,
        arch=arch,
        tensors=tensors,
        eos_ids=eos_ids_of(config, arch.vocab_size),
        bos_id=bos[0] if bos else None,
        begin_ids=tuple(bos) if begins else (),
        chat_template=config.text("tokenizer.chat_template", "") or None,
        tool_template=config.text("tokenizer.chat_template.tool_use", "") or None,
        family=config.text("general.architecture"),
        tokenizer={k: v for k, v in metadata.items() if k.startswith(_OF_THE_TOKENIZER)},
        end_ids=tuple(end_ids),
        dense=dense,
        contents=FileDigests({part.name: part for part in part_paths(path)}),
        notes=tuple(notes),
    )


def _way_out(suffix: str) -> str:
    if suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return "pickles can run any code and are never read; use a GGUF or safetensors version"
    if suffix in (".safetensors", ".json"):
        return "give the directory that holds config.json and the safetensors files"
    return "give a .gguf file or a Hugging Face directory; if this was one, fetch it again"


def _token_id(config: ConfigReader, role: str, vocab_size: int) -> list[int]:
    """Return the id that the file gives to ``role``; writers use all ones for "none"."""
    value: Any = config.get(f"tokenizer.ggml.{role}_token_id")
    return [value] if type(value) is int and 0 <= value < vocab_size else []


def _around_text(
    config: ConfigReader, kind: str, vocab_size: int
) -> tuple[list[int], bool, list[int]]:
    """Return the BOS id, whether it begins a text, and what ends one; a file need not say them.

    "add_sep_token" is of pairs alone, which no GGUF file that runs reads together.
    """
    bos = _token_id(config, "bos", vocab_size)
    if kind == "bert":  # [CLS] and [SEP], always; without a number they have those of BERT
        first = bos or _token_id(config, "cls", vocab_size) or [101]
        return first, True, _token_id(config, "seperator", vocab_size) or [102]  # sic
    first = bos or ([1] if kind == "llama" else [])
    begins = kind == "llama" or pre_tokenizer(config.values) in BEGIN_WITH_BOS
    last = _token_id(config, "eos", vocab_size) or ([1] if kind == "t5" else [])
    ends = config.flag("tokenizer.ggml.add_eos_token", kind == "t5")
    begins = config.flag("tokenizer.ggml.add_bos_token", begins) or kind == "gemma4"
    return first, begins, last if ends else []  # early files of Gemma 4 wrongly say false


def eos_ids_of(config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """Return every token that ends an answer by a GGUF file's keys, its own eos first."""
    ids = [i for role in ("eos", "eot", "eom") for i in _token_id(config, role, vocab_size)]
    tokens, types = (config.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, np.ndarray):  # the tokenizer checks them
        kinds = types[: min(len(tokens), vocab_size)]
        control = np.flatnonzero(kinds == TokenType.CONTROL).tolist()
        ids += [i for i in control if tokens[i] in _END_OF_TURN]
        if config.get("tokenizer.ggml.model") == "gemma4":
            ids += [tokens.index(end) for end in _ENDS_OF_GEMMA_4 if end in tokens]
    return tuple(dict.fromkeys(ids))
