"""Safetensors whose config.json has a ``quantization_config``: what it says, and its tensors.

Each method stores a matrix as several tensors (``qweight``, ``scales``, ...). Here these become one
tensor, in blocks of ``model.files.encodings``, under the name that the matrix has elsewhere.
Nothing is read for that but small tensors that decide the type: a matrix is converted when it is
asked for. Which layers are not quantised follows from the tensors that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import without_quantization
from ridgeline.model.files.quantized import compressed, floats, integers
from ridgeline.model.files.quantized.parts import Method, array
from ridgeline.model.files.tensors import Tensor

_METHODS: Mapping[str, Callable[[ConfigReader], Method]] = {
    "gptq": integers.gptq,
    "awq": integers.awq,
    "compressed-tensors": compressed.compressed,
    "fp8": floats.fp8,
    "fbgemm_fp8": floats.fp8,
    "bitsandbytes": floats.bitsandbytes,
    "hqq": integers.hqq,
    "mxfp4": floats.mxfp4,
}
_FLOATS = ("F32", "F16", "BF16")
_ELSEWHERE = (
    "take the model's GGUF file, its unquantised safetensors, or one of GPTQ, AWQ, "
    "compressed-tensors, FP8, bitsandbytes (NF4, int8) or HQQ"
)
# How other numbers than weights are quantised: of activations, and of a cache.
_OF_OTHERS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")
# Keys that say how weights were found, or by what they are multiplied elsewhere.
_HARMLESS = frozenset((
    "activation_scheme", "amp", "autoround_version", "batch_size", "block_name_to_quantize",
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "desc_act",
    "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio", "group_size",
    "backend", "ignore", "ignored_layers", "kv_cache_scheme", "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold", "lm_head",
    "low_gpu_mem_usage", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_fuse", "modules_to_not_convert", "offload_meta",
    "pad_token_id", "producer", "quantization_status", "quantizer", "skip_modules",
    "static_groups", "tokenizer", "true_sequential", "uri", "use_cuda_fp16", "use_exllama",
    "version", "activation_scale_ub", "dequantize", "scale_fmt", "act_group_aware", "fallback",
    "method", "mse", "gptaq", "foem", "failsafe", "modules_to_convert", "expert_dtype",
    "run_compressed", "use_optimized_inference",
))  # fmt: skip


class Quantized(NamedTuple):
    """Attributes:

    config: the rest of config.json.
    tensors: all tensors, one for each matrix.
    description: how they were quantised, in words; "" if they were not.
    spare: names of tensors that a model may do without.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    description: str
    spare: frozenset[str]


def read_quantized(config: Mapping[str, Any], raw: Mapping[str, Tensor], where: str) -> Quantized:
    """Return the tensors of a directory as matrices, whatever they are quantised with.

    Raises:
        ModelFileError: an unknown method, a value out of range, or parts that do not fit.
    """
    quantization = config.get("quantization_config")
    text = config.get("text_config")
    if type(text) is dict:
        quantization = quantization or text.get("quantization_config")
    reader = ConfigReader({}, where)
    tensors, description, spare = dict(raw), "", set[str]()
    if quantization:
        if type(quantization) is not dict:
            reader.fail(f"quantization_config is {quantization!r}, not an object")
        reader = ConfigReader(quantization, f"{where}: quantization_config")
        method = _method(reader)
        description = method.description
        tensors, spare = _converted(raw, method, reader)
    for name, tensor in tensors.items():
        if tensor.make is None and tensor.dtype not in _FLOATS:
            supported = ", ".join(_FLOATS)
            reader.fail(f"tensor {name!r} has type {tensor.dtype}; supported: {supported}")
    return Quantized(without_quantization(config), tensors, description, frozenset(spare))


def _method(config: ConfigReader) -> Method:
    """Return how to convert tensors of the method that is named; refuse others by name."""
    name = config.text("quant_method", "")
    if not name:  # of before there were others
        name = "bitsandbytes" if "load_in_8bit" in config.values else "none"
    if name not in _METHODS:
        config.fail(f"quant_method {name!r} is not supported: {_ELSEWHERE}")
    method = _METHODS[name](config)
    for key, value in config.values.items():
        if value and key not in config.read_keys and key not in _HARMLESS and key[0] != "_":
            config.fail(
                f"{key} is set, which is not supported with {name!r}: it is not known whether "
                f"it changes the weights"
            )
    return method


def _converted(
    raw: Mapping[str, Tensor], method: Method, config: ConfigReader
) -> tuple[dict[str, Tensor], set[str]]:
    """Return all tensors, converted, and those that a model may do without."""
    tensors = {name: tensor for name, tensor in raw.items() if not name.endswith(_OF_OTHERS)}
    spare = set[str]()
    ends = [(name, end) for name in raw for end in method.ends if name.endswith(end)]
    for module in dict.fromkeys(name.removesuffix(end) for name, end in ends):
        parts = {
            part: tensors.pop(module + part) for part in method.parts if module + part in tensors
        }
        matrix = method.convert(module, parts, config)
        tensors[matrix.name] = matrix
        bias = tensors.get(module + ".bias")  # some writers give every matrix one, of zeros
        if bias is not None and not array(bias).any():
            spare.add(module + ".bias")
    return tensors, spare
