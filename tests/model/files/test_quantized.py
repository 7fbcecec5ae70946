"""Quantised safetensors: every weight as the format means it, and one line for all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ridgeline.model.files.quantized import read_quantized
from ridgeline.model.files.safetensors_dir import load_directory
from ridgeline.model.files.tensors import ModelFileError, Tensor
from tests.model.files import quantizers
from tests.model.files.quantizers import Array, Example, Stored, write_safetensors
from tests.model.files.tiny import CONFIG, hf_weights

Maker = Callable[..., Path]
Make = Callable[[np.random.Generator, tuple[int, int]], Example]
SIZES = CONFIG | {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 1,
}  # fmt: skip

# What a format is called here, how examples are made, and what the engine calls its tensors.
FORMATS: dict[str, tuple[Make, str]] = {
    "gptq": (quantizers.gptq, "INT4"),
    "gptq, one group": (partial(quantizers.gptq, group=-1), "INT4"),
    "gptq, no g_idx": (partial(quantizers.gptq, has_g_idx=False), "INT4"),
    "gptq v2": (partial(quantizers.gptq, layout="gptq_v2", group=64), "INT4"),
    "gptq, zeros": (partial(quantizers.gptq, symmetric=False), "INT4_ZERO"),
    "gptq v2, zeros": (partial(quantizers.gptq, symmetric=False, layout="gptq_v2"), "INT4_ZERO"),
    "gptq, act-order": (partial(quantizers.gptq, act_order=True), "INT4_ORDERED"),
    "gptq, 8 bits": (partial(quantizers.gptq, bits=8), "INT8"),
    "gptq, 8 bits, zeros": (partial(quantizers.gptq, bits=8, symmetric=False), "INT8_ZERO"),
    "gptq, 8 bits, act-order": (partial(quantizers.gptq, bits=8, act_order=True), "INT8_ORDERED"),
    "awq": (quantizers.awq, "INT4_ZERO"),
    "awq, groups of 64": (partial(quantizers.awq, group=64), "INT4_ZERO"),
    "w4a16": (quantizers.pack_quantized, "INT4"),
    "w4a16 per output": (partial(quantizers.pack_quantized, group=-1), "INT4"),
    "w4a16, zeros": (partial(quantizers.pack_quantized, symmetric=False), "INT4_ZERO"),
    "w4a16, plain zeros": (
        partial(quantizers.pack_quantized, symmetric=False, plain_zeros=True),
        "INT4_ZERO",
    ),
    "w4a16, act-order": (partial(quantizers.pack_quantized, act_order=True), "INT4_ORDERED"),
    "w8a16": (partial(quantizers.pack_quantized, bits=8, group=-1), "INT8"),
    "w8a8": (quantizers.int_quantized, "INT8"),
    "w8a8, one scale": (partial(quantizers.int_quantized, per_tensor=True), "INT8"),
    "fp8 in blocks": (partial(quantizers.fp8, kind="block"), "FP8"),
    "fp8, one scale": (partial(quantizers.fp8, kind="tensor"), "FP8"),
    "fp8 per output": (partial(quantizers.fp8, kind="channel"), "FP8"),
    "mxfp4": (quantizers.mxfp4_packed, "MXFP4"),
    "nf4": (quantizers.nf4, "NF4"),
    "nf4, twice": (partial(quantizers.nf4, twice=True), "NF4"),
    "int8": (quantizers.int8, "INT8"),
    "hqq": (quantizers.hqq, "INT4_FLOAT_ZERO"),
    "hqq, 8 bits": (partial(quantizers.hqq, bits=8), "INT8_ZERO"),
}


def model(
    make: Make, *, config: dict[str, Any] = SIZES, seed: int = 0
) -> tuple[dict[str, Any], Stored, dict[str, Array]]:
    """Return config.json, the tensors of a file, and the same in float32, matrix by matrix."""
    rng, wanted, stored, quantization = np.random.default_rng(seed), {}, {}, {}
    for name, values in hf_weights(config).items():
        if values.ndim == 1 or "embed" in name or "lm_head" in name:
            values = values if values.ndim == 1 else values * np.float32(0.1)
            wanted[name], stored[name] = values, ("F32", values)
            continue
        example = make(rng, values.shape)
        wanted[name], quantization = example.weights, example.config
        module = name.removesuffix("weight")
        stored |= {module + end: part for end, part in example.parts.items()}
    return config | {"quantization_config": quantization}, stored, wanted


def directory(make_directory: Maker, config: dict[str, Any], stored: Stored, name: str) -> Path:
    path = make_directory(name, weights=False, config=config)
    write_safetensors(path / "model.safetensors", stored)
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_as_the_format_means_it(name: str, make_directory: Maker) -> None:
    make, dtype = FORMATS[name]
    config, stored, wanted = model(make)
    checkpoint = load_directory(directory(make_directory, config, stored, "m"))
    assert checkpoint.quantization
    for tensor in checkpoint.tensors.values():
        values = wanted[tensor.name].astype(np.float32)
        # MXFP4 has two zeros, which here are one.
        assert (tensor.to_f32() + 0.0).tobytes() == (values + 0.0).tobytes()
    kinds = {
        t.dtype for n, t in checkpoint.tensors.items() if n.startswith("layers") and "norm" not in n
    }
    assert kinds == {dtype}


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_directory(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _set(**changes: Any) -> Callable[[dict[str, Any], Stored], None]:
    return lambda quantization, stored: quantization.update(changes)


def _weights(**changes: Any) -> Callable[[dict[str, Any], Stored], None]:
    def change(quantization: dict[str, Any], stored: Stored) -> None:
        quantization["config_groups"]["group_0"]["weights"].update(changes)

    return change


def _part(end: str, change: Callable[[Array], Array] | None = None, dtype: str = "") -> Any:
    """Change one part of the query's matrix, or leave it out."""

    def changed(quantization: dict[str, Any], stored: Stored) -> None:
        name = f"model.layers.0.self_attn.q_proj.{end}"
        kind, values = stored.pop(name)
        if change is not None:
            stored[name] = (dtype or kind, change(values))

    return changed


