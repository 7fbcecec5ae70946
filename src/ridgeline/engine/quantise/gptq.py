"""A directory of safetensors whose matrices are GPTQ's words of 4 bits, as vLLM and others read it.

AutoGPTQ's layout: symmetric, groups of neighbouring inputs. Embedding, head and norms stay.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.engine.quantise.grids import Form, Whole, fit_symmetric
from ridgeline.engine.quantise.job import QuantisedFile, QuantiseOptions, Report, Requantiser
from ridgeline.engine.quantise.source import SourceFile
from ridgeline.model.files.tensors import ModelFileError, Tensor, naming
from ridgeline.system.machine import check_room

Bytes = NDArray[np.uint8]
Parts = dict[str, tuple[str, tuple[int, ...], int]]  # name in the file: type, shape, bytes

TARGET = "int4-gptq"
_TYPE = "INT4"
_GROUPS = (128, 64, 32)
_BITS, _PER_WORD = 4, 8
_ZEROS = 0x77777777  # the middle, 8, less one as AutoGPTQ stores it
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


def quantise_directory(
    source: SourceFile, out: Path, options: QuantiseOptions, report: Report
) -> QuantisedFile:
    """Write the directory ``out``, whole or not at all.

    Raises:
        ValueError: a tensor's weights are not finite, or no group size suits the model.
        DiskFull: the disk has too little room for it.
        OSError: it cannot be written.
    """
    converted = {place.name for place in source.places.values()}
    group = _group_size([source.raw[name] for name in sorted(converted)])
    form = Form(_TYPE, group, group, 0, 15, fit_symmetric(8, group, signed=False), _words)
    types = {n: _TYPE if n in converted else tensor.dtype for n, tensor in source.raw.items()}
    work = Requantiser(source, options, types, {_TYPE: form}, report)
    # Less than the file, as what is not converted stays as it is.
    num_bytes = sum(int(np.prod(source.raw[name].shape)) for name in converted) * _BITS // 8
    check_room(out.absolute().parent, num_bytes, out.name, "name another folder")
    folder = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}-"))
    try:
        _copy_rest(source.checkpoint.path, folder, group)
        with naming(out), (folder / "model.safetensors").open("wb") as file:
            work.write(partial(SafetensorsOut, file, source.raw, converted, group))
            os.fsync(file.fileno())
        folder.chmod(0o755)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return work.done(0)


def _group_size(tensors: list[Tensor]) -> int:
    for group in _GROUPS:
        if all(t.shape[1] % group == 0 and t.shape[0] % _PER_WORD == 0 for t in tensors):
            return group
    wrong = next(t for t in tensors if t.shape[1] % _GROUPS[-1] or t.shape[0] % _PER_WORD)
    raise ModelFileError(
        f"tensor {wrong.name!r} of shape {wrong.shape} cannot be {TARGET}: inputs must be a "
        f"multiple of {_GROUPS[-1]}, and outputs of {_PER_WORD}"
    )


def _copy_rest(model: Path, folder: Path, group: int) -> None:
    """Copy what is beside the weights, and say in config.json how they are quantised."""
    for path in sorted(model.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": _BITS, "group_size": group, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "lm_head": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _words(q: Whole, numbers: tuple[NDArray[np.generic], ...]) -> Bytes:
    """Return a matrix's qweight, qzeros, scales and g_idx, one behind the other."""
    (scales,) = numbers
    groups, inputs = scales.shape[1], q.shape[1]
    parts: list[NDArray[Any]] = [
        packed(q, _BITS).T,
        np.full((groups, len(q) // _PER_WORD), _ZEROS, np.int32),
        scales.T,
        (np.arange(inputs) // (inputs // groups)).astype(np.int32),
    ]
    return np.concatenate([np.frombuffer(part.tobytes(), np.uint8) for part in parts])


class SafetensorsOut:
    """A safetensors file that is being written: each of a model's tensors when it is ready."""

    def __init__(
        self, file: IO[bytes], raw: Mapping[str, Tensor], converted: set[str], group: int
    ) -> None:
        """Write the header and take the whole file's room. Raises OSError: the disk is full."""
        self._file, self._offsets = file, dict[str, int]()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in raw.items():
            self._offsets[name] = end
            parts = _parts(name, tensor, group) if name in converted else {
                name: (tensor.dtype, tensor.shape, tensor.nbytes)
            }  # fmt: skip
            for part, (dtype, shape, num_bytes) in parts.items():
                offsets = [end, end + num_bytes]
                header[part] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
                end += num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self.num_bytes = self._begin + end
        os.posix_fallocate(file.fileno(), 0, self.num_bytes)
        file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, rows: Bytes, begin_bytes: int = 0) -> None:
        """Write bytes of a tensor, which begin ``begin_bytes`` after its first."""
        self._file.seek(self._begin + self._offsets[name] + begin_bytes)
        self._file.write(np.ascontiguousarray(rows).data)


def _parts(name: str, tensor: Tensor, group: int) -> Parts:
    module = name.removesuffix(".weight")
    outputs, inputs = tensor.shape
    groups, words = inputs // group, outputs // _PER_WORD
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {
        "qweight": ("I32", (inputs // _PER_WORD, outputs), 4),
        "qzeros": ("I32", (groups, words), 4),
        "scales": ("F16", (groups, outputs), 2),
        "g_idx": ("I32", (inputs,), 4),
    }
    return {
        f"{module}.{end}": (dtype, shape, item * math.prod(shape))
        for end, (dtype, shape, item) in shapes.items()
    }


def packed(values: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Return the 32-bit words of each row's values."""
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    each = values.astype(np.uint32).reshape(len(values), -1, per_word) << shifts
    words: NDArray[np.uint32] = np.bitwise_or.reduce(each, axis=2)
    return words.view(np.int32)
