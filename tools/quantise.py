"""Write a model once more as quantised safetensors: ``python tools/quantise.py MODEL FORMAT OUT``.

Every weight of a layer's matrices is rounded to the nearest value that the format has; nothing is
calibrated on text, as GPTQ and AWQ do it, so their files lose less than these. It is how the table
of formats in docs/benchmarks.md was made:

    python tools/quantise.py smollm2 nf4 /tmp/nf4
    ridgeline bench quality /tmp/nf4 --against smollm2

Models are of the families Llama and Qwen2, without scaled rope.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.engine.quantise.gptq import packed
from ridgeline.engine.setup.home import locate
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.families import HF_FAMILIES
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from ridgeline.text.grammar.export import export_tokenizer

Array = NDArray[Any]
Stored = dict[str, tuple[str, Array]]  # end of a name -> type in the file, values
Made = tuple[Stored, dict[str, Any]]  # a matrix's parts, and its quantization_config

LEAST = np.float32(2**-24)  # above 0 in 16 bits: the scale of weights that are all 0
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def brain(values: Array) -> Array:
    """Return the bits of numbers cut to bf16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def of_brain(bits: Array) -> Array:
    """Return the numbers of such bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def largest(values: Array) -> Array:
    """Return the largest size in each last axis, never 0."""
    sizes: Array = np.maximum(np.abs(values).max(axis=-1, keepdims=True), np.float32(1e-8))
    return sizes


def nearest(values: Array, levels: Array) -> Array:
    """Return the place of the nearest of ascending levels."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values)


def grouped(w: Array) -> Array:
    """Return weights by groups of 64 inputs, which divide the widths of all small models."""
    return w.reshape(len(w), -1, 64)


def gptq(w: Array, bits: int) -> Made:
    """Return AutoGPTQ's words along the inputs, symmetric."""
    groups, middle = grouped(w), 1 << (bits - 1)
    scales = np.maximum(largest(groups) / (middle - 0.5), LEAST).astype(np.float16)
    q = np.clip(np.rint(groups / scales.astype(np.float32)), -middle, middle - 1) + middle
    q, scales = q.reshape(w.shape), scales[:, :, 0].T
    parts: Stored = {
        "qweight": ("I32", packed(q, bits).T),
        "qzeros": ("I32", packed(np.full(scales.shape, middle - 1), bits)),
        "scales": ("F16", scales),
    }
    return parts, {
        "quant_method": "gptq", "bits": bits, "group_size": groups.shape[2], "desc_act": False,
        "sym": True, "checkpoint_format": "gptq",
    }  # fmt: skip


def awq(w: Array) -> Made:
    """Return AutoAWQ's words along the outputs, with zeros."""
    groups = grouped(w)
    low = np.minimum(groups.min(axis=2, keepdims=True), 0)
    high = np.maximum(groups.max(axis=2, keepdims=True), 0)
    scales = np.maximum((high - low) / 15, LEAST).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), 0, 15)
    q = np.clip(np.rint(groups / wide) + zeros, 0, 15).reshape(w.shape).T
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = np.arange(len(w)).reshape(-1, 8)[:, order].reshape(-1)
    parts: Stored = {
        "qweight": ("I32", packed(q[:, columns], 4)),
        "qzeros": ("I32", packed(zeros[:, :, 0].T[:, columns], 4)),
        "scales": ("F16", scales[:, :, 0].T),
    }
    return parts, {
        "quant_method": "awq", "bits": 4, "group_size": groups.shape[2], "zero_point": True,
        "version": "gemm",
    }  # fmt: skip


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def w4a16(w: Array) -> Made:
    """Return compressed-tensors' words along the inputs."""
    groups = grouped(w)
    bits = brain(largest(groups) / 7.5)
    q = np.clip(np.rint(groups / of_brain(bits)), -8, 7).reshape(w.shape) + 8
    parts: Stored = {
        "weight_packed": ("I32", packed(q, 4)),
        "weight_scale": ("BF16", bits[:, :, 0]),
        "weight_shape": ("I64", np.array(w.shape)),
    }
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": groups.shape[2]}
    return parts, compressed("pack-quantized", **scheme)


