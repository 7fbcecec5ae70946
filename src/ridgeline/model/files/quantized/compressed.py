"""compressed-tensors: integers packed or plain, FP8 and MXFP4, as llm-compressor writes them.

Layouts as compressed-tensors 0.20 writes them, and for zeros as before 0.10 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.encodings import BLOCK
from ridgeline.model.files.quantized.floats import microscaled, scaled_bytes, sizes_of_block
from ridgeline.model.files.quantized.parts import (
    Integers,
    Method,
    Parts,
    array,
    check_groups,
    in_groups,
    integers,
    matrix_shape,
    number_of_bits,
    part,
    unpacked,
)
from ridgeline.model.files.tensors import Tensor

_FLOATS = ("F16", "BF16", "F32")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense",
            "mxfp4-pack-quantized", "mixed-precision")  # fmt: skip
_WEIGHT_KEYS = frozenset((
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder",
    "dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
))  # fmt: skip


def compressed(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: compressed-tensors``."""
    config.get("quant_method")
    layout = config.text("format")
    groups = config.get("config_groups")
    if type(groups) is not dict or not groups:
        config.fail(f"config_groups is {groups!r}, not an object with groups")
    config.get("sparsity_config"), config.get("transform_config")
    sparsity = config.values.get("sparsity_config")
    if type(sparsity) is dict and sparsity.get("format", "dense") != "dense":
        config.fail(f"sparsity_config has format {sparsity['format']!r}; supported: dense")
    if config.values.get("transform_config"):
        config.fail("transform_config is set, which is not supported: it rotates activations")
    described = [_weights_of(config, name, group, layout) for name, group in groups.items()]
    blocks = {block for _, block in described if block}
    if len(blocks) > 1:
        config.fail("config_groups have blocks of different sizes, which is not supported")
    block = blocks.pop() if blocks else None

    def convert(module: str, parts: Parts, config: ConfigReader) -> Tensor:
        if ".weight_packed" not in parts:
            weight = parts.get(".weight")
            if weight is not None and weight.dtype == "F8_E4M3":
                return scaled_bytes(module, parts, ".weight_scale", block, config)
            return _plain(module, parts, config)
        if parts[".weight_packed"].dtype == "U8":
            outputs, half = shape = matrix_shape(parts, ".weight_packed", module, config)
            blocks = part(parts, ".weight_packed", module, config, shape, "U8")
            check_groups(config, module, 2 * half, half // 16, BLOCK)
            wanted = (outputs, half // 16)
            scales = part(parts, ".weight_scale", module, config, wanted, "U8")
            return microscaled(f"{module}.weight", (outputs, 2 * half), blocks, scales)
        return _packed(module, parts, config)

    ends = (".weight_packed", ".weight_scale")
    extra_ends = (".weight", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
    description = "; ".join(dict.fromkeys(description for description, _ in described))
    return Method(f"compressed-tensors ({description})", ends, (*ends, *extra_ends), convert)


def _weights_of(
    config: ConfigReader, name: str, group: Any, layout: str
) -> tuple[str, tuple[int, int] | None]:
    """Return words for a group's weights, and its blocks; refuse what does not run."""
    weights = group.get("weights") if type(group) is dict else None
    if type(weights) is not dict:
        config.fail(f"config_groups: {name!r} does not say how weights are quantised")
    own = str(group.get("format") or layout)
    if own not in _FORMATS:
        config.fail(f"format {own!r} is not supported; supported: {', '.join(_FORMATS)}")
    for key, value in weights.items():
        if value and key not in _WEIGHT_KEYS:
            config.fail(f"config_groups: {name!r} sets {key} of weights, which is not supported")
    inner = ConfigReader(weights, f"{config.where}: config_groups: {name}")
    kind, strategy = inner.text("type", "int"), inner.text("strategy", "tensor")
    if (kind, inner.integer("num_bits")) not in (("int", 4), ("int", 8), ("float", 8)) and (
        own != "mxfp4-pack-quantized"
    ):
        inner.fail(
            f"weights of type {kind!r} with {inner.integer('num_bits')} bits are not supported; "
            f"supported: int with 4 and 8 bits, float with 8"
        )
    if strategy not in ("tensor", "channel", "group", "block"):
        inner.fail(f"strategy is {strategy!r}; supported: tensor, channel, group, block")
    block = None
    description = f"{kind}{inner.integer('num_bits')} per {strategy}"
    if strategy == "block":
        block = sizes_of_block(inner, "block_structure", weights.get("block_structure"))
    if strategy == "group":
        size = inner.integer("group_size")
        description = f"{kind}{inner.integer('num_bits')}, {in_groups(size)}"
    return description, block


def _scales(
    module: str, parts: Parts, config: ConfigReader, outputs: int, inputs: int, *, ordered: bool
) -> Tensor:
    """Return the scales of an integer matrix: one, one per output, or one per group."""
    scales = parts.get(".weight_scale")
    shape = scales.shape if scales is not None else (outputs, 1)
    if shape in ((), (1,)):
        check_groups(config, module, inputs, 1, -1)
        return part(parts, ".weight_scale", module, config, shape, *_FLOATS)
    wanted = (outputs, shape[-1] if len(shape) == 2 else 1)
    if ordered:
        check_groups(config, module, inputs, wanted[1], None)
    return part(parts, ".weight_scale", module, config, wanted, *_FLOATS)


def _packed(module: str, parts: Parts, config: ConfigReader) -> Tensor:
    """Return a matrix whose weights are packed into words of 32 bits, input by input."""
    outputs, num_words = matrix_shape(parts, ".weight_packed", module, config)
    words = part(parts, ".weight_packed", module, config, (outputs, num_words), "I32")
    shape = array(part(parts, ".weight_shape", module, config, (2,), "I64", "I32"))
    inputs = int(shape[1])
    if int(shape[0]) != outputs or num_words * 32 % max(inputs, 1):
        config.fail(f"tensor {module + '.weight_shape'!r} is {shape.tolist()}, which does not fit "
                   f"({outputs}, {num_words}) words")  # fmt: skip
    bits = number_of_bits(config, num_words * 32 // max(inputs, 1), 4, 8)
    group_of = None
    if ".weight_g_idx" in parts:
        group_of = array(part(parts, ".weight_g_idx", module, config, (inputs,), "I32", "I64"))
    scales = _scales(module, parts, config, outputs, inputs, ordered=group_of is None)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    if group_of is not None:
        if not ((group_of >= 0) & (group_of < groups)).all():
            config.fail(f"tensor {module + '.weight_g_idx'!r} names groups that are not there")
        if (group_of == np.arange(inputs) * groups // inputs).all():
            group_of = None
            check_groups(config, module, inputs, groups, None)
    zeros = parts.get(".weight_zero_point")
    if zeros is not None:
        per_word = 32 // bits
        wanted = (outputs, groups) if zeros.dtype == "I8" else (-(-outputs // per_word), groups)
        zeros = part(parts, ".weight_zero_point", module, config, wanted, "I32", "I8")
    middle = 1 << (bits - 1)

    def zero() -> np.ndarray[Any, np.dtype[np.float32]] | float:
        if zeros is None:
            return float(middle)
        if zeros.dtype == "I8":
            return array(zeros).astype(np.float32) + np.float32(middle)
        return unpacked(array(zeros).T, bits)[:, :outputs].T.astype(np.float32)

    def read() -> Integers:
        scale = np.broadcast_to(scales.to_f32().reshape(-1, groups), (outputs, groups))
        return Integers(unpacked(array(words), bits), scale, zero())

    dtype = f"INT{bits}" + ("_ORDERED" if group_of is not None else "_ZERO" if zeros else "")
    return integers(f"{module}.weight", dtype, (outputs, inputs), _own(parts), read, group_of)


def _plain(module: str, parts: Parts, config: ConfigReader) -> Tensor:
    """Return a matrix of signed bytes."""
    outputs, inputs = shape = matrix_shape(parts, ".weight", module, config)
    weight = part(parts, ".weight", module, config, shape, "I8")
    scales = _scales(module, parts, config, outputs, inputs, ordered=True)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    zeros = parts.get(".weight_zero_point")
    if zeros is not None:
        zeros = part(parts, ".weight_zero_point", module, config, scales.shape, "I8")
        zeros = zeros if array(zeros).any() else None

    def read() -> Integers:
        scale = np.broadcast_to(scales.to_f32().reshape(-1, groups), (outputs, groups))
        zero: Any = 128.0
        if zeros is not None:
            zero = array(zeros).astype(np.float32).reshape(-1, groups) + np.float32(128)
        return Integers(array(weight).view(np.uint8) ^ np.uint8(128), scale, zero)

    dtype = "INT8_ZERO" if zeros else "INT8"
    return integers(f"{module}.weight", dtype, shape, _own(parts), read)


def _own(parts: Parts) -> Mapping[str, Tensor]:
    """Return the parts that are weights, scales and zeros."""
    return {end: tensor for end, tensor in parts.items() if end != ".weight_shape"}
