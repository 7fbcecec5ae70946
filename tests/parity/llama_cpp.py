"""llama.cpp's converter and runtime, for files of tiny models: what else a GGUF file may mean.

Both come from the source of llama-cpp-python, which ``make test-parity-full`` builds; nothing of
them is kept here. Only the writer of vocabularies is replaced, for the models have no real one.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import conversion  # of llama.cpp, on PYTHONPATH
import gguf
import llama_cpp
import numpy as np
from conversion.base import ModelBase, ModelType, get_model_architecture

from ridgeline.model.files.gguf.file import _TENSOR_TYPES
from tests.parity.gguf_files import add_vocabulary
from tests.parity.tiny_configs import VOCAB

_F32 = 0  # ggml's number
QUANTISED = [name for name, block, _ in _TENSOR_TYPES.values() if block > 1]
logging.disable(logging.WARNING)


def convert(directory: Path, path: Path) -> Path:
    """Write the model in ``directory`` as a GGUF file of float32, as llama.cpp converts it."""
    values = ModelBase.load_hparams(directory, False)
    name = get_model_architecture(values, ModelType.TEXT)
    original = conversion.get_model_class(name)
    kind = type(
        original.__name__, (original,), {"set_vocab": _set_vocab, "model_arch": original.model_arch}
    )
    kind(directory, gguf.LlamaFileType.ALL_F32, path, eager=True).write()
    return path


def _set_vocab(converter: Any) -> None:
    add_vocabulary(converter.gguf_writer)
    converter.gguf_writer.add_vocab_size(VOCAB)


def logprobs(path: Path, ids: list[int], room: int) -> np.ndarray:
    """Return llama.cpp's logprobs behind each of these tokens, with a cache in float32."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=room,
        n_batch=room,
        n_ubatch=room,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=_F32,
        type_v=_F32,
        flash_attn=False,
        yarn_attn_factor=-1.0,  # of each the file's
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
        verbose=False,
    )
    try:
        model.eval(ids)
        logits = np.array(model.scores[: len(ids)], np.float64)
    finally:
        model.close()
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class _Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("size_bytes", ctypes.c_size_t),
        ("is_quantised", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


class Ggml:
    """The quantisers of llama.cpp's library of tensors."""

    def __init__(self) -> None:
        """Find the library beside llama-cpp-python."""
        folder = Path(llama_cpp.__file__).parent / "lib"
        self._lib = ctypes.CDLL(str(folder / "libggml-base.so"))
        self._lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        self._lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self._lib.ggml_quantize_chunk.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        )  # fmt: skip

    def quantise(self, kind: int, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of float32 ``[rows, width]`` in a type of ggml, ``[rows, bytes]``."""
        traits = self._lib.ggml_get_type_traits(kind).contents
        rows = np.ascontiguousarray(rows, np.float32)
        of_row = rows.shape[1] // traits.block * traits.size_bytes
        packed = np.zeros((len(rows), of_row), np.uint8)
        weights = np.ones(rows.shape[1], np.float32)
        self._lib.ggml_quantize_chunk(
            kind, rows.ctypes.data, packed.ctypes.data, 0, *rows.shape, weights.ctypes.data
        )
        return packed

    def dequantise(self, kind: int, packed: np.ndarray) -> np.ndarray:
        """Return the float32 values of such bytes."""
        traits = self._lib.ggml_get_type_traits(kind).contents
        width = packed.shape[1] // traits.size_bytes * traits.block
        values = np.zeros((len(packed), width), np.float32)
        packed = np.ascontiguousarray(packed)
        traits.to_float(packed.ctypes.data, values.ctypes.data, values.size)
        return values