def w8a8(w: Array) -> Made:
    """Return compressed-tensors' bytes, a scale for each output."""
    bits = brain(largest(w) / 127)
    q = np.clip(np.rint(w / of_brain(bits)), -128, 127).astype(np.int8)
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel"}
    return {"weight": ("I8", q), "weight_scale": ("BF16", bits)}, compressed(
        "int-quantized", **scheme
    )


def _e4m3() -> Array:
    bytes_ = np.arange(127)  # of positive numbers; 127 is none
    exponent, mantissa = bytes_ >> 3, (bytes_ & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    return values.astype(np.float32)


def _fp8_bytes(values: Array) -> Array:
    codes = nearest(np.abs(values), _e4m3()).astype(np.uint8)
    return np.where(values < 0, codes | 128, codes).astype(np.uint8)


def fp8(w: Array) -> Made:
    """Return compressed-tensors' e4m3, a scale for each output."""
    bits = brain(largest(w) / 448)
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel"}
    parts: Stored = {
        "weight": ("F8_E4M3", _fp8_bytes(w / of_brain(bits))),
        "weight_scale": ("BF16", bits),
    }
    return parts, compressed("float-quantized", **scheme)


def fp8_blocks(w: Array) -> Made:
    """Return DeepSeek's e4m3, a scale for each 128 by 128."""
    outputs, inputs = w.shape
    padded = np.zeros((-(-outputs // 128) * 128, -(-inputs // 128) * 128), np.float32)
    padded[:outputs, :inputs] = w
    blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128).swapaxes(1, 2)
    scales = np.maximum(np.abs(blocks).max(axis=(2, 3)) / 448, np.float32(1e-8))
    wide = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:outputs, :inputs]
    parts: Stored = {
        "weight": ("F8_E4M3", _fp8_bytes(w / wide)),
        "weight_scale_inv": ("F32", scales.astype(np.float32)),
    }
    return parts, {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip


def mxfp4(w: Array) -> Made:
    """Return compressed-tensors' MXFP4: blocks of 32 with a power of two."""
    blocks = w.reshape(len(w), -1, 32)
    exponents = np.floor(np.log2(largest(blocks))) - 2
    levels = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    scaled = blocks / np.exp2(exponents)
    q = (nearest(np.abs(scaled), levels) | np.where(scaled < 0, 8, 0)).reshape(w.shape)
    parts: Stored = {
        "weight_packed": ("U8", (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)),
        "weight_scale": ("U8", (exponents[:, :, 0] + 127).astype(np.uint8)),
    }
    scheme = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return parts, compressed("mxfp4-pack-quantized", **scheme)


def nf4(w: Array) -> Made:
    """Return bitsandbytes' NF4: blocks of 64 of all weights in a row."""
    blocks = w.reshape(-1, 64)
    sizes = largest(blocks)
    q = nearest(blocks / sizes, np.array(NF4, np.float32)).reshape(-1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts: Stored = {
        "weight": ("U8", (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None]),
        "weight.absmax": ("F32", sizes[:, 0].astype(np.float32)),
        "weight.quant_map": ("F32", np.array(NF4, np.float32)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", text),
    }
    return parts, {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
    }  # fmt: skip


def int8(w: Array) -> Made:
    """Return bitsandbytes' bytes, and the largest weight of each output."""
    sizes = largest(w)
    parts: Stored = {
        "weight": ("I8", np.rint(w / sizes * 127).astype(np.int8)),
        "SCB": ("F32", sizes[:, 0].astype(np.float32)),
        "weight_format": ("U8", np.array(0, np.uint8)),
    }
    return parts, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}


def hqq(w: Array) -> Made:
    """Return HQQ's groups of 64 along the inputs, with zeros that are no whole numbers."""
    groups = w.reshape(-1, 64)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    scale = np.maximum((high - low) / 15, LEAST).astype(np.float16)
    zero = (-low / scale.astype(np.float32)).astype(np.float16)
    q = np.clip(np.rint(groups / scale.astype(np.float32) + zero.astype(np.float32)), 0, 15)
    q = q.astype(np.uint8)

    def whole(value: int) -> tuple[str, Array]:
        return "I32", np.array(value, np.int32)

    parts: Stored = {
        "W_q": ("U8", q[: len(q) // 2] << 4 | q[len(q) // 2 :]), "scale": ("F16", scale),
        "zero": ("F16", zero), "shape": ("I64", np.array(w.shape)), "nbits": whole(4),
        "axis": whole(1), "group_size": whole(64),
        "packing": ("U8", np.frombuffer(b"4bit_u8", np.uint8)),
        "view_as_float": ("U8", np.array(0, np.uint8)), "quant_zero": ("U8", np.array(0, np.uint8)),
    }  # fmt: skip
    quant = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}
    return parts, {"quant_method": "hqq", "quant_config": quant, "skip_modules": ["lm_head"]}


FORMATS: dict[str, Callable[[Array], Made]] = {
    "gptq-8": lambda w: gptq(w, 8), "w8a8": w8a8, "int8": int8, "fp8": fp8,
    "fp8-blocks": fp8_blocks, "gptq-4": lambda w: gptq(w, 4), "awq": awq, "w4a16": w4a16,
    "nf4": nf4, "hqq": hqq, "mxfp4": mxfp4,
}  # fmt: skip


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a config.json. Raises SystemExit for a family that this cannot write."""
    arch, mixer = checkpoint.arch, checkpoint.arch.attentions[0]
    name = _FAMILIES.get(checkpoint.family)
    if name is None or mixer.rope is None or mixer.rope.divisors:
        raise SystemExit(f"{checkpoint.family} is not one of {', '.join(_FAMILIES)}")
    return {
        "architectures": [name], "model_type": checkpoint.family, "hidden_act": "silu",
        "hidden_size": arch.hidden_size, "intermediate_size": arch.layers[0].ffn.size,
        "num_hidden_layers": arch.num_layers, "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim,
        "max_position_embeddings": arch.max_position, "rms_norm_eps": arch.norm_eps,
        "rope_theta": mixer.rope.theta, "tie_word_embeddings": arch.tied_embeddings,
        "vocab_size": arch.vocab_size, "eos_token_id": list(checkpoint.eos_ids),
        "bos_token_id": checkpoint.bos_id,
    }  # fmt: skip


def write(path: Path, tensors: Stored) -> None:
    """Write a safetensors file; the library cannot write bf16 and fp8 of numpy."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape)}
        header[name]["data_offsets"] = [end, end + values.nbytes]
        end += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def main(model: str, form: str, out: Path) -> None:
    """Quantise a model into a directory."""
    checkpoint = load_checkpoint(locate(model).path)
    config = config_of(checkpoint)
    family, stored = HF_FAMILIES[config["architectures"][0]], Stored()
    for name, tensor in checkpoint.tensors.items():
        values = tensor.to_f32()
        if name in family.outer:
            stored[family.outer[name]] = ("F32", values)
            if values.ndim > 1:
                stored[family.outer[name]] = ("F16", values.astype(np.float16))
            continue
        _, number, part = name.split(".")
        in_file = family.prefix.format(number) + family.layer[part]
        if values.ndim == 1:
            stored[in_file] = ("F32", values)
            continue
        parts, config["quantization_config"] = FORMATS[form](values)
        module = in_file.removesuffix("weight")
        stored |= {module + end: part for end, part in parts.items()}
    export_tokenizer(checkpoint, tokenizer_of(checkpoint), out)
    (out / "config.json").write_text(json.dumps(config))
    write(out / "model.safetensors", stored)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in FORMATS:
        raise SystemExit(f"usage: quantise.py MODEL FORMAT OUT; formats: {', '.join(FORMATS)}")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