def _filled(value: int) -> Callable[[Array], Array]:
    return lambda values: np.full_like(values, value)


REFUSED: list[tuple[str, Callable[[dict[str, Any], Stored], None], str]] = [
    *(
        ("gptq", _set(quant_method=method), f"quant_method '{method}' is not supported: take the "
         f"model's GGUF file, its unquantised safetensors, or one of GPTQ, AWQ")
        for method in ("exl2", "exl3", "aqlm", "quip", "vptq", "modelopt", "spqr", "torchao")
    ),
    ("gptq", _set(quant_method=3), "quant_method is 3, not a string"),
    ("gptq", _set(bits=3), "3 bits are not supported; supported: 4 and 8"),
    ("gptq", _set(bits="4"), "bits is '4', not an integer"),
    ("gptq", _set(bits=None), "bits is missing"),
    ("gptq", _set(group_size=64), "has 4 groups of 128 inputs, not groups of 64"),
    ("gptq", _set(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; supported"),
    ("gptq", _set(checkpoint_format=None, format="marlin"), "format is 'marlin'; supported: gptq"),
    ("gptq", _set(is_marlin_format=True), "is_marlin_format is set"),
    ("gptq", _set(dynamic={"-:.*": {}}), "dynamic is set"),
    ("gptq", _set(pack_dtype="int8"), "pack_dtype is 'int8'; supported: int32"),
    ("gptq", _set(rotation="hadamard"), "rotation is set, which is not supported with 'gptq'"),
    ("gptq", _part("qzeros"), "q_proj.qzeros' is missing"),
    ("gptq", _part("scales"), "q_proj.scales' is missing"),
    ("gptq", _part("qweight", lambda a: a[:, :64]), "q_proj.scales' has shape (4, 128), wanted"),
    ("gptq", _part("qweight", lambda a: a[0]), "q_proj.qweight' has shape (128,), not that of"),
    ("gptq", _part("qzeros", lambda a: a[:2]), "q_proj.qzeros' has shape (2, 16), wanted (4, 16)"),
    ("gptq", _part("scales", lambda a: a, "I8"), "model.safetensors"),
    ("gptq", _part("g_idx", _filled(4)), "q_proj.g_idx' names groups that are not there"),
    ("gptq", _part("g_idx", _filled(-1)), "q_proj.g_idx' names groups that are not there"),
    ("gptq", _part("g_idx", lambda a: a[1:]), "q_proj.g_idx' has shape (127,), wanted (128,)"),
    ("awq", _set(bits=8), "8 bits are not supported; supported: 4"),
    ("awq", _set(version="gemv"), "version is 'gemv'; supported: gemm"),
    ("awq", _set(zero_point=False), "zero_point is false"),
    ("awq", _set(version=None, format="gemv_fast"), "format is 'gemv_fast'; supported: gemm"),
    ("awq", _set(backend="llm-awq"), "backend is 'llm-awq', whose layout is not supported"),
    ("awq", _part("scales", lambda a: a[:3]), "q_proj.qzeros' has shape (4, 16), wanted (3, 16)"),
    ("w4a16", _set(format="nvfp4-pack-quantized"), "config_groups"),
    ("w4a16", _set(format=4), "format is 4, not a string"),
    ("w4a16", _set(config_groups={}), "config_groups is {}, not an object with groups"),
    ("w4a16", _set(config_groups={"a": {"weights": None}}), "'a' does not say how weights"),
    ("w4a16", _set(transform_config={"R1": 1}), "transform_config is set"),
    ("w4a16", _set(sparsity_config={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"),
    ("w4a16", _weights(num_bits=3), "weights of type 'int' with 3 bits are not supported"),
    ("w4a16", _weights(type="float"), "weights of type 'float' with 4 bits are not supported"),
    ("w4a16", _weights(strategy="tensor_group"), "strategy is 'tensor_group'; supported: tensor"),
    ("w4a16", _weights(rotation=1), "sets rotation of weights"),
    ("w4a16", _weights(strategy="block", block_structure=[128]), "block_structure is [128]"),
    ("w4a16", _part("weight_shape", _filled(100)), "weight_shape' is [100, 100], which does not"),
    ("w4a16", _part("weight_shape", _filled(0)), "weight_shape' is [0, 0], which does not"),
    ("w4a16", _part("weight_scale", lambda a: a[:, :3]), "has 3 groups of 128 inputs"),
    ("w4a16, zeros", _part("weight_zero_point", lambda a: a[:3]), "shape (3, 4), wanted (16, 4)"),
    ("w4a16, act-order", _part("weight_g_idx", _filled(9)), "names groups that are not there"),
    ("w8a8", _part("weight_scale", lambda a: a[:9]), "has shape (9, 1), wanted (128, 1)"),
    ("w8a8", _part("weight_scale"), "q_proj.weight' has type I8; supported: F32, F16, BF16"),
    ("fp8 in blocks", _set(fmt="e5m2"), "fmt is 'e5m2'; supported: e4m3"),
    ("fp8 in blocks", _set(weight_block_size=[128, 16]), "weight_block_size is [128, 16]"),
    ("fp8 in blocks", _set(weight_block_size=128), "weight_block_size is 128, not two whole"),
    ("fp8 in blocks", _set(weight_block_size=[128, 128]), "has shape (2, 4), wanted (1, 1)"),
    ("fp8 in blocks", _part("weight_scale_inv"), "q_proj.weight' has type F8_E4M3; supported"),
    ("fp8 in blocks", _part("weight"), "q_proj.weight' is missing"),
    ("mxfp4", _part("weight_scale", lambda a: a[:, :2]), "has shape (128, 2), wanted (128, 4)"),
    ("mxfp4", _part("weight_packed", lambda a: a[:, 1:]), "3 groups of 126 inputs, not groups of"),
    ("nf4", _set(bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type is 'fp4'; supported: nf4"),
    ("nf4", _set(load_in_8bit=True), "exactly one of load_in_4bit and load_in_8bit"),
    ("nf4", _part("weight.quant_map", _filled(1)), "is not the table of NF4"),
    ("nf4", _part("weight.absmax", lambda a: a[1:]), "absmax' has shape (255,), wanted (256,)"),
    ("nf4", _part("weight", lambda a: a[1:]), "does not have the 16384 weights that"),
    ("nf4", _part("weight.quant_state.bitsandbytes__nf4"), "bitsandbytes__nf4' is missing"),
    ("nf4", _part("weight.quant_state.bitsandbytes__nf4", _filled(91)), "does not hold a quant_"),
    ("int8", _part("SCB", lambda a: a[1:]), "q_proj.SCB' has shape (127,), wanted (128,)"),
    ("int8", _part("weight_format", _filled(1)), "an order other than by rows"),
    ("hqq", _part("axis", _filled(0)), "quantised along axis 0, which is not supported; axis 1"),
    ("hqq", _part("nbits", _filled(3)), "3 bits are not supported"),
    ("hqq", _part("quant_zero", _filled(1)), "quant_zero' is 1, which is not supported"),
    ("hqq", _part("shape", _filled(-1)), "W_q' has shape (256, 32), which does not hold -1 x -1"),
    ("hqq", _part("shape"), "q_proj.shape' is missing"),
    ("hqq", _part("nbits", lambda a: np.zeros(2, np.int32)), "nbits' is not a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "message"), REFUSED)
def test_what_does_not_run_is_one_line(
    name: str, damage: Callable[[dict[str, Any], Stored], None], message: str, make_directory: Maker
) -> None:
    config, stored, _ = model(FORMATS[name][0])
    damage(config["quantization_config"], stored)
    if message == "config_groups":  # the group says its own format
        config["quantization_config"]["config_groups"]["group_0"].pop("format")
        message = "format 'nvfp4-pack-quantized' is not supported; supported: pack-quantized"
    assert message in refusal(directory(make_directory, config, stored, "m"))


@pytest.mark.parametrize("value", [[], [1], "gptq", 4])
def test_a_config_that_is_no_object(value: Any, make_directory: Maker) -> None:
    config, stored, _ = model(quantizers.gptq)
    path = directory(make_directory, config | {"quantization_config": value}, stored, "m")
    wanted = f"quantization_config is {value!r}, not an object" if value else "has type I32"
    assert wanted in refusal(path)


def test_a_bias_of_zeros_may_be_left_over(make_directory: Maker) -> None:
    """Old writers of GPTQ give every matrix a bias, also where the model has none."""
    config, stored, _ = model(quantizers.gptq)
    name = "model.layers.0.mlp.up_proj.bias"
    stored[name] = ("F16", np.zeros(192, np.float16))
    checkpoint = load_directory(directory(make_directory, config, stored, "zero"))
    assert "layers.0.up_bias" not in checkpoint.tensors
    stored[name][1][3] = 1e-3
    assert f"tensor {name!r} is not part of" in refusal(
        directory(make_directory, config, stored, "m")
    )


def test_nothing_is_converted_before_it_is_asked_for(
    make_directory: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is counted are the bytes of the file."""
    config, stored, _ = model(quantizers.gptq)
    path = directory(make_directory, config, stored, "m")
    monkeypatch.setattr("ridgeline.model.files.quantized.parts.encode", None)
    checkpoint = load_directory(path)
    parts = [values.nbytes for _, values in stored.values()]
    assert sum(parts) * 0.98 < checkpoint.nbytes <= sum(parts)
    with pytest.raises(TypeError):
        checkpoint.tensors["layers.0.q"].to_f32()


def test_a_text_half_is_quantised_alike(make_directory: Maker) -> None:
    config, stored, wanted = model(quantizers.gptq)
    quantization = config.pop("quantization_config")
    stored = {f"language_model.{name}": part for name, part in stored.items()}
    for whole in (
        {"quantization_config": quantization, "text_config": config},
        {"text_config": config | {"quantization_config": quantization}},
    ):
        outer = whole | {"architectures": config["architectures"]}
        name = str("quantization_config" in whole)
        tensors = load_directory(directory(make_directory, outer, stored, name)).tensors
        up = wanted["model.layers.0.mlp.up_proj.weight"]
        np.testing.assert_array_equal(tensors["layers.0.up"].to_f32(), up)


def test_rows_of_a_fused_matrix(make_directory: Maker) -> None:
    """Phi-3 has queries, keys and values in one matrix, of which each takes its rows."""
    config = SIZES | {"architectures": ["Phi3ForCausalLM"]}
    rng, stored, wanted = np.random.default_rng(3), {}, {}
    quantization: dict[str, Any] = {}
    for name, values in hf_weights(config, fused=True).items():
        if "proj" not in name:
            stored[name] = ("F32", values)
            continue
        example = quantizers.awq(rng, (values.shape[0], values.shape[1]))
        wanted[name], quantization = example.weights, example.config
        stored |= {name.removesuffix("weight") + end: p for end, p in example.parts.items()}
    path = directory(make_directory, config | {"quantization_config": quantization}, stored, "m")
    checkpoint = load_directory(path)
    tensors = checkpoint.tensors
    both = wanted["model.layers.0.self_attn.qkv_proj.weight"]
    rows = [tensors[f"layers.0.{part}"].to_f32() for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(rows), both)
    gate = wanted["model.layers.0.mlp.gate_up_proj.weight"][:192]
    np.testing.assert_array_equal(tensors["layers.0.gate"].to_f32(), gate)
    part = tensors["layers.0.k"].rows(np.array([3, 1]))
    np.testing.assert_array_equal(part.to_f32(), rows[1][[3, 1]])
    turned = tensors["layers.0.k"].reordered(np.arange(len(rows[1]))[::-1].copy())
    np.testing.assert_array_equal(turned.rows(slice(0, 2)).to_f32(), rows[1][:-3:-1])
    sizes = [values.nbytes for _, values in stored.values()]
    assert sum(sizes) * 0.98 < checkpoint.nbytes <= sum(sizes)


def experts(rng: np.random.Generator) -> tuple[dict[str, Tensor], Array]:
    """gpt-oss's stack of experts as its two tensors, and the weights."""
    packed, exponents, weights = quantizers.mxfp4_values(rng, (3, 8, 64))
    packed = packed.reshape(3, 8, 2, 16)
    parts = {"blocks": packed.reshape(48, 16), "scales": exponents.reshape(24, 2)}
    shapes = {"blocks": packed.shape, "scales": exponents.shape}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return {
        f"{name}_{end}": Tensor(end, "U8", shapes[end], values) for end, values in parts.items()
    }, weights


def test_experts_of_mxfp4() -> None:
    raw, weights = experts(np.random.default_rng(4))
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}}
    found = read_quantized(config, raw, "here")
    assert found.config == {}
    assert found.description == "MXFP4"
    (name, tensor), *rest = found.tensors.items()
    assert not rest
    assert (name, tensor.dtype, tensor.shape) == (
        "model.layers.0.mlp.experts.gate_up_proj",
        "MXFP4",
        (3, 8, 64),
    )
    np.testing.assert_array_equal(tensor.to_f32(), weights)
    flat = replace(tensor, shape=(24, 64))
    np.testing.assert_array_equal(flat.rows(slice(8, 16)).to_f32(), weights[1])
    name = f"{name}_scales"
    raw[name] = replace(raw[name], shape=(3, 8, 1))
    with pytest.raises(ModelFileError, match=r"_scales' has shape \(3, 8, 1\), wanted \(3, 8, 2\)"):
        read_quantized(config, raw, "here")
    raw[name.replace("scales", "blocks")] = replace(raw[name], shape=(3, 8, 2))
    with pytest.raises(ModelFileError, match=r"_blocks' has shape \(3, 8, 2\), wanted \(experts"):
        read_quantized(config, raw, "here")


def test_mxfp4_of_gguf_is_what_the_library_makes_of_it() -> None:
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (16, 3, 17), np.uint8)
    blocks[:, :, 0] = rng.integers(2, 250, (16, 3))  # the library has no smaller ones
    data = blocks.reshape(16, -1)
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    got = Tensor("w", "MXFP4", (16, 96), data).to_f32()
    assert (got + 0.0).tobytes() == (wanted + 0.0).tobytes()


def test_transposed_families_are_quantised_the_usual_way_round(make_directory: Maker) -> None:
    """GPT-2's own files have (in, out); GPTQ's have what all others have."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 2, "n_layer": 1,
        "n_positions": 32, "vocab_size": 40, "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    rng, stored, wanted = np.random.default_rng(6), {}, {}
    quantization: dict[str, Any] = {}
    for name, shape in {"wte": (40, 64), "wpe": (32, 64)}.items():
        stored[f"transformer.{name}.weight"] = ("F32", rng.normal(0, 1, shape).astype("f4"))
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        for end in ("weight", "bias"):
            stored[f"transformer.{name}.{end}"] = ("F32", np.ones(64, np.float32))
    names = {"attn.c_attn": (192, 64), "attn.c_proj": (64, 64), "mlp.c_fc": (256, 64),
             "mlp.c_proj": (64, 256)}  # fmt: skip
    for name, matrix in names.items():
        example = quantizers.gptq(rng, matrix)
        wanted[name], quantization = example.weights, example.config
        module = f"transformer.h.0.{name}."
        stored |= {module + end: part for end, part in example.parts.items()}
        stored[f"{module}bias"] = ("F32", np.ones(matrix[0], np.float32))
    path = directory(make_directory, config | {"quantization_config": quantization}, stored, "m")
    tensors = load_directory(path).tensors
    for part, name in {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
        np.testing.assert_array_equal(tensors[f"layers.0.{part}"].to_f32(), wanted[name])


def test_quantised_experts_are_stacked(make_directory: Maker) -> None:
    config = SIZES | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    }  # fmt: skip
    rng, wanted = np.random.default_rng(7), {}
    _, stored, _ = model(quantizers.awq, config=SIZES)
    stored = {name: part for name, part in stored.items() if ".mlp." not in name}
    for name in ("q_norm", "k_norm"):
        stored[f"model.layers.0.self_attn.{name}.weight"] = ("F32", np.ones(32, np.float32))
    stored["model.layers.0.mlp.gate.weight"] = ("F32", np.ones((2, 128), np.float32))
    for part, shape in {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}.items():
        examples = [quantizers.awq(rng, shape) for _ in range(2)]
        wanted[part] = np.concatenate([example.weights for example in examples])
        for i, example in enumerate(examples):
            module = f"model.layers.0.mlp.experts.{i}.{part}_proj."
            stored |= {module + end: values for end, values in example.parts.items()}
    config |= {"quantization_config": examples[0].config}
    tensors = load_directory(directory(make_directory, config, stored, "m")).tensors
    for part, weights in wanted.items():
        tensor = tensors[f"layers.0.{part}"]
        assert tensor.dtype == "INT4_ZERO"
        np.testing.assert_array_equal(tensor.to_f32(), weights)


def damaged(rng: np.random.Generator, parts: Stored) -> Stored:
    """One part missing, short, narrow, flat, of another type, or with other bytes."""
    out = dict(parts)
    name = str(rng.choice(list(parts)))
    dtype, values = out.pop(name)
    match rng.integers(6):
        case 0:
            return out
        case 1 if values.ndim and len(values) > 1:
            values = values[:-1]
        case 2 if values.ndim > 1 and values.shape[1] > 1:
            values = values[:, :-1]
        case 3:
            values = values.reshape(-1)
        case 4:
            dtype = {"I32": "F32", "F16": "BF16", "I8": "U8", "U8": "F8_E4M3"}.get(dtype, dtype)
        case _:
            content = np.frombuffer(values.tobytes(), np.uint8).copy()
            content[rng.integers(0, len(content), 3)] = rng.integers(0, 256, 3)
            values = content.view(values.dtype).reshape(values.shape)
    return out | {name: (dtype, values)}


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_refused_or_read(name: str) -> None:
    """In a line, and never by an error of another kind; what is read has the right shape."""
    example, seen = FORMATS[name][0](np.random.default_rng(1), (64, 64)), set[Any]()
    for seed in range(40):
        parts = damaged(np.random.default_rng(seed), example.parts)
        raw = {}
        for end, (dtype, values) in parts.items():
            rows = int(np.prod(values.shape[:-1])) if values.ndim > 1 else values.size
            data = np.frombuffer(values.tobytes(), np.uint8).reshape(rows, -1)
            raw[f"m.{end}"] = Tensor(f"m.{end}", dtype, values.shape, data)
        try:
            found = read_quantized({"quantization_config": example.config}, raw, "here")
        except ModelFileError as error:
            seen.add("\n" in str(error))  # of which none may be
            continue
        assert found.tensors["m.weight"].to_f32().shape == found.tensors["m.weight"].shape
        seen.add("read")
    assert seen == {False, "read"}
