"""Importance matrices as llama.cpp has them: of each input of a matrix, the mean of its squares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.gguf.write import GGUFOut, TensorRoom, number, string, strings
from ridgeline.model.files.tensors import ModelFileError, Tensor
from ridgeline.system.machine import write_whole

Floats = NDArray[np.float32]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_CHUNK = 512  # tokens


def read_imatrix(path: Path, raw: Mapping[str, Tensor]) -> dict[str, Floats]:
    """Return the importance of inputs by names of tensors, those of all experts taken together.

    Raises:
        ModelFileError: it is no importance matrix, damaged, or of another model.
    """
    values, tensors = read_gguf(path)
    reader = ConfigReader(values, str(path))
    if reader.text("general.type", "") != "imatrix":
        reader.fail("general.type is not imatrix: this is no importance matrix")
    importance: dict[str, Floats] = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        matrix = name.removesuffix(_SUMS)
        if matrix not in raw:
            reader.fail(f"it has {matrix!r}, and the model has not: is it of this model?")
        if sums.shape[-1] != raw[matrix].shape[-1]:
            reader.fail(f"{matrix!r} has {sums.shape[-1]} inputs there, and "
                       f"{raw[matrix].shape[-1]} in the model")  # fmt: skip
        counts = tensors.get(matrix + _COUNTS)
        if counts is None:
            reader.fail(f"tensor {matrix + _COUNTS!r} is missing")
        total = counts.to_f32().sum()
        mean = sums.to_f32().reshape(-1, sums.shape[-1]).sum(axis=0) / max(float(total), 1.0)
        if not (np.isfinite(mean).all() and (mean >= 0).all()):
            reader.fail(f"tensor {name!r} has values that are no mean squares")
        if total > 0 and mean.any():
            importance[matrix] = (mean + np.float32(1e-6) * mean.mean()).astype(np.float32)
    if not importance:
        raise ModelFileError(f"{path}: the importance matrix is empty")
    return importance


def write_imatrix(path: Path, spreads: Mapping[str, Floats], num_tokens: int, dataset: str) -> None:
    """Write mean squares of inputs, by names of tensors, that a text of ``num_tokens`` showed."""
    metadata = {
        "general.type": string("imatrix"),
        "imatrix.datasets": strings([dataset]),
        "imatrix.chunk_count": number("u32", max(1, num_tokens // _CHUNK)),
        "imatrix.chunk_size": number("u32", _CHUNK),
    }
    arrays: dict[str, Floats] = {}
    for name, mean in spreads.items():
        arrays[name + _SUMS] = (mean * np.float32(num_tokens)).reshape(1, -1)
        arrays[name + _COUNTS] = np.full((1, 1), num_tokens, np.float32)
    rooms = {name: TensorRoom("F32", array.shape) for name, array in arrays.items()}

    def write(file: IO[bytes]) -> None:
        out = GGUFOut(file, metadata, rooms)
        for name, array in arrays.items():
            out.put(name, array.view(np.uint8))

    write_whole(path, write, is_private=False)
