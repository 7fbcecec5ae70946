"""Gemma 4: heads by layer, keys and values of other layers, widths, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.model.cost.costs import kv_bytes_per_token
from ridgeline.model.files.families import (
    GGUF_FAMILIES,
    HF_FAMILIES,
    arch_from_config,
    model_from_config,
    model_from_gguf,
)
from ridgeline.model.files.tensors import ModelFileError, Tensor
from ridgeline.model.shape.model import Experts, ModelArch
from tests.model.files.test_published import CONFIGS
from tests.model.files.tiny import CONFIG as LLAMA
from tests.model.files.tiny import as_tensors, hf_weights

KINDS = ["sliding_attention", "full_attention"] * 3
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 40,
    "vocab_size_per_layer_input": 40,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 6,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "sliding_window": 5,
    "layer_types": KINDS,
    "rope_parameters": ROPES,
    "max_position_embeddings": 64,
}
EXPERTS = CONFIG | {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


def tensors(arch: ModelArch, family: Any, *, has_values: bool = True) -> dict[str, Tensor]:
    """Tensors of ones under the names of a file, stacks of experts as one tensor.

    Without values only vectors have some: what binds looks at no others.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in arch.matrix_shapes().items():
        if name in family.outer:
            in_file = family.outer[name]
        else:
            _, index, part = name.split(".")
            in_file = family.prefix.format(index) + family.layer[part]
        rows = shapes.get(in_file, (0,))[0] + shape[0]
        shapes[in_file] = (rows, *shape[1:])
    ones = {
        name: np.ones(shape, np.float32)
        for name, shape in shapes.items()
        if has_values or len(shape) == 1
    }
    absent = {
        name: Tensor(name, "F32", shape, np.zeros((0, 0), np.uint8))
        for name, shape in shapes.items()
        if name not in ones
    }
    return as_tensors(ones) | absent


def refused(changes: dict[str, Any], config: dict[str, Any] = CONFIG) -> str:
    with pytest.raises(ModelFileError) as error:
        arch_from_config(config | changes, {}, "x")
    return str(error.value)


def test_the_last_layers_read_the_keys_and_values_of_the_last_of_their_kind() -> None:
    arch = arch_from_config(CONFIG, {}, "x")
    assert [mixer.kv_of for mixer in arch.attentions] == [None, None, None, 1, 2, 1]
    assert [mixer.head_dim for mixer in arch.attentions] == [8, 16] * 3
    assert [mixer.window for mixer in arch.attentions] == [5, None] * 3
    assert [layer.ffn.size for layer in arch.layers] == [48] * 3 + [96] * 3
    assert kv_bytes_per_token(arch, 4) == 4 * 2 * 2 * (8 + 16 + 8)
    assert len({id(layer) for layer in arch.layers}) == len(set(arch.layers)) == 4


def test_a_proportional_rope_lets_the_upper_pairs_stand_still() -> None:
    rope = arch_from_config(CONFIG, {}, "x").attentions[1].rope
    assert rope is not None
    assert (rope.dim, rope.divisors) == (16, (1.0,) * 4 + (math.inf,) * 4)
    ropes = ROPES | {"full_attention": ROPES["full_attention"] | {"factor": 4.0}}
    rope = arch_from_config(CONFIG | {"rope_parameters": ropes}, {}, "x").attentions[1].rope
    assert rope is not None
    assert rope.divisors == (4.0,) * 4 + (math.inf,) * 4


def test_newer_files_say_heads_by_the_number_of_a_layer() -> None:
    for config in (CONFIG, EXPERTS):
        old = arch_from_config(config, {}, "x")
        changes = {"head_dim": 16}
        if config is EXPERTS:
            changes["num_key_value_heads"] = 1
        newer = {key: value for key, value in config.items() if "global" not in key}
        newer["per_layer_config"] = {f"{i:02}": changes for i in (1, 3, 5)}
        assert arch_from_config(newer, {}, "x") == old


def test_keys_are_values_where_a_layer_sees_everything() -> None:
    arch = arch_from_config(EXPERTS, {}, "x")
    assert [mixer.projections for mixer in arch.attentions] == [("q", "k", "v"), ("q", "k")] * 3
    assert [mixer.num_kv_heads for mixer in arch.attentions] == [2, 1] * 3
    ffn = arch.layers[0].ffn
    assert isinstance(ffn, Experts)
    assert ffn.beside is not None
    assert (ffn.num, ffn.per_token, ffn.size, ffn.beside.size) == (5, 2, 24, 48)
    alone = arch_from_config(EXPERTS | {"attention_k_eq_v": False}, {}, "x")
    assert [mixer.num_kv_heads for mixer in alone.attentions] == [2] * 6


