"""Random quantised matrices as files store them, value by value, and what they stand for.

Layouts are written down here once more, in loops and from the formats' own descriptions, so that a
mistake in the code under test does not agree with itself. docs/results.md#models says how they
compare with the libraries that define them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Stored = dict[str, tuple[str, Array]]  # end of the name -> type in the file, values


class Example(NamedTuple):
    """A matrix's parts, its weights in float32, and its ``quantization_config``."""

    parts: Stored
    weights: Array
    config: dict[str, Any]


def write_safetensors(path: Path, tensors: Stored) -> None:
    """Write values as they are; the library cannot write bf16 and fp8 of numpy."""
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        content = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def words(values: Array, bits: int) -> Array:
    """Pack each row's values, the first into the lowest bits of a word."""
    per_word = 32 // bits
    out = np.zeros((len(values), values.shape[1] // per_word), np.uint32)
    for i in range(len(values)):
        for j in range(values.shape[1]):
            out[i, j // per_word] |= np.uint32(values[i, j]) << np.uint32(bits * (j % per_word))
    return out.view(np.int32)


def sizes(rng: np.random.Generator, shape: tuple[int, ...], bits: int = 4) -> Array:
    """Scales that make weights of such sizes that values in a model stay lively."""
    return rng.uniform(0.002, 0.03, shape) / (1 << bits - 4)


def zero_points(rng: np.random.Generator, shape: tuple[int, ...], bits: int = 4) -> Array:
    """Zeros near the middle, and a few at the ends."""
    middle = 1 << bits - 1
    out = rng.integers(middle * 3 // 4, middle * 5 // 4 + 1, shape)
    out.flat[::40], out.flat[20::40] = 1, 2 * middle - 1
    return out


def brain(values: Array) -> Array:
    """The bits of numbers cut to bf16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def of_brain(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def gptq(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    layout: str = "gptq",
    has_g_idx: bool = True,
) -> Example:
    """AutoGPTQ and GPTQModel: words along the inputs, zeros along the outputs and one too small."""
    outputs, inputs = shape
    groups = 1 if group == -1 else inputs // group
    q = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = zero_points(rng, (groups, outputs), bits)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = sizes(rng, (groups, outputs), bits).astype(np.float16)
    g_idx = np.arange(inputs) * groups // inputs
    if act_order:
        rng.shuffle(g_idx)
    less = 1 if layout == "gptq" else 0
    parts: Stored = {
        "qweight": ("I32", words(q.T, bits).T),
        "qzeros": ("I32", words(zeros - less, bits)),
        "scales": ("F16", scales),
        "g_idx": ("I32", g_idx.astype(np.int32)),
    }
    if not has_g_idx:
        del parts["g_idx"]
    weights = (q - zeros[g_idx]).astype(np.float32) * scales[g_idx].astype(np.float32)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order,
        "sym": symmetric, "checkpoint_format": layout, "damp_percent": 0.01,
    }  # fmt: skip
    return Example(parts, weights.T, config)


def awq(rng: np.random.Generator, shape: tuple[int, int], *, group: int = 32) -> Example:
    """AutoAWQ's GEMM: words along the outputs, whose nibbles are not in order."""
    outputs, inputs = shape
    q = rng.integers(0, 16, (inputs, outputs))
    zeros = zero_points(rng, (inputs // group, outputs))
    zeros[0, :4] = 0
    scales = sizes(rng, zeros.shape).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Array) -> Array:
        columns = [8 * word + order[i] for word in range(outputs // 8) for i in range(8)]
        return words(values[:, columns], 4)

    each = np.repeat(zeros, group, axis=0)
    weights = (q - each).astype(np.float32) * np.repeat(scales.astype(np.float32), group, axis=0)
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None,
    }  # fmt: skip
    parts: Stored = {
        "qweight": ("I32", packed(q)), "qzeros": ("I32", packed(zeros)), "scales": ("F16", scales),
    }  # fmt: skip
    return Example(parts, weights.T, config)


def _compressed(layout: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "quantization_status": "compressed", "kv_cache_scheme": None, "version": "0.12.2",
        "sparsity_config": {}, "transform_config": {}, "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "input_activations": activations,
                "output_activations": None, "format": layout,
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                    "group_size": None, "block_structure": None, "actorder": None,
                    "dynamic": False, "observer": "minmax", "observer_kwargs": {}, **weights,
                },
            },
        },
    }  # fmt: skip


def pack_quantized(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    plain_zeros: bool = False,
    act_order: bool = False,
) -> Example:
    """compressed-tensors W4A16 and W8A16: signed values, moved up, in words along the inputs."""
    outputs, inputs = shape
    groups, middle = inputs // group if group > 0 else 1, 1 << (bits - 1)
    q = rng.integers(-middle, middle, shape)
    zeros = np.zeros((outputs, groups), np.int64)
    if not symmetric:
        zeros = zero_points(rng, zeros.shape, bits) - middle
    scales = brain(sizes(rng, zeros.shape, bits))
    g_idx = np.arange(inputs) * groups // inputs
    parts: Stored = {
        "weight_packed": ("I32", words(q + middle, bits)),
        "weight_scale": ("BF16", scales),
        "weight_shape": ("I64", np.array(shape)),
    }
    if act_order:
        rng.shuffle(g_idx)
        parts["weight_g_idx"] = ("I32", g_idx.astype(np.int32))
    if not symmetric and plain_zeros:
        parts["weight_zero_point"] = ("I8", zeros.astype(np.int8))
    elif not symmetric:
        parts["weight_zero_point"] = ("I32", words((zeros + middle).T, bits).T)
    weights = (q - zeros[:, g_idx]).astype(np.float32) * of_brain(scales)[:, g_idx]
    scheme: dict[str, Any] = {"num_bits": bits, "symmetric": symmetric}
    scheme |= {"group_size": group} if group > 0 else {"strategy": "channel"}
    scheme |= {"actorder": "group"} if act_order else {}
    return Example(parts, weights, _compressed("pack-quantized", **scheme))


def int_quantized(
    rng: np.random.Generator, shape: tuple[int, int], *, per_tensor: bool = False
) -> Example:
    """compressed-tensors W8A8: signed bytes and a scale for each output, or for all."""
    q = rng.integers(-128, 128, shape).astype(np.int8)
    scales = brain(rng.uniform(0.0002, 0.003, (1,) if per_tensor else (shape[0], 1)))
    weights = q.astype(np.float32) * of_brain(scales)
    scheme = {"num_bits": 8, "strategy": "tensor" if per_tensor else "channel"}
    activations = {"num_bits": 8, "dynamic": True, "strategy": "token", "type": "int"}
    return Example(
        {"weight": ("I8", q), "weight_scale": ("BF16", scales)},
        weights,
        _compressed("int-quantized", activations, **scheme),
    )


def e4m3(byte: int) -> float:
    """The value of a byte: a sign, four bits of exponent around 7, three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> Example:
    """DeepSeek's and Qwen's blocks, one scale for all, or compressed-tensors' per output."""
    q = rng.integers(0, 256, shape).astype(np.uint8)
    q[(q & 127) == 127] = 0  # not a number
    values = np.array([e4m3(byte) for byte in range(256)], np.float32)[q]
    outputs, inputs = shape
    activations = {"num_bits": 8, "dynamic": True, "strategy": "token", "type": "float"}
    if kind == "block":
        scales = rng.uniform(1e-4, 8e-4, (-(-outputs // 64), -(-inputs // 32))).astype(np.float32)
        wide = np.repeat(np.repeat(scales, 64, axis=0), 32, axis=1)[:outputs, :inputs]
        config: dict[str, Any] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [64, 32], "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
        parts: Stored = {"weight": ("F8_E4M3", q), "weight_scale_inv": ("F32", scales)}
    elif kind == "tensor":
        scales = np.array(3e-4, np.float32)
        wide = scales
        config = {"quant_method": "fp8", "activation_scheme": "static"}
        parts = {"weight": ("F8_E4M3", q), "weight_scale": ("F32", scales)}
        parts["input_scale"] = ("F32", np.array(0.1, np.float32))
    else:
        bits = brain(rng.uniform(1e-4, 8e-4, (outputs, 1)))
        wide = of_brain(bits)
        scheme = {"num_bits": 8, "type": "float", "strategy": "channel"}
        config = _compressed("float-quantized", activations, **scheme)
        parts = {"weight": ("F8_E4M3", q), "weight_scale": ("BF16", bits)}
    return Example(parts, values * wide, config)


def mxfp4_values(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Bytes of two values each, the first in the low bits, exponents of 32, and the weights."""
    of_code = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    q = rng.integers(0, 16, shape)
    exponents = rng.integers(115, 122, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    values = np.array(of_code + [-value for value in of_code], np.float32)[q]
    scale = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=-1)
    packed = (q[..., ::2] | q[..., 1::2] << 4).astype(np.uint8)
    return packed, exponents, (values * scale).astype(np.float32)


def mxfp4_packed(rng: np.random.Generator, shape: tuple[int, int]) -> Example:
    """compressed-tensors MXFP4."""
    packed, exponents, weights = mxfp4_values(rng, shape)
    scheme = {"num_bits": 4, "type": "float", "group_size": 32}
    parts: Stored = {"weight_packed": ("U8", packed), "weight_scale": ("U8", exponents)}
    return Example(parts, weights, _compressed("mxfp4-pack-quantized", **scheme))


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def nf4(rng: np.random.Generator, shape: tuple[int, int], *, twice: bool = False) -> Example:
    """bitsandbytes: blocks of 64 of all weights in a row, the first of a byte in the high bits."""
    count = shape[0] * shape[1]
    q = rng.integers(0, 16, count)
    largest = rng.uniform(0.02, 0.25, count // 64).astype(np.float32)
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape),
    }  # fmt: skip
    parts: Stored = {
        "weight": ("U8", (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None]),
        "weight.absmax": ("F32", largest),
        "weight.quant_map": ("F32", np.array(NF4, np.float32)),
    }
    if twice:
        codes = rng.integers(0, 256, count // 64).astype(np.uint8)
        table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.02, 0.1, -(-len(codes) // 16)).astype(np.float32)
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.125}
        largest = table[codes] * np.repeat(outer, 16)[: len(codes)] + np.float32(0.125)
        parts["weight.absmax"] = ("U8", codes)
        parts["weight.nested_absmax"] = ("F32", outer)
        parts["weight.nested_quant_map"] = ("F32", table)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts["weight.quant_state.bitsandbytes__nf4"] = ("U8", text)
    weights = np.array(NF4, np.float32)[q] * np.repeat(largest, 64)
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": twice,
        "llm_int8_threshold": 6.0, "_load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    return Example(parts, weights.reshape(shape), config)


def int8(rng: np.random.Generator, shape: tuple[int, int]) -> Example:
    """bitsandbytes: signed bytes, and the largest weight of each output."""
    q = rng.integers(-127, 128, shape).astype(np.int8)
    largest = rng.uniform(0.02, 0.25, shape[0]).astype(np.float32)
    parts: Stored = {
        "weight": ("I8", q),
        "SCB": ("F32", largest),
        "weight_format": ("U8", np.array(0, np.uint8)),
    }
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    weights = q.astype(np.float32) * (largest / np.float32(127))[:, None]
    return Example(parts, weights, config)


def hqq(rng: np.random.Generator, shape: tuple[int, int], *, bits: int = 4) -> Example:
    """HQQ along axis 1: groups one below the other, the first half of them in the high bits."""
    group = 32
    q = rng.integers(0, 1 << bits, (shape[0] * shape[1] // group, group)).astype(np.uint8)
    scale = sizes(rng, (len(q), 1), bits).astype(np.float16)
    zero = ((1 << bits - 1) + rng.uniform(-2, 2, (len(q), 1))).astype(np.float16)
    packed = q if bits == 8 else q[: len(q) // 2] << 4 | q[len(q) // 2 :]

    def whole(value: int) -> tuple[str, Array]:
        return "I32", np.array(value, np.int32)

    parts: Stored = {
        "W_q": ("U8", packed), "scale": ("F16", scale), "zero": ("F16", zero),
        "shape": ("I64", np.array(shape)), "nbits": whole(bits), "axis": whole(1),
        "group_size": whole(group), "packing": ("U8", np.frombuffer(b"4bit_u8", np.uint8)),
        "view_as_float": ("U8", np.array(0, np.uint8)), "quant_zero": ("U8", np.array(0, np.uint8)),
    }  # fmt: skip
    weights = (q - zero.astype(np.float32)) * scale.astype(np.float32)
    quant = {"weight_quant_params": {"nbits": bits, "group_size": group, "axis": 1}}
    config = {"quant_method": "hqq", "quant_config": quant, "skip_modules": ["lm_head"]}
    return Example(parts, weights.reshape(shape).astype(np.float32), config)
