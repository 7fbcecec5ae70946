"""FP8, bitsandbytes and MXFP4: small floats, or levels of a table, with a scale for each group.

Layouts as DeepSeek V3, Qwen3 and compressed-tensors store FP8; bitsandbytes 0.4x its states; and
gpt-oss its experts. Formats: Micikevicius et al., FP8 formats for deep learning, 2022; Dettmers et
al., QLoRA, 2023, and LLM.int8(), 2022; Open Compute Project, Microscaling Formats 1.0, 2023.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.encodings import BLOCK, NF4_LEVELS, Bytes, Floats, encode, nibbles
from ridgeline.model.files.quantized.parts import (
    Integers,
    Method,
    Parts,
    array,
    check_groups,
    file_bytes,
    integers,
    matrix_shape,
    part,
)
from ridgeline.model.files.tensors import Tensor

_FLOATS = ("F16", "BF16", "F32")
_MXFP4_ENDS = ("_blocks", "_scales")


def fp8(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: fp8`` and ``fbgemm_fp8``."""
    config.get("quant_method")
    if config.text("fmt", "e4m3") != "e4m3":
        config.fail(f"fmt is {config.get('fmt')!r}; supported: e4m3")
    block = config.get("weight_block_size")
    if block is not None:
        block = sizes_of_block(config, "weight_block_size", block)

    def convert(module: str, parts: Parts, config: ConfigReader) -> Tensor:
        end = ".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale"
        return scaled_bytes(module, parts, end, block, config)

    ends = (".weight_scale_inv", ".weight_scale")
    kind = f"blocks of {block[0]} x {block[1]}" if block else "a scale per matrix or output"
    return Method(f"FP8 (e4m3, {kind})", ends, (".weight", *ends), convert)