def test_the_network_beside_experts_is_wide_too() -> None:
    arch = arch_from_config(EXPERTS | {"num_kv_shared_layers": 2}, {}, "x")
    networks = [layer.ffn.beside for layer in arch.layers if isinstance(layer.ffn, Experts)]
    assert [network.size for network in networks if network] == [48] * 4 + [96] * 2


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    left_out = ("layer_types", "rope_parameters", "global_head_dim", "head_dim", "sliding_window")
    left_out += (
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "num_kv_shared_layers",
    )
    left_out += ("use_double_wide_mlp", "max_position_embeddings")
    arch = arch_from_config({k: v for k, v in CONFIG.items() if k not in left_out}, {}, "x")
    assert [mixer.window for mixer in arch.attentions] == [512] * 5 + [None]
    assert [mixer.head_dim for mixer in arch.attentions] == [256] * 5 + [512]
    assert (arch.input_size, arch.max_position, arch.norm_eps) == (256, 131_072, 1e-6)
    assert (arch.logit_softcap, arch.tied_embeddings) == (0.0, True)
    rope = arch.attentions[-1].rope
    assert rope is not None
    assert (rope.theta, rope.divisors.count(1.0)) == (1e6, 64)
    # The last layer sees everything, whatever the pattern says.
    seven = arch_from_config(CONFIG | {"layer_types": None, "num_hidden_layers": 7,
                                       "num_kv_shared_layers": 0}, {}, "x")  # fmt: skip
    assert [mixer.window for mixer in seven.attentions] == [5] * 5 + [None] * 2
    none = arch_from_config(CONFIG | {"hidden_size_per_layer_input": None}, {}, "x")
    assert none.input_size == 0

    unified = {k: v for k, v in CONFIG.items() if k not in left_out}
    unified["architectures"] = ["Gemma4UnifiedForCausalLM"]
    arch = arch_from_config(unified, {}, "x")
    assert [mixer.window for mixer in arch.attentions] == [1024] * 5 + [None]
    assert (arch.input_size, arch.max_position) == (0, 262_144)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS])
def test_every_tensor_binds_and_what_nobody_reads_may_be_left_over(config: dict[str, Any]) -> None:
    name = "Gemma4ForCausalLM of experts" if config is EXPERTS else "Gemma4ForCausalLM"
    family = HF_FAMILIES[name]
    arch = arch_from_config(config, {}, "x")
    raw = tensors(arch, family)
    if config is CONFIG:  # published files have them
        unread = {f"model.layers.4.self_attn.{part}.weight": np.ones((16, 32), np.float32)
                  for part in ("k_proj", "v_proj", "k_norm")}  # fmt: skip
        raw |= as_tensors(unread)
    bound = model_from_config(config, raw, "x")[1]
    assert bound.keys() == arch.matrix_shapes().keys()
    if config is EXPERTS:
        np.testing.assert_allclose(bound["layers.0.router_norm"].to_f32(), 32**-0.5)
    for left_over in ("model.layers.2.self_attn.z.weight", "model.layers.1.self_attn.x.weight"):
        more = as_tensors({left_over: np.ones((16, 32), np.float32)})
        with pytest.raises(ModelFileError, match="is not part of this architecture"):
            model_from_config(config, raw | more, "x")


