"""GPTQ, AWQ and HQQ: integers with a scale and a zero for each group of inputs.

Layouts as AutoGPTQ 0.7 and GPTQModel (``checkpoint_format`` gptq and gptq_v2), AutoAWQ 0.2 (GEMM)
and HQQ 0.2 write them. Papers: Frantar et al., GPTQ, 2023; Lin et al., AWQ, 2024; Badri and Shaji,
Half-Quadratic Quantization, 2023.
"""

from __future__ import annotations

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.encodings import Bytes
from ridgeline.model.files.quantized.parts import (
    Integers,
    Method,
    Parts,
    array,
    check_groups,
    in_groups,
    integers,
    is_every,
    matrix_shape,
    number_of_bits,
    part,
    unpacked,
)
from ridgeline.model.files.tensors import Tensor

_FLOATS = ("F16", "BF16", "F32")
# One more in each of a word's values, and a word of values in the middle.
_ONES = {4: 0x11111111, 8: 0x01010101}
_MIDDLES = {4: 0x88888888, 8: 0x80808080}
# Which nibble of a word holds output 0, 1, ... of eight.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: gptq``."""
    bits = number_of_bits(config, config.integer("bits"), 4, 8)
    layout = _layout(config, ("checkpoint_format", "format"), "gptq", "gptq_v2")
    if config.get("pack_dtype") not in (None, "int32"):
        config.fail(f"pack_dtype is {config.get('pack_dtype')!r}; supported: int32")
    for key in ("is_marlin_format", "dynamic"):
        if config.get(key):
            config.fail(f"{key} is set, which is not supported")
    config.get("sym"), config.get("quant_method")  # the tensors say it
    size = config.integer("group_size", -1, low=-1)
    # Zeros are stored less one. One is added to whole words, as GPTQModel subtracts it: a zero of 0
    # borrows from its neighbour.
    add = _ONES[bits] if layout == "gptq" else 0

    def convert(module: str, parts: Parts, config: ConfigReader) -> Tensor:
        rows, outputs = matrix_shape(parts, ".qweight", module, config)
        inputs, per_word = rows * 32 // bits, 32 // bits
        groups = matrix_shape(parts, ".scales", module, config)[0]
        words = part(parts, ".qweight", module, config, (rows, outputs), "I32")
        scales = part(parts, ".scales", module, config, (groups, outputs), *_FLOATS)
        zeros = part(parts, ".qzeros", module, config, (groups, outputs // per_word), "I32")
        group_of = None
        if ".g_idx" in parts:
            group_of = array(part(parts, ".g_idx", module, config, (inputs,), "I32"))
            if not ((group_of >= 0) & (group_of < groups)).all():
                config.fail(f"tensor {module + '.g_idx'!r} names groups that are not there")
            if (group_of == np.arange(inputs) * groups // inputs).all():
                group_of = None
        if group_of is None:
            check_groups(config, module, inputs, groups, size)
        dtype = f"INT{bits}"
        if group_of is not None:
            dtype += "_ORDERED"
        elif not is_every(zeros, add, _MIDDLES[bits]):
            dtype += "_ZERO"

        def read() -> Integers:
            of_groups = array(zeros).view(np.uint32) + np.uint32(add)
            return Integers(
                unpacked(array(words).T, bits),
                scales.to_f32().T,
                unpacked(of_groups, bits).T.astype(np.float32),
            )

        name = f"{module}.weight"
        return integers(name, dtype, (outputs, inputs), parts, read, group_of)

    ends = (".qweight", ".qzeros", ".scales", ".g_idx")
    return Method(f"GPTQ ({bits} bits, {in_groups(size)})", ends[:1], ends, convert)


def awq(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: awq``."""
    bits = number_of_bits(config, config.integer("bits", config.values.get("w_bit")), 4)
    _layout(config, ("version", "format"), "gemm")
    if config.get("backend") == "llm-awq":
        config.fail("backend is 'llm-awq', whose layout is not supported; supported: autoawq")
    if not config.flag("zero_point", True):
        config.fail("zero_point is false, which is not supported")
    for key in ("quant_method", "w_bit", "q_group_size"):
        config.get(key)
    size = config.integer("group_size", config.values.get("q_group_size", 128), low=-1)

    def convert(module: str, parts: Parts, config: ConfigReader) -> Tensor:
        inputs, words_of_row = matrix_shape(parts, ".qweight", module, config)
        outputs = words_of_row * 8
        groups = matrix_shape(parts, ".scales", module, config)[0]
        words = part(parts, ".qweight", module, config, (inputs, words_of_row), "I32")
        scales = part(parts, ".scales", module, config, (groups, outputs), *_FLOATS)
        zeros = part(parts, ".qzeros", module, config, (groups, words_of_row), "I32")
        check_groups(config, module, inputs, groups, size)

        def in_order(tensor: Tensor) -> Bytes:
            each = unpacked(array(tensor), 4).reshape(tensor.shape[0], -1, 8)
            out: Bytes = each[:, :, _AWQ_NIBBLES].reshape(tensor.shape[0], -1).T
            return out

        def read() -> Integers:
            zero = in_order(zeros).astype(np.float32)
            return Integers(np.ascontiguousarray(in_order(words)), scales.to_f32().T, zero)

        return integers(f"{module}.weight", "INT4_ZERO", (outputs, inputs), parts, read)

    ends = (".qweight", ".qzeros", ".scales")
    return Method(f"AWQ ({bits} bits, {in_groups(size)})", ends[:1], ends, convert)


def _layout(config: ConfigReader, keys: tuple[str, ...], *layouts: str) -> str:
    """Return the layout that the first of these keys names, else the first of ``layouts``."""
    for key in keys:
        layout = config.text(key, layouts[0])
        if layout.lower() not in layouts:
            config.fail(f"{key} is {layout!r}; supported: {', '.join(layouts)}")
        if config.get(key):
            return layout.lower()
    return layouts[0]


def hqq(config: ConfigReader) -> Method:
    """Return the method of ``quant_method: hqq``; each matrix says how it is quantised."""
    config.get("quant_config"), config.get("quant_method")

    def convert(module: str, parts: Parts, config: ConfigReader) -> Tensor:
        def number(end: str, default: int) -> int:
            tensor = parts.get(end)
            if tensor is None:
                return default
            if tensor.dtype not in ("I32", "I64", "U8") or array(tensor).size != 1:
                config.fail(f"tensor {module + end!r} is not a whole number")
            return int(array(tensor).reshape(-1)[0])

        bits = number_of_bits(config, number(".nbits", 4), 4, 8)
        if number(".axis", 1) != 1:
            config.fail(f"{module!r} is quantised along axis 0, which is not supported; axis 1 is")
        for end in (".quant_scale", ".quant_zero", ".view_as_float"):
            if number(end, 0):
                config.fail(f"tensor {module + end!r} is 1, which is not supported")
        size = matrix_shape(parts, ".scale", module, config)[0]
        scales = part(parts, ".scale", module, config, (size, 1), *_FLOATS)
        zeros = part(parts, ".zero", module, config, (size, 1), *_FLOATS)
        shape = array(part(parts, ".shape", module, config, (2,), "I32", "I64"))
        outputs, inputs = (int(length) for length in shape)
        packed = matrix_shape(parts, ".W_q", module, config)
        words = part(parts, ".W_q", module, config, packed, "U8")
        if packed[0] * (8 // bits) * packed[1] != outputs * inputs or min(outputs, inputs) < 1:
            config.fail(f"tensor {module + '.W_q'!r} has shape {packed}, which does not hold "
                       f"{outputs} x {inputs} values")  # fmt: skip
        groups = size // outputs if size % outputs == 0 else 0
        check_groups(config, module, inputs, groups, None)

        def read() -> Integers:
            q = array(words).view(np.uint8)
            if bits == 4:  # the first half of all groups is in the upper bits
                q = np.concatenate([q >> 4, q & 15])
            q = q.reshape(outputs, inputs)
            scale, zero = (t.to_f32().reshape(outputs, -1) for t in (scales, zeros))
            return Integers(q, scale, zero)

        dtype = "INT4_FLOAT_ZERO" if bits == 4 else "INT8_ZERO"
        return integers(f"{module}.weight", dtype, (outputs, inputs), {
            end: parts[end] for end in (".W_q", ".scale", ".zero")
        }, read)  # fmt: skip

    ends = tuple(f".{name}" for name in (
        "W_q", "scale", "zero", "shape", "nbits", "axis", "group_size", "packing", "quant_scale",
        "quant_zero", "view_as_float", "unpack_view_dtype", "compute_dtype", "offload_meta",
        "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
    ))  # fmt: skip
    return Method("HQQ", ends[:1], ends, convert)