def sizes_of_block(config: ConfigReader, key: str, value: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a block of weights."""
    if type(value) is not list or len(value) != 2 or any(type(n) is not int for n in value):
        config.fail(f"{key} is {value!r}, not two whole numbers")
    outputs, inputs = value
    if outputs < 1 or inputs < 1 or inputs % BLOCK:
        config.fail(f"{key} is {value!r}; supported: multiples of {BLOCK} inputs")
    return outputs, inputs


def scaled_bytes(
    module: str, parts: Parts, end: str, block: tuple[int, int] | None, config: ConfigReader
) -> Tensor:
    """Return a matrix of FP8 whose scales, named by ``end``, are of blocks, outputs, or all."""
    outputs, inputs = shape = matrix_shape(parts, ".weight", module, config)
    weight = part(parts, ".weight", module, config, shape, "F8_E4M3")
    if inputs % BLOCK:
        config.fail(f"{module!r} has {inputs} inputs; supported: multiples of {BLOCK}")
    scales_shape = parts[end].shape
    every = block or (1, inputs) if math.prod(scales_shape) > 1 or block else (outputs, inputs)
    wanted = (-(-outputs // every[0]), -(-inputs // every[1]))
    if scales_shape not in (wanted, wanted[:1] if wanted[1] == 1 else wanted, ()):
        config.fail(f"tensor {module + end!r} has shape {scales_shape}, wanted {wanted}")
    scales = part(parts, end, module, config, scales_shape, *_FLOATS)

    def make() -> Bytes:
        by_block = scales.to_f32().reshape(wanted)
        rows = np.arange(outputs) // every[0]
        columns = np.arange(0, inputs, BLOCK) // every[1]
        values = array(weight).view(np.uint8).reshape(outputs, -1, BLOCK)
        return encode(by_block[rows][:, columns], None, values)

    own = {".weight": weight, end: scales}
    return Tensor.converted(f"{module}.weight", "FP8", shape, file_bytes(own), make)


def mxfp4(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: mxfp4``: stacks of experts in blocks of 32."""
    config.get("quant_method")

    def convert(module: str, parts: Parts, config: ConfigReader) -> Tensor:
        blocks_shape = parts["_blocks"].shape
        if len(blocks_shape) != 4 or blocks_shape[3] != BLOCK // 2:
            config.fail(f"tensor {module + '_blocks'!r} has shape {blocks_shape}, wanted (experts, "
                       f"outputs, blocks, {BLOCK // 2})")  # fmt: skip
        blocks = part(parts, "_blocks", module, config, blocks_shape, "U8")
        scales = part(parts, "_scales", module, config, blocks_shape[:3], "U8")
        shape = (*blocks_shape[:2], blocks_shape[2] * BLOCK)
        return microscaled(module, shape, blocks, scales)

    return Method("MXFP4", _MXFP4_ENDS[:1], _MXFP4_ENDS, convert)


def microscaled(name: str, shape: tuple[int, ...], blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a matrix, or a stack, of MXFP4: two weights in a byte, the first in the low bits."""

    def make() -> Bytes:
        packed = array(blocks).view(np.uint8).reshape(-1, shape[-1] // 2)
        q = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
        exponents = array(scales).view(np.uint8).reshape(len(packed), -1, 1)
        return np.concatenate([exponents, nibbles(q)], axis=2).reshape(len(packed), -1)

    parts = {"blocks": blocks, "scales": scales}
    return Tensor.converted(name, "MXFP4", shape, file_bytes(parts), make)


# --- bitsandbytes ------------------------------------------------------------------------------

_STATE = ".weight.quant_state.bitsandbytes__"


def bitsandbytes(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: bitsandbytes``: NF4, or int8."""
    config.get("quant_method")
    config.get("_load_in_4bit"), config.get("_load_in_8bit")
    is_four = config.flag("load_in_4bit", False)
    if is_four == config.flag("load_in_8bit", False):
        config.fail("exactly one of load_in_4bit and load_in_8bit must be true")
    if not is_four:
        return Method("bitsandbytes int8", (".SCB",), (".weight", ".SCB", ".weight_format"), _int8)
    kind = config.text("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        config.fail(f"bnb_4bit_quant_type is {kind!r}; supported: nf4")
    names = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    parts = (*(f".weight{name}" for name in names), f"{_STATE}nf4")
    return Method("bitsandbytes NF4", (".weight.absmax",), parts, _nf4)


def _int8(module: str, parts: Parts, config: ConfigReader) -> Tensor:
    outputs, inputs = shape = matrix_shape(parts, ".weight", module, config)
    weight = part(parts, ".weight", module, config, shape, "I8")
    largest = part(parts, ".SCB", module, config, (outputs,), "F32")
    order = parts.get(".weight_format")
    if order is not None and array(order).any():
        config.fail(
            f"tensor {module + '.weight_format'!r} names an order other than by rows, which is not "
            f"supported"
        )
    check_groups(config, module, inputs, 1, -1)

    def read() -> Integers:
        q = array(weight).view(np.uint8) ^ np.uint8(128)
        return Integers(q, largest.to_f32()[:, None] / np.float32(127), 128.0)

    return integers(f"{module}.weight", "INT8", shape, {".weight": weight, ".SCB": largest}, read)


def _nf4(module: str, parts: Parts, config: ConfigReader) -> Tensor:
    state = _state(module, parts, config)
    (outputs, inputs), size = state["shape"], state["blocksize"]
    count = outputs * inputs
    if inputs % BLOCK or size % BLOCK:
        config.fail(f"{module!r} has {inputs} inputs in blocks of {size}; supported: multiples of "
                   f"{BLOCK}")  # fmt: skip
    packed = parts.get(".weight")
    if packed is None or packed.nbytes * 2 != count:
        config.fail(f"tensor {module + '.weight'!r} does not have the {count} weights that its "
                   f"quant_state claims")  # fmt: skip
    levels = part(parts, ".weight.quant_map", module, config, (16,), "F32")
    if not np.allclose(levels.to_f32(), NF4_LEVELS, atol=1e-6):
        config.fail(f"tensor {module + '.weight.quant_map'!r} is not the table of NF4")
    num_blocks = -(-count // size)
    is_nested = "nested_blocksize" in state
    of_blocks = part(
        parts, ".weight.absmax", module, config, (num_blocks,), "U8" if is_nested else "F32"
    )
    nested: tuple[Tensor, ...] = ()
    if is_nested:
        num_nested = -(-num_blocks // state["nested_blocksize"])
        lengths = {".weight.nested_absmax": num_nested, ".weight.nested_quant_map": 256}
        nested = tuple(
            part(parts, end, module, config, (length,), "F32") for end, length in lengths.items()
        )

    def largest() -> Floats:
        if not is_nested:
            return of_blocks.to_f32()
        outer, table = (tensor.to_f32() for tensor in nested)
        which = np.arange(num_blocks) // state["nested_blocksize"]
        scaled: Floats = table[array(of_blocks).view(np.uint8)] * outer[which]
        return scaled + np.float32(state["nested_offset"])

    def make() -> Bytes:
        each = packed.data.reshape(outputs, -1)
        q = np.stack([each >> 4, each & 15], axis=2).reshape(outputs, inputs)
        which = np.arange(0, count, BLOCK) // size
        return encode(largest()[which].reshape(outputs, -1), None, nibbles(q))

    name = f"{module}.weight"
    return Tensor.converted(name, "NF4", (outputs, inputs), file_bytes(parts), make)


def _state(module: str, parts: Parts, config: ConfigReader) -> dict[str, Any]:
    """Return what a matrix of NF4 says of itself, checked."""
    name = f"{_STATE}nf4"
    tensor = parts.get(name)
    if tensor is None:
        config.fail(f"tensor {module + name!r} is missing")
    try:
        state = json.loads(tensor.data.tobytes())
        shape, sizes = state["shape"], [state["blocksize"]]
        if "nested_blocksize" in state:
            sizes.append(state["nested_blocksize"])
            numbers = [float(state["nested_offset"])]
        else:
            numbers = []
        wrong = (
            len(shape) != 2
            or any(type(n) is not int or n < 1 for n in (*shape, *sizes))
            or not all(math.isfinite(n) for n in numbers)
            or state.get("quant_type", "nf4") != "nf4"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        wrong = True
    if wrong:
        config.fail(f"tensor {module + name!r} does not hold a quant_state of NF4")
    return dict(state)