def test_the_text_half_of_a_model_that_sees_and_hears() -> None:
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {k: v for k, v in EXPERTS.items() if k != "architectures"},
        "vision_config": {"hidden_size": 3},
        "audio_config": {"hidden_size": 3},
        "audio_token_id": 7,
        "vision_soft_tokens_per_image": 280,
        "tie_word_embeddings": True,
    }
    arch = arch_from_config(whole, {}, "x")
    assert arch == arch_from_config(EXPERTS, {}, "x")
    family = HF_FAMILIES["Gemma4ForCausalLM of experts"]
    raw = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors(arch, family).items()
    }
    for name in ("model.vision_tower.x", "model.audio_tower.y", "model.embed_vision.z.weight"):
        raw |= as_tensors({name: np.ones((3, 3), np.float32)})
    assert model_from_config(whole, raw, "x")[1].keys() == arch.matrix_shapes().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 5}, "is 5: layer 1 finds no layer of its kind"),
        ({"num_kv_shared_layers": 9}, "is 9: layer 0 finds no layer of its kind"),
        ({"vocab_size_per_layer_input": 41}, "vocab_size_per_layer_input differs"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"enable_moe_block": "yes"}, "enable_moe_block is 'yes'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "full_attention and sliding_attention"),
        # transformers passes over the share of a rope whose type is default.
        (
            {
                "rope_parameters": ROPES
                | {"sliding_attention": {**ROPES["full_attention"], "rope_type": "default"}}
            },
            "partial_rotary_factor is 0.5",
        ),
        (
            {
                "rope_parameters": ROPES
                | {"full_attention": {**ROPES["full_attention"], "rope_type": "default"}}
            },
            "partial_rotary_factor is 0.5",
        ),
        ({"per_layer_config": [3]}, "by the number of a layer"),
        ({"per_layer_config": {"6": {"head_dim": 16}}}, "by the number of a layer"),
        ({"per_layer_config": {"1": {"window": 16}}}, "by the number of a layer"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "layers of one kind differ"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v is 1"),
        ({"a_strangers_scale": 3}, "a_strangers_scale is "),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert message in refused(changes)


def test_keys_of_gemma_4_are_refused_in_other_families() -> None:
    for changes in ({"attention_k_eq_v": True}, {"global_head_dim": 16}, {"per_layer_config": {}}):
        key = next(iter(changes))
        message = "" if not changes[key] else refused(changes, LLAMA)
        assert key in message or not changes[key]


def test_any_family_may_share_keys_and_values_across_layers() -> None:
    """As in cross-layer attention (Brandon et al., 2024), by the same key."""
    config = LLAMA | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    weights = hf_weights(config)
    arch, bound = model_from_config(config, as_tensors(weights), "x")
    assert [mixer.kv_of for mixer in arch.attentions] == [None, None, 1, 1]
    assert "layers.2.k" not in bound
    every = arch_from_config(config | {"num_kv_shared_layers": 0}, {}, "x")
    assert kv_bytes_per_token(every, 4) == 2 * kv_bytes_per_token(arch, 4)
    assert "layer 0 finds no layer of its kind" in refused({"num_kv_shared_layers": 2}, LLAMA)


# --- GGUF ----------------------------------------------------------------------------------------

META: dict[str, Any] = {
    "general.architecture": "gemma4",
    "gemma4.block_count": 6,
    "gemma4.context_length": 64,
    "gemma4.embedding_length": 32,
    "gemma4.embedding_length_per_layer_input": 6,
    "gemma4.feed_forward_length": np.array([48] * 3 + [96] * 3),
    "gemma4.attention.head_count": 4,
    "gemma4.attention.head_count_kv": 2,
    "gemma4.attention.key_length": 16,
    "gemma4.attention.value_length": 16,
    "gemma4.attention.key_length_swa": 8,
    "gemma4.attention.value_length_swa": 8,
    "gemma4.attention.sliding_window": 5,
    "gemma4.attention.sliding_window_pattern": np.array([True, False] * 3),
    "gemma4.attention.shared_kv_layers": 3,
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma4.rope.dimension_count": 16,
    "gemma4.rope.dimension_count_swa": 8,
    "gemma4.rope.freq_base": 1e6,
    "gemma4.rope.freq_base_swa": 1e4,
}


def of_gguf(
    config: dict[str, Any], **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor], ModelArch]:
    arch = arch_from_config(config, {}, "x")
    family = GGUF_FAMILIES["gemma4 of experts" if config is EXPERTS else "gemma4"]
    raw = tensors(arch, family)
    raw |= as_tensors({"rope_freqs.weight": np.array([1] * 4 + [1e30] * 4, np.float32)})
    meta = META | {f"gemma4.{key}": value for key, value in changes.items()}
    return meta, raw, arch


def alike(arch: ModelArch) -> list[Any]:
    """The layers without the context before an extension, which plays no part here."""
    ropes = [
        replace(mixer.rope, original_max_position=0) for mixer in arch.attentions if mixer.rope
    ]
    mixers = [replace(mixer, rope=None) for mixer in arch.attentions]
    rest = [replace(layer, mixer=arch.attentions[0]) for layer in arch.layers]
    return [ropes, mixers, rest, replace(arch, layers=())]


