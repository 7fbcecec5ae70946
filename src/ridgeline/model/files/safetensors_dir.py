"""Model directories in Hugging Face layout: config.json, safetensors, tokenizer and templates.

Weights are mapped, not read. This module does not know what the names of tensors mean, nor which
file says what of text.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ridgeline.model.files.families import (
    BESIDE,
    architecture,
    model_from_config,
    with_quantization,
)
from ridgeline.model.files.folder import MAX_JSON_BYTES, Folder, parse_object
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.model.files.quantized import read_quantized
from ridgeline.model.files.sentence_transformers import DenseStep, check_dense, steps_of
from ridgeline.model.files.tensors import (
    Checkpoint,
    Dense,
    ModelFileError,
    Tensor,
    naming,
    refuse_pointer,
)
from ridgeline.model.files.text_files import text_facts

_ITEM_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1,
}  # fmt: skip
_POINTER_BYTES = 200  # a pointer of git-lfs is no longer
_INDEX = "model.safetensors.index.json"
_NUMBERS = ".position_ids"


def load_directory(path: Path) -> Checkpoint:
    """Open the model directory at ``path``.

    Raises:
        ModelFileError: something is missing, damaged, hostile or not supported.
    """
    folder = Folder(path)
    config = folder.json("config.json")
    if config is None:
        raise ModelFileError(f"{path}: no config.json, {_what_it_is(path)}")
    if (beside := folder.json(BESIDE)) is not None:
        config = with_quantization(config, beside, str(path))
    tokenizer = folder.find("tokenizer.json")
    if tokenizer is None:
        raise ModelFileError(
            f"{path}: no tokenizer.json beside config.json: fetch it from where the model is from, "
            "or save the tokenizer again with use_fast=True"
        )
    quantized = read_quantized(config, read_weights(folder), str(path))
    notes: list[str] = []
    arch, tensors = model_from_config(
        quantized.config, quantized.tensors, str(path), quantized.spare, notes.append
    )
    steps = steps_of(folder.read, path)
    if steps is not None:
        arch = replace(arch, pooling=steps.pooling)
    dense = tuple(_dense(folder, step) for step in steps.dense) if steps else ()
    check_dense(dense, arch.hidden_size, path)
    text = text_facts(folder, config, arch.vocab_size)
    if arch.num_segments > 1 and text.between_ids:
        arch = replace(arch, separator=text.between_ids[0])
    return Checkpoint(
        path=path,
        arch=arch,
        tensors=tensors,
        eos_ids=text.eos_ids,
        bos_id=text.bos_id,
        begin_ids=text.begin_ids,
        chat_template=text.chat_template,
        tool_template=text.tool_template,
        tokenizer=tokenizer,
        family=architecture(config),
        generation_defaults=text.sampling,
        between_ids=text.between_ids,
        normalises=steps is None or steps.normalises,
        dense=dense,
        end_ids=text.end_ids,
        quantization=quantized.description,
        contents=FileDigests(folder.paths),
        notes=(*notes, *text.notes),
    )


def _what_it_is(path: Path) -> str:
    files = sorted(file.name for file in path.glob("*.gguf"))
    if files:
        return f"but {files[0]}: give the path of that file"
    return "so not a Hugging Face model directory: give one, or a .gguf file"


def read_stored(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config of a directory and its tensors as they are stored.

    Raises:
        ModelFileError: something is missing or damaged.
    """
    folder = Folder(path)
    return folder.json("config.json") or {}, read_weights(folder)


def read_weights(folder: Folder) -> dict[str, Tensor]:
    """Return all tensors of the directory under their files' names."""
    single = folder.find("model.safetensors")
    if single is not None:
        return map_safetensors(single)
    index = folder.json(_INDEX)
    if index is None:
        _refuse_other_weights(folder.path)
    weight_map = index.get("weight_map")
    if type(weight_map) is not dict or not all(type(v) is str for v in weight_map.values()):
        raise ModelFileError(f"{folder.path / _INDEX}: weight_map does not map names to files")
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        target = folder.find(shard)
        if target is None:
            raise ModelFileError(f"{folder.path / shard}: the index names it, but it is missing")
        tensors |= {n: t for n, t in map_safetensors(target).items() if weight_map.get(n) == shard}
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        shard = weight_map[missing[0]]
        raise ModelFileError(f"{folder.path / shard}: tensor {missing[0]!r} is missing")
    return tensors


def _refuse_other_weights(path: Path) -> NoReturn:
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise ModelFileError(
            f"{path}: {pickles[0]} is a pickle, which can run any code when it is opened, and is "
            "never read; fetch the model's safetensors or GGUF version"
        )
    raise ModelFileError(f"{path}: neither model.safetensors nor {_INDEX}; fetch the weights again")


def _dense(folder: Folder, step: DenseStep) -> Dense:
    name = f"{step.folder}/model.safetensors"
    path = folder.find(name)
    if path is None:
        raise ModelFileError(f"{folder.path / name}: modules.json names it, but it is missing")
    tensors = map_safetensors(path)
    unknown = sorted(tensors.keys() - {"linear.weight", "linear.bias"})
    if unknown or "linear.weight" not in tensors:
        problem = f"tensor {unknown[0]!r} is no part" if unknown else "linear.weight is missing"
        raise ModelFileError(f"{path}: {problem} of a dense layer")
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), step.squashes)


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """Map one safetensors file; return read-only views of its tensors.

    The library checks the header (sizes, offsets, no overlaps, no holes) and cannot hand out bf16
    to numpy, so the bytes are taken from a map of our own.
    """
    size = path.stat().st_size
    with naming(path), path.open("rb") as file:
        refuse_pointer(path, file.read(_POINTER_BYTES))
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size - 8, MAX_JSON_BYTES):
            raise ModelFileError(
                f"{path}: a header of {header_bytes} bytes in a file of {size}; fetch it again"
            )
        header = parse_object(file.read(header_bytes), path)
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: {error}; fetch it again") from None
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    raw: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
    header.pop("__metadata__", None)
    # Older files of encoders have the numbers 0, 1, 2, ... as a tensor.
    header = {name: entry for name, entry in header.items() if not name.endswith(_NUMBERS)}
    return {name: _view(raw, 8 + header_bytes, name, entry, path) for name, entry in header.items()}


def _view(
    raw: NDArray[np.uint8], data_begin: int, name: str, entry: dict[str, Any], path: Path
) -> Tensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in _ITEM_BYTES:
        supported = ", ".join(_ITEM_BYTES)
        raise ModelFileError(f"{path}: tensor {name!r} has type {dtype}; supported: {supported}")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    # Said by the library as well; said again because a JSON key may appear twice.
    if num_bytes == 0 or end - begin != num_bytes or data_begin + end > raw.size:
        raise ModelFileError(f"{path}: tensor {name!r} of shape {shape} has {end - begin} bytes")
    # A vector has one row per element, so that Tensor.rows selects elements of it.
    rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
    data = raw[data_begin + begin : data_begin + end].reshape(rows, num_bytes // rows)
    return Tensor(name, dtype, shape, data)
