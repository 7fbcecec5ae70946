"""Dense families with LayerNorm: a GGUF file gives what the same weights give in a directory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import model_from_config, model_from_gguf
from ridgeline.model.files.families.fields import slopes
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.shape.model import Layer
from tests.model.files.gguf_dense import ARCHITECTURES, converted
from tests.model.files.tiny import as_tensors

HIDDEN, KV, INNER, VOCAB, LAYERS = 32, 16, 128, 40, 4
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-4,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "StableLmForCausalLM": {
        "use_qkv_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    "CohereForCausalLM": {"logit_scale": 0.25, "rope_theta": 10_000.0},
    "Cohere2ForCausalLM": {"logit_scale": 0.25, "sliding_window": 8, "head_dim": 8},
    "PhiForCausalLM": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    "Starcoder2ForCausalLM": {
        "layer_norm_eps": None,
        "norm_epsilon": 1e-4,
        "sliding_window": 4096,  # as published, where files do not say it
        "tie_word_embeddings": False,
    },
    "GPTNeoXForCausalLM": {
        "num_key_value_heads": None,
        "tie_word_embeddings": False,
        "rotary_pct": 0.25,
    },
    "FalconForCausalLM": {
        "num_key_value_heads": None,
        "intermediate_size": None,
        "layer_norm_eps": None,
        "layer_norm_epsilon": 1e-4,
        "tie_word_embeddings": False,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "GPT2LMHeadModel": {
        "num_key_value_heads": None,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-4,
    },
}
_CONFIGS["BloomForCausalLM"] = {
    "num_key_value_heads": None,
    "layer_norm_eps": None,
    "layer_norm_epsilon": 1e-4,
    "alibi_bias_max": 8,
}
_CONFIGS["MptForCausalLM"] = {
    **_CONFIGS["BloomForCausalLM"],
    "alibi_bias_max": None,
    "intermediate_size": None,  # always four times as wide
    "attn_config": {"alibi": True, "alibi_bias_max": 16},
}
_LLAMA_MLP = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
_LLAMA = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    **_LLAMA_MLP,
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
}
# Modules of a layer and of the rest to their weights, and which of them have biases.
_MODULES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "StableLmForCausalLM": (
        "model.layers",
        _LLAMA | {"post_attention_layernorm": (HIDDEN,)},
        {
            "model.embed_tokens": (VOCAB, HIDDEN),
            "model.norm": (HIDDEN,),
            "lm_head": (VOCAB, HIDDEN),
        },
        ("norm", "q_proj", "k_proj", "v_proj"),
    ),
    "CohereForCausalLM": (
        "model.layers",
        _LLAMA,
        {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)},
        (),
    ),
    "PhiForCausalLM": (
        "model.layers",
        {
            **{f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkv"},
            "self_attn.dense": (HIDDEN, HIDDEN),
            "mlp.fc1": (INNER, HIDDEN),
            "mlp.fc2": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
        },
        {
            "model.embed_tokens": (VOCAB, HIDDEN),
            "model.final_layernorm": (HIDDEN,),
            "lm_head": (VOCAB, HIDDEN),
        },
        ("norm", "proj", "dense", "fc1", "fc2", "lm_head"),
    ),
    "Starcoder2ForCausalLM": (
        "model.layers",
        {
            **{name: shape for name, shape in _LLAMA.items() if not name.startswith("mlp.")},
            "post_attention_layernorm": (HIDDEN,),
            "mlp.c_fc": (INNER, HIDDEN),
            "mlp.c_proj": (HIDDEN, INNER),
        },
        {
            "model.embed_tokens": (VOCAB, HIDDEN),
            "model.norm": (HIDDEN,),
            "lm_head": (VOCAB, HIDDEN),
        },
        ("norm", "proj", "c_fc"),
    ),
    "GPTNeoXForCausalLM": (
        "gpt_neox.layers",
        {
            "attention.query_key_value": (3 * HIDDEN, HIDDEN),
            "attention.dense": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h": (INNER, HIDDEN),
            "mlp.dense_4h_to_h": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        },
        {
            "gpt_neox.embed_in": (VOCAB, HIDDEN),
            "gpt_neox.final_layer_norm": (HIDDEN,),
            "embed_out": (VOCAB, HIDDEN),
        },
        ("norm", "query_key_value", "dense", "4h", "to_h"),
    ),
    "FalconForCausalLM": (
        "transformer.h",
        {
            "self_attention.query_key_value": (HIDDEN + 2 * KV, HIDDEN),
            "self_attention.dense": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h": (INNER, HIDDEN),
            "mlp.dense_4h_to_h": (HIDDEN, INNER),
            "ln_attn": (HIDDEN,),
            "ln_mlp": (HIDDEN,),
        },
        {
            "transformer.word_embeddings": (VOCAB, HIDDEN),
            "transformer.ln_f": (HIDDEN,),
            "lm_head": (VOCAB, HIDDEN),
        },
        ("ln_attn", "ln_mlp", "ln_f"),
    ),
    "GPT2LMHeadModel": (
        "transformer.h",
        {
            "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN),
            "mlp.c_fc": (HIDDEN, INNER),
            "mlp.c_proj": (INNER, HIDDEN),
            "ln_1": (HIDDEN,),
            "ln_2": (HIDDEN,),
        },
        {
            "transformer.wte": (VOCAB, HIDDEN),
            "transformer.wpe": (64, HIDDEN),
            "transformer.ln_f": (HIDDEN,),
        },
        ("ln_1", "ln_2", "ln_f", "c_attn", "c_proj", "c_fc"),
    ),
}
_MODULES["BloomForCausalLM"] = (
    "transformer.h",
    {
        "self_attention.query_key_value": (3 * HIDDEN, HIDDEN),
        "self_attention.dense": (HIDDEN, HIDDEN),
        "mlp.dense_h_to_4h": (INNER, HIDDEN),
        "mlp.dense_4h_to_h": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    },
    {
        "transformer.word_embeddings": (VOCAB, HIDDEN),
        "transformer.word_embeddings_layernorm": (HIDDEN,),
        "transformer.ln_f": (HIDDEN,),
    },
    ("norm", "ln_f", "query_key_value", "dense", "4h", "to_h"),
)
_MODULES["MptForCausalLM"] = (
    "transformer.blocks",
    {
        "attn.Wqkv": (3 * HIDDEN, HIDDEN),
        "attn.out_proj": (HIDDEN, HIDDEN),
        "ffn.up_proj": (INNER, HIDDEN),
        "ffn.down_proj": (HIDDEN, INNER),
        "norm_1": (HIDDEN,),
        "norm_2": (HIDDEN,),
    },
    {"transformer.wte": (VOCAB, HIDDEN), "transformer.norm_f": (HIDDEN,)},
    ("no biases",),
)
_MODULES["Cohere2ForCausalLM"] = _MODULES["CohereForCausalLM"]


def config_and_weights(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = CONFIG | _CONFIGS[name] | {"architectures": [name]}
    rng = np.random.default_rng(3)
    prefix, of_layer, others, biased = _MODULES[name]
    modules = others | {
        f"{prefix}.{i}.{module}": shape for i in range(LAYERS) for module, shape in of_layer.items()
    }
    weights = {}
    for module, shape in modules.items():
        weights[f"{module}.weight"] = rng.standard_normal(shape).astype(np.float32)
        if module.endswith(biased):
            size = shape[-1] if name.startswith("GPT2") else shape[0]
            weights[f"{module}.bias"] = rng.standard_normal(size).astype(np.float32)
    return {key: value for key, value in config.items() if value is not None}, weights


def _facts(layer: Layer) -> tuple[Any, ...]:
    """A layer but for the context that its rope was trained with, which only scaled ones need."""
    mixer = layer.known_attention
    turns = mixer.rope and (mixer.rope.theta, mixer.rope.dim, mixer.rope.divisors)
    return replace(layer, mixer=replace(mixer, rope=None)), turns


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_gives_what_a_directory_gives(name: str) -> None:
    config, weights = config_and_weights(name)
    wanted_arch, wanted = model_from_config(config, as_tensors(weights), "model")
    metadata, raw = converted(config, weights)
    arch, found = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    assert [_facts(layer) for layer in arch.layers] == [_facts(one) for one in wanted_arch.layers]
    assert replace(arch, layers=()) == replace(wanted_arch, layers=())
    assert list(found) == list(wanted)
    for part in wanted:
        np.testing.assert_array_equal(found[part].to_f32(), wanted[part].to_f32(), part)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BloomForCausalLM"])
def test_the_first_files_lack_the_prefix_of_a_whole_model(name: str) -> None:
    config, weights = config_and_weights(name)
    wanted, _ = model_from_config(config, as_tensors(weights), "model")
    bare = {key.removeprefix("transformer."): array for key, array in weights.items()}
    arch, found = model_from_config(config, as_tensors(bare), "model")
    assert arch == wanted
    np.testing.assert_array_equal(found["embed"].to_f32(), next(iter(weights.values())))


@pytest.mark.parametrize("key", ["clip_qkv", "qk_ln", "prefix_lm", "softmax_scale", "a_strangers"])
def test_what_an_object_of_mpt_says_is_understood_or_refused(key: str) -> None:
    config, weights = config_and_weights("MptForCausalLM")
    config["attn_config"] = config["attn_config"] | {key: 2}
    with pytest.raises(ModelFileError, match=rf"attn_config\.{key} is "):
        model_from_config(config, as_tensors(weights), "model")


def test_slopes_of_heads_beyond_a_power_of_two_stand_between_the_first() -> None:
    config, weights = config_and_weights("MptForCausalLM")
    arch, _ = model_from_config(config, as_tensors(weights), "model")
    assert arch.attentions[0].slopes == (2**-4, 2**-8, 2**-12, 2**-16)
    more = slopes("heads", largest="largest").read(ConfigReader({"heads": 6}, "x"))
    assert more == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


def test_layers_of_cohere2_turn_where_they_slide() -> None:
    metadata, raw = converted(*config_and_weights("Cohere2ForCausalLM"))
    arch, _ = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    kinds = [(layer.known_attention.window, layer.known_attention.rope) for layer in arch.layers]
    assert [window for window, _ in kinds] == [8, 8, 8, None]
    assert [rope is not None for _, rope in kinds] == [True, True, True, False]


def test_the_first_files_of_phi_2_have_one_projection() -> None:
    config, weights = config_and_weights("PhiForCausalLM")
    metadata, raw = converted(config, weights)
    _, wanted = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    for i in range(LAYERS):
        for kind in ("weight", "bias"):
            parts = [raw.pop(f"blk.{i}.attn_{part}.{kind}") for part in "qkv"]
            raw[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
    _, found = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    for part in wanted:
        np.testing.assert_array_equal(found[part].to_f32(), wanted[part].to_f32(), part)


@pytest.mark.parametrize(
    ("name", "changes", "extra", "named"),
    [
        ("GPTNeoXForCausalLM", {"gptneox.use_parallel_residual": False}, "", "use_parallel_resid"),
        ("CohereForCausalLM", {"command-r.logit_scale": None}, "", "logit_scale is missing"),
        ("CohereForCausalLM", {}, "blk.0.attn_q_norm.weight", "attn_q_norm.weight' is not part"),
        ("StableLmForCausalLM", {}, "blk.0.attn_q_norm.weight", "attn_q_norm.weight' is not part"),
        ("Cohere2ForCausalLM", {"cohere2.attention.sliding_window": None}, "", "window is missing"),
        ("FalconForCausalLM", {"falcon.tensor_data_layout": "other"}, "", "layout is 'other'"),
        ("PhiForCausalLM", {"phi2.expert_count": 4}, "", "phi2.expert_count is set"),
        ("GPT2LMHeadModel", {"gpt2.attention.scale": 0.5}, "", "gpt2.attention.scale is set"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], extra: str, named: str) -> None:
    metadata, raw = converted(*config_and_weights(name))
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    if extra:
        raw[extra] = np.ones(HIDDEN, np.float32)
    with pytest.raises(ModelFileError, match=named):
        model_from_gguf(metadata, as_tensors(raw), "x.gguf")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"alibi": True}, "alibi is set"),
        ({"new_decoder_architecture": False, "parallel_attn": False}, "parallel_attn is False"),
        ({"new_decoder_architecture": False, "multi_query": False}, "multi_query is False"),
        ({"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3 is not supported"),
    ],
)
def test_a_falcon_of_another_kind_is_refused(changes: dict[str, Any], named: str) -> None:
    config, weights = config_and_weights("FalconForCausalLM")
    with pytest.raises(ModelFileError, match=named):
        model_from_config(config | changes, as_tensors(weights), "model")


def test_a_falcon_whose_heads_share_all_keys_has_one_norm() -> None:
    config, weights = config_and_weights("FalconForCausalLM")
    config = config | {"new_decoder_architecture": False, "num_kv_heads": 4}
    config["num_ln_in_parallel_attn"] = 2  # which only newer models go by
    rows = HIDDEN + 2 * (HIDDEN // 4)
    for name in list(weights):
        if "ln_mlp" in name:
            del weights[name]
        elif "query_key_value" in name:
            weights[name] = weights[name][:rows]
        elif "ln_attn" in name:
            weights[name.replace("ln_attn", "input_layernorm")] = weights.pop(name)
    arch, found = model_from_config(config, as_tensors(weights), "model")
    assert arch.layers[0].norms == "beside"
    assert arch.attentions[0].num_kv_heads == 1
    assert found["layers.0.k"].shape == (HIDDEN // 4, HIDDEN)
    metadata, raw = converted(config, weights)
    again, bound = model_from_gguf(metadata, as_tensors(raw), "x.gguf")
    assert again.layers[0].norms == "beside"
    for part in found:
        np.testing.assert_array_equal(bound[part].to_f32(), found[part].to_f32(), part)


def test_stablelm_without_a_norm_before_its_mlp_is_refused() -> None:
    """Its 12B: there the MLP reads what attention reads."""
    metadata, raw = converted(*config_and_weights("StableLmForCausalLM"))
    raw = {name: array for name, array in raw.items() if "ffn_norm" not in name}
    with pytest.raises(ModelFileError, match=r"'blk.0.ffn_norm.weight' of shape .* is missing"):
        model_from_gguf(metadata, as_tensors(raw), "x.gguf")
