"""What weights cost in bytes in each format that models are published in, scales and all.

A format says how one matrix is stored. Which matrices a model converts stands in its
``quantization_config``; norms, routers and embeddings mostly stay in the model's own type. The
names that GGUF files go by are of mixes, which convert the embedding and the head as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.model.cost.gguf_mixes import MIX_NAMES, MIXES, MixedModules, mixed_modules
from ridgeline.model.cost.module_names import NO_MODULES, Modules, with_layers_joined
from ridgeline.model.cost.shapes import Matrix, ModelShape


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is stored.

    Attributes:
        name: as people write it.
        bits: of a weight, without what it shares with others.
        group: inputs that share a scale; 0 shares one scale among all inputs of an output, -1 among
            all weights of the matrix.
        outputs: outputs that share a scale too (block formats).
        scale_bits: of a scale, with its zero point or minimum.
        input_bits: of each input, for an order of inputs (GPTQ's ``g_idx``).
    """

    name: str
    bits: float
    group: int = -1
    outputs: int = 1
    scale_bits: float = 0
    input_bits: int = 0

    def values_bytes(self, matrix: Matrix) -> float:
        """Return the bytes of a matrix's values alone."""
        return matrix.num_params * self.bits / 8

    def scales_bytes(self, matrix: Matrix) -> float:
        """Return the bytes of what its values share: scales, zero points, orders."""
        if self.group == -1:
            return matrix.copies * self.scale_bits / 8
        groups = -(-matrix.columns // self.group) if self.group else 1
        scales = groups * -(-matrix.rows // self.outputs)
        return matrix.copies * (scales * self.scale_bits + matrix.columns * self.input_bits) / 8


# Blocks of GGUF: name -> weights in a block, bytes of a block (all of it counts as the weights').
_GGUF_BLOCKS = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74), "iq2_s": (256, 82), "iq3_xxs": (256, 98), "iq3_s": (256, 110),
    "iq4_nl": (32, 18), "iq4_xs": (256, 136),
}  # fmt: skip
FORMATS: Mapping[str, Format] = {
    "f32": Format("f32", 32),
    "bf16": Format("bf16", 16),
    "f16": Format("f16", 16),
    "fp8": Format("fp8", 8, scale_bits=32),
    "int8": Format("int8", 8, group=0, scale_bits=16),
    "int4": Format("int4", 4, group=128, scale_bits=20),  # a 16-bit scale and a 4-bit zero point
    "mxfp4": Format("mxfp4", 4, group=32, scale_bits=8),
    "nvfp4": Format("nvfp4", 4, group=16, scale_bits=8),
    "mxfp8": Format("mxfp8", 8, group=32, scale_bits=8),
    **{name: Format(name, 8 * size / count) for name, (count, size) in _GGUF_BLOCKS.items()},
}
_NAMES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "half": "f16", "fp16": "f16",
    "fp32": "f32", "float": "f32", "f8": "fp8", "float8": "fp8", "w8a8": "int8",
    "int8-row": "int8", "w4a16": "int4", **MIX_NAMES,
}  # fmt: skip
_MODELOPT = {
    "FP8": FORMATS["fp8"], "NVFP4": FORMATS["nvfp4"], "W4A16_NVFP4": FORMATS["nvfp4"],
    "MXFP8": FORMATS["mxfp8"], "FP8_PB_WO": Format("fp8 in blocks", 8, 128, 128, 32),
    "FP8_PER_CHANNEL_PER_TOKEN": Format("fp8", 8, 0, 1, 32),
}  # fmt: skip
# The formats that "the widest that fits" tries, from the widest to the narrowest.
BY_WIDTH = ("bf16", "fp8", "int8", "int4")
KV_BYTES: Mapping[str, float] = {
    "f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "int8": 1, "int8-int4": 0.75
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """How a whole model is stored.

    Attributes:
        plain: of what is not converted.
        linear: of matrices that are.
        plain_modules: modules that stay plain.
        only_experts: nothing but experts is converted.
        mix: what each matrix is stored in, if that differs by its part in the model.
        by_module: formats of named modules; what none of them names stays plain.
    """

    plain: Format
    linear: Format
    plain_modules: Modules = NO_MODULES
    only_experts: bool = False
    mix: MixedModules | None = None
    by_module: tuple[tuple[Modules, Format], ...] = ()

    def of(self, full_name: str, matrix: Matrix) -> Format:
        """Return the format of a matrix."""
        if self.mix is not None:
            return FORMATS[self.mix.format_of(full_name, matrix)]
        if self.by_module and matrix.linear:
            named = (one for modules, one in self.by_module if full_name in modules)
            return next(named, self.plain)
        is_converted = matrix.linear and not (self.only_experts and matrix.group != "experts")
        if not is_converted or full_name in self.plain_modules:
            return self.plain
        return self.linear

    @property
    def name(self) -> str:
        """What to call it: the format of most weights."""
        return self.linear.name


def format_named(name: str) -> Format:
    """Return a format by its name; of a mix that of most of its matrices, by the mix's name.

    Raises ValueError, with all names, if there is none of this name.
    """
    short = name.lower().removeprefix("torch.")
    short = _NAMES.get(short, short)
    if short in MIXES:
        return replace(FORMATS[MIXES[short]], name=short)
    if short not in FORMATS:
        names = dict.fromkeys((*FORMATS, *MIXES))
        raise ValueError(f"there is no format {name!r}: give one of {', '.join(names)}")
    return FORMATS[short]


def kv_bytes_of(name: str) -> float:
    """Return the bytes of a cached value. Raises ValueError, with all names, for no format."""
    short = _NAMES.get(name.lower().removeprefix("fp8_") if name == "fp8" else name, name)
    short = "fp8" if name.startswith("fp8") else short
    if short not in KV_BYTES:
        raise ValueError(f"a cache cannot be kept in {name!r}: give one of {', '.join(KV_BYTES)}")
    return KV_BYTES[short]


def own_kv_cache_dtype(dtype: str) -> str:
    """Return what Ridgeline keeps keys and values in, beside weights computed in ``dtype``.

    The answers of f32 are exact only if the cache is.
    """
    return "f32" if dtype == "f32" else "int8"


def storage_of_dtype(name: str, shape: ModelShape) -> Storage:
    """Return a model's matrices in one format, and the rest in 16 bits if that is narrower.

    Of a mix each matrix is in what llama.cpp's quantiser gives it.
    """
    linear = format_named(name)
    plain = linear if linear.bits >= 16 else FORMATS["bf16"]
    if linear.name in MIXES:
        return Storage(plain, linear, mix=mixed_modules(linear.name, shape))
    return Storage(plain, linear, Modules(("lm_head",)))


def storage_of_config(config: Mapping[str, Any], where: str = "config.json") -> Storage:
    """Return how the model of a config.json is stored.

    Raises ValueError if its ``quantization_config`` is of a method, or has a width, that is not
    known here.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    dtype = next(
        (half[key] for half in (config, text) for key in ("torch_dtype", "dtype") if half.get(key)),
        None,
    )
    if not isinstance(dtype, str | None):
        raise ValueError(f"{where}: torch_dtype is {dtype!r}, not a string")
    plain = format_named(dtype or "bf16")
    quantised = config.get("quantization_config") or text.get("quantization_config")
    if quantised is None:
        return Storage(plain, plain)
    if not isinstance(quantised, Mapping):
        raise ValueError(f"{where}: quantization_config is {quantised!r}, not an object")
    method = str(quantised.get("quant_method", "")).lower()
    if not method and "quant_algo" in quantised:  # as ModelOpt wrote before it named itself
        method = "modelopt"
    halves = _halves(config) or _halves(text)
    try:
        if method == "modelopt" and quantised.get("quantized_layers"):
            by_module = _by_module(quantised["quantized_layers"], halves)
            if by_module:
                return Storage(plain, by_module[0][1], by_module=by_module)
        linear = _of_method(method, quantised)
        if linear is not None and not (0 < linear.bits <= 32 and linear.group < 1 << 31):
            raise ValueError(f"{linear.bits} bits in groups of {linear.group}")
    except (TypeError, KeyError, IndexError, StopIteration, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: quantization_config is damaged: {error!r}") from error
    if linear is None:
        raise ValueError(
            f"{where}: quantization_config has quant_method {method!r}, which is not understood: "
            f"give the size with --weights-memory, or another format with --dtype"
        )
    lists = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    named = [quantised.get(key) or [] for key in lists]
    ignore = [name for names in named if isinstance(names, list) for name in names]
    if not all(isinstance(one, list) for one in named) or any(type(n) is not str for n in ignore):
        raise ValueError(f"{where}: quantization_config names modules that are not text")
    has_head = bool(quantised.get("lm_head") or quantised.get("quantize_lm_head"))
    if not has_head:
        ignore.append("lm_head")
    try:
        modules = Modules(with_layers_joined(ignore, halves))
    except ValueError as error:
        raise ValueError(f"{where}: quantization_config: {error}") from None
    return Storage(plain, linear, modules, only_experts=method == "mxfp4")


def _halves(config: Mapping[str, Any]) -> Sequence[str]:
    """Return what the layers of a file are that has mixers and MLPs by themselves; else nothing."""
    halves = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    return halves if isinstance(halves, str | list) else ()


def _by_module(
    named: Mapping[str, Any], halves: Sequence[str]
) -> tuple[tuple[Modules, Format], ...]:
    """Return the formats of ModelOpt's named modules, that of most modules first; none if unknown.

    Raises ValueError if they are too many.
    """
    of_format: dict[str, list[str]] = {}
    for name, said in named.items():
        of_format.setdefault(str(said["quant_algo"]).upper(), []).append(name)
    if not of_format.keys() <= _MODELOPT.keys():
        return ()
    by_size = sorted(of_format.items(), key=lambda pair: -len(pair[1]))
    return tuple(
        (Modules(with_layers_joined(names, halves)), _MODELOPT[name]) for name, names in by_size
    )


def _of_method(method: str, config: Mapping[str, Any]) -> Format | None:
    """Return the format of converted matrices; None for an unknown method or width."""
    match method:
        case "gptq" | "auto-round" | "intel/auto-round":
            bits, group = int(config["bits"]), int(config.get("group_size", 128))
            order = 32 if method == "gptq" else 0
            return Format(
                f"{method} {bits} bits", bits, max(group, 0), scale_bits=16 + bits, input_bits=order
            )
        case "awq":
            bits = int(config.get("bits", config.get("w_bit", 4)))
            group = int(config.get("group_size", config.get("q_group_size", 128)))
            return Format(f"awq {bits} bits", bits, max(group, 0), 1, 16 + bits)
        case "fp8" | "fbgemm_fp8":
            block = config.get("weight_block_size")
            if block:
                outputs, inputs = int(block[0]), int(block[1])
                return Format("fp8 in blocks", 8, inputs, outputs, 32)
            return Format("fp8", 8, 0 if method == "fbgemm_fp8" else -1, 1, 32)
        case "mxfp4":
            return FORMATS["mxfp4"]
        case "bitsandbytes":
            if config.get("load_in_8bit"):
                return Format("bitsandbytes 8 bits", 8, 0, 1, 32)
            twice = config.get("bnb_4bit_use_double_quant")
            return Format("bitsandbytes 4 bits", 4, 64, 1, 8 + 32 / 256 if twice else 32)
        case "hqq":
            params = config["quant_config"]["weight_quant_params"]
            bits, group = int(params["nbits"]), int(params.get("group_size") or 0)
            return Format(f"hqq {bits} bits", bits, group, 1, 32)
        case "modelopt" | "modelopt_fp4":
            return _MODELOPT.get(str(config.get("quant_algo", "")).upper())
        case "compressed-tensors":
            return _compressed(next(iter(config["config_groups"].values()))["weights"])
    return None


def _compressed(weights: Mapping[str, Any]) -> Format | None:
    bits = int(weights["num_bits"])
    scale = 16 if weights.get("symmetric", True) else 16 + bits
    name = f"{weights.get('type', 'int')} {bits} bits"
    match weights.get("strategy"):
        case "channel":
            return Format(name, bits, 0, 1, scale)
        case "tensor":
            return Format(name, bits, -1, 1, scale)
        case "group":
            return Format(name, bits, int(weights["group_size"]), 1, scale)
        case "tensor_group":
            return Format(name, bits, int(weights["group_size"]), 1, 8)
        case "block":
            outputs, inputs = weights["block_structure"]
            return Format(name, bits, int(inputs), int(outputs), scale)
    return None