def test_a_gguf_file_says_the_same() -> None:
    meta, raw, arch = of_gguf(CONFIG)
    unread = {f"blk.4.attn_{part}.weight": np.ones((16, 32), np.float32) for part in "kv"}
    raw |= as_tensors(unread)  # published files have them
    found, bound = model_from_gguf(meta, raw, "x")
    assert alike(found) == alike(arch)
    assert bound.keys() == arch.matrix_shapes().keys()
    meta, raw, arch = of_gguf(
        EXPERTS,
        embedding_length_per_layer_input=0,
        feed_forward_length=48,
        expert_feed_forward_length=24,
        expert_count=5,
        expert_used_count=2,
    )
    meta["gemma4.attention.shared_kv_layers"] = 0
    meta["gemma4.attention.head_count_kv"] = np.array([2, 1] * 3)
    found, bound = model_from_gguf(meta, raw, "x")
    assert alike(found) == alike(arch)
    np.testing.assert_allclose(bound["layers.0.router_norm"].to_f32(), 32**-0.5)
    for i in range(6):  # as some converters do
        both = raw.pop(f"blk.{i}.ffn_gate_up_exps.weight").to_f32().reshape(5, 2, 24, 32)
        parts = {"gate": both[:, 0].reshape(-1, 32), "up": both[:, 1].reshape(-1, 32)}
        raw |= as_tensors({f"blk.{i}.ffn_{k}_exps.weight": v for k, v in parts.items()})
    assert alike(model_from_gguf(meta, raw, "x")[0]) == alike(arch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_length": np.array([48, 96])}, "a width for each of the layers"),
        ({"attention.sliding_window_pattern": None}, "sliding_window_pattern is missing"),
        ({"attention.value_length_swa": 4}, "value_length_swa differs"),
        ({"attention.head_count_kv": np.array([2, 1, 4] * 2)}, "must have one number, or 0"),
        ({"attention.head_count_kv": np.array([2, 2, 2, 1, 2, 2])}, "layers of one kind differ"),
        ({"rope.dimension_count_swa": 10}, "rope over 10"),
        ({"attn_logit_softcapping": 3.0}, "attn_logit_softcapping is set"),
        ({"a_strangers_scale": 3}, "a_strangers_scale is "),
    ],
)
def test_gguf_files_that_cannot_be_computed(changes: dict[str, Any], message: str) -> None:
    meta, raw, _ = of_gguf(CONFIG, **changes)
    with pytest.raises(ModelFileError, match=message):
        model_from_gguf(meta, raw, "x")


PUBLISHED: dict[str, dict[str, Any]] = {  # metadata of files that llama.cpp's converter wrote
    "gemma-4-e2b": {
        "block_count": 35,
        "context_length": 131_072,
        "embedding_length": 1536,
        "feed_forward_length": np.array([6144] * 15 + [12_288] * 20),
        "attention.head_count": 8,
        "attention.head_count_kv": 1,
        "attention.sliding_window": 512,
        "attention.shared_kv_layers": 20,
        "embedding_length_per_layer_input": 256,
        "attention.sliding_window_pattern": np.array(([True] * 4 + [False]) * 7),
    },
    "gemma-4-26b-a4b": {
        "block_count": 30,
        "context_length": 262_144,
        "embedding_length": 2816,
        "feed_forward_length": 2112,
        "attention.head_count": 16,
        "attention.head_count_kv": np.array([8, 8, 8, 8, 8, 2] * 5),
        "expert_count": 128,
        "expert_used_count": 8,
        "attention.sliding_window": 1024,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "attention.sliding_window_pattern": np.array(([True] * 5 + [False]) * 5),
        "expert_feed_forward_length": 704,
    },
}
OF_ALL = {
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "final_logit_softcapping": 30.0,
    "rope.dimension_count": 512,
    "rope.dimension_count_swa": 256,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_metadata_of_published_gguf_files_says_what_their_configs_say(name: str) -> None:
    config = CONFIGS[name]["config"]
    meta = {f"gemma4.{key}": value for key, value in (OF_ALL | PUBLISHED[name]).items()}
    arch = arch_from_config(config, {}, name)
    family = GGUF_FAMILIES["gemma4 of experts" if "expert_count" in PUBLISHED[name] else "gemma4"]
    raw = tensors(arch, family, has_values=False)
    raw |= as_tensors({"rope_freqs.weight": np.array([1] * 64 + [1e30] * 192, np.float32)})
    found, _ = model_from_gguf(meta | {"general.architecture": "gemma4"}, raw, name)
    assert alike(found) == alike(arch)


def test_some_values_missing_is_no_family() -> None:
    meta, raw, _ = of_gguf(CONFIG)
    del raw["blk.0.attn_v.weight"]
    with pytest.raises(ModelFileError, match="layers of one kind differ"):
        model_from_gguf(meta, raw, "x")
