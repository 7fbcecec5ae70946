"""DeepSeek and its kin: what their files say, what a cache holds of a token, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest

from ridgeline.model.cost.costs import kv_bytes_per_token
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.cost.shapes import weight_params
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import (
    GGUF_FAMILIES,
    HF_FAMILIES,
    arch_from_config,
    model_from_config,
    model_from_gguf,
)
from ridgeline.model.files.rope_tables import log
from ridgeline.model.files.tensors import ModelFileError, Tensor
from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Experts, Mlp, ModelArch
from tests.model.files.test_published import CONFIGS
from tests.model.files.tiny import as_tensors

PUBLISHED = {name: entry for name, entry in CONFIGS.items() if "num_card_params" in entry}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": YARN | {"mscale_all_dim": 0.5},
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
}
V2 = {k: v for k, v in CONFIG.items() if k not in ("norm_topk_prob", "num_nextn_predict_layers")}
V2 |= {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy", "q_lora_rank": None}


def shapes_in_file(arch: ModelArch, family: Any) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a file's tensors, each expert's by itself where files have it so."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in arch.matrix_shapes().items():
        if name in family.outer:
            shapes[family.outer[name]] = shape
            continue
        _, index, part = name.split(".")
        ffn = arch.layers[int(index)].ffn
        is_dense = isinstance(ffn, Mlp) and part in family.alternatives
        in_file = family.prefix.format(index)
        in_file += family.alternatives[part] if is_dense else family.layer[part]
        if "{e}" in in_file:
            assert isinstance(ffn, Experts)
            for e in range(ffn.num):
                shapes[in_file.format(e=e)] = (shape[0] // ffn.num, shape[1])
            continue
        rows = shapes.get(in_file, (0,))[0] + shape[0]
        shapes[in_file] = (rows, *shape[1:])
    return shapes


def ones(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return as_tensors({name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def empty(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose rows have no bytes."""
    return Tensor(name, "F32", shape, np.zeros((shape[0], 0), np.uint8))


def refused(changes: dict[str, Any], config: dict[str, Any] = CONFIG) -> str:
    with pytest.raises(ModelFileError) as error:
        arch_from_config(config | changes, {}, "x")
    return str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_parameters_of_its_card(name: str) -> None:
    entry = PUBLISHED[name]
    arch = arch_from_config(entry["config"], {}, name)
    assert entry["num_params"] == pytest.approx(entry["num_card_params"], rel=0.03)
    # Per layer and token one vector: 512 channels of the latent and 64 that turn.
    assert kv_bytes_per_token(arch, 2) == 2 * (512 + 64) * arch.num_layers
    family = HF_FAMILIES[entry["config"]["architectures"][0]]
    if arch.num_layers < 48:  # the others have 50,000 tensors
        raw = {n: empty(n, shape) for n, shape in shapes_in_file(arch, family).items()}
        assert model_from_config(entry["config"], raw, name)[1].keys() == (
            arch.matrix_shapes().keys()
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_planner_sees_the_model_that_the_engine_runs(name: str) -> None:
    config = PUBLISHED[name]["config"]
    arch, shape = arch_from_config(config, {}, name), shape_of_config(config)
    same = shape_of_arch(arch, name)
    assert weight_params(shape) == weight_params(same) == PUBLISHED[name]["num_params"]
    assert [layer.cache for layer in shape.layers] == [layer.cache for layer in same.layers]
    for one in (shape, same):
        values = sum(layer.cache.values_per_token() for layer in one.layers)
        assert 2 * values == kv_bytes_per_token(arch, 2)


def test_what_a_config_says() -> None:
    arch = arch_from_config(CONFIG, {}, "x")
    mixer = arch.layers[0].attention
    assert isinstance(mixer, Attention)
    assert mixer.latent == Latent(q_rank=12, kv_rank=16, nope_dim=10, v_dim=8)
    assert (mixer.num_kv_heads, mixer.head_dim, mixer.key_dim, mixer.value_dim) == (1, 16, 22, 16)
    assert mixer.rope is not None
    # YaRN's weight of cosine and sine is a quotient; the scores have the rest, squared.
    assert mixer.rope.attention_factor == (1 + 0.1 * log(4.0)) / (1 + 0.05 * log(4.0))
    assert mixer.score_scale == 16**-0.5 * (1 + 0.05 * log(4.0)) ** 2
    first, *others = arch.layers
    assert first.ffn == Mlp(48)
    assert others[0] is others[1]
    assert others[0].ffn == Experts(
        8, 3, 24, scale=2.5, shared=Mlp(48), router="sigmoid", choice_bias=True, num_groups=4,
        groups_met=2,
    )  # fmt: skip


def test_of_v2_no_group_limits_a_greedy_choice() -> None:
    arch = arch_from_config(V2, {}, "x")
    greedy = Experts(8, 3, 24, normalised=False, scale=2.5, shared=Mlp(48))
    assert arch.layers[1].ffn == greedy
    assert arch.attentions[0].projections == ("q", "kv_a")
    limited = arch_from_config(V2 | {"topk_method": "group_limited_greedy"}, {}, "x")
    assert limited.layers[1].ffn == replace(greedy, num_groups=4, groups_met=2)
    assert arch_from_config(V2 | {"n_shared_experts": None}, {}, "x").layers[1].ffn == (
        replace(greedy, shared=None)
    )


def test_glm_says_its_layers_by_name() -> None:
    glm = CONFIG | {"architectures": ["Glm4MoeLiteForCausalLM"]}
    del glm["first_k_dense_replace"]
    kinds = ["dense", "dense", "sparse"]
    arch = arch_from_config(glm | {"mlp_layer_types": kinds}, {}, "x")
    assert [isinstance(layer.ffn, Mlp) for layer in arch.layers] == [True, True, False]
    assert arch_from_config(glm, {}, "x").layers[1].ffn == arch.layers[2].ffn
    turned = arch_from_config(glm | {"mlp_layer_types": kinds[::-1]}, {}, "x")
    assert [isinstance(layer.ffn, Mlp) for layer in turned.layers] == [False, True, True]
    for wrong in (kinds[:2], ["dense", "dense", "some"], "dense"):
        assert "'dense' or 'sparse' for each" in refused({"mlp_layer_types": wrong}, glm)


def test_rows_of_what_turns_come_first_in_halves() -> None:
    """In files neighbours turn, and stand behind what does not."""
    arch = arch_from_config(CONFIG, {}, "x")
    shapes = shapes_in_file(arch, HF_FAMILIES["DeepseekV3ForCausalLM"])
    raw = ones(shapes)
    prefix = "model.layers.0.self_attn."
    numbered = {
        f"{prefix}{name}.weight": np.arange(rows, dtype=np.float32)[:, None] + np.zeros((1, width))
        for name, rows, width in (("q_b_proj", 64, 12), ("kv_a_proj_with_mqa", 22, 32),
                                  ("kv_b_proj", 72, 16))
    }  # fmt: skip
    raw |= as_tensors({name: values.astype(np.float32) for name, values in numbered.items()})
    guessing = {name.replace("layers.2.", "layers.3."): one for name, one in raw.items()}
    bound = model_from_config(CONFIG, raw | guessing, "x")[1]
    rows = {
        name: bound[f"layers.0.{name}"].to_f32()[:, 0].tolist()
        for name in ("q_b", "kv_a", "k_b", "v_b")
    }
    turning = [0, 2, 4, 1, 3, 5]
    assert rows["q_b"][:16] == [10 + i for i in turning] + list(range(10))
    assert rows["q_b"][16:22] == [26 + i for i in turning]
    assert rows["kv_a"] == [16 + i for i in turning] + list(range(16))
    assert rows["k_b"][8:12] == [8, 9, 18, 19]  # of the second head behind the first's values
    assert rows["v_b"][:9] == [*range(10, 18), 28]
    with pytest.raises(ModelFileError, match=r"'model\.layers\.4\.x' is not part"):
        model_from_config(CONFIG, raw | ones({"model.layers.4.x": (3, 3)}), "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 4}, "first_k_dense_replace is 4, of 3 layers"),
        ({"n_group": 3}, "8 experts cannot stand in 3 groups"),
        ({"topk_group": 5}, "4 groups of which a token goes to 5"),
        ({"topk_group": 1}, "groups of 2 experts are too small"),
        ({"n_group": 8, "topk_group": 8}, "groups of 1 experts are too small"),
        ({"num_experts_per_tok": 9}, "a token cannot go to 9 of 8 experts"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"qk_rope_head_dim": 5}, "must be even"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim is 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"index_topk": 2048}, "index_topk is 2048"),
        (
            {"rope_scaling": {**CONFIG["rope_scaling"], "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta is 0.1",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert message in refused(changes)


def test_v2_that_divides_weights_is_refused() -> None:
    assert "norm_topk_prob is True" in refused({"norm_topk_prob": True}, V2)


# --- GGUF ----------------------------------------------------------------------------------------

META: dict[str, Any] = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 3,
    "deepseek2.context_length": 64,
    "deepseek2.embedding_length": 32,
    "deepseek2.feed_forward_length": 48,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.attention.head_count": 4,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.q_lora_rank": 12,
    "deepseek2.attention.kv_lora_rank": 16,
    "deepseek2.attention.key_length": 22,
    "deepseek2.attention.value_length": 16,
    "deepseek2.attention.key_length_mla": 16,
    "deepseek2.attention.value_length_mla": 8,
    "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
    "deepseek2.expert_count": 8,
    "deepseek2.expert_used_count": 3,
    "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_feed_forward_length": 24,
    "deepseek2.expert_weights_scale": 2.5,
    "deepseek2.expert_weights_norm": True,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.expert_group_count": 4,
    "deepseek2.expert_group_used_count": 2,
    "deepseek2.rope.dimension_count": 6,
    "deepseek2.rope.freq_base": 1e4,
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 4.0,
    "deepseek2.rope.scaling.original_context_length": 16,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.1,
}


def test_a_gguf_file_says_the_same() -> None:
    alike = CONFIG | {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}
    arch = arch_from_config(alike, {}, "x")
    raw = ones(shapes_in_file(arch, GGUF_FAMILIES["deepseek2"]))
    older = META | {
        "deepseek2.attention.head_count_kv": 4,
        "deepseek2.attention.key_length": 16,
        "deepseek2.attention.value_length": 8,
        "deepseek2.attention.key_length_mla": None,
        "deepseek2.attention.value_length_mla": None,
    }
    for meta in (META, older):
        read, bound = model_from_gguf(meta, raw, "x")
        assert read == arch
        assert bound.keys() == arch.matrix_shapes().keys()
    unsaid = META | {"deepseek2.expert_gating_func": None, "deepseek2.expert_group_count": None}
    unsaid |= {"deepseek2.expert_group_used_count": None}
    with pytest.raises(ModelFileError, match=r"deepseek2\.expert_gating_func is missing"):
        model_from_gguf(unsaid, raw, "x")
    without_biases = {name: one for name, one in raw.items() if "exp_probs_b" not in name}
    ffn = model_from_gguf(unsaid, without_biases, "x")[0].layers[1].ffn
    changes = {"router": "softmax", "num_groups": 1, "groups_met": 1, "choice_bias": False}
    assert ffn == replace(arch.layers[1].ffn, **changes)  # type: ignore[type-var]
    with pytest.raises(ModelFileError, match="expert_gating_func 3 is not supported"):
        model_from_gguf(META | {"deepseek2.expert_gating_func": 3}, raw, "x")
    with pytest.raises(ModelFileError, match="queries that grow with the position"):
        model_from_gguf(META | {"deepseek2.attention.temperature_scale": 0.1}, raw, "x")
    with pytest.raises(ModelFileError, match="of which 16 turn"):
        model_from_gguf(META | {"deepseek2.rope.dimension_count": 16}, raw, "x")


def test_keys_of_a_gguf_file_are_turned_whatever_their_type() -> None:
    """Newer files have "k_b" and "v_b" apart, the first by latent channels."""
    arch = arch_from_config(CONFIG, {}, "x")
    shapes = shapes_in_file(arch, GGUF_FAMILIES["deepseek2"])
    raw = ones({name: shape for name, shape in shapes.items() if "attn_kv_b" not in name})
    k_b = np.random.default_rng(3).normal(size=(4, 16, 32)).astype(np.float32)  # nope is 32 here
    kind = gguf.GGMLQuantizationType.Q8_0
    encoded = gguf.quants.quantize(k_b.reshape(-1, 32), kind)
    for i in range(3):
        name = f"blk.{i}.attn_k_b.weight"
        raw[name] = Tensor(name, "Q8_0", (4, 16, 32), encoded)
        raw |= ones({f"blk.{i}.attn_v_b.weight": (4, 8, 16)})
        raw |= ones({f"blk.{i}.attn_q_b.weight": (4 * 38, 12)})
    meta = META | {"deepseek2.attention.key_length_mla": 38}
    bound = model_from_gguf(meta, raw, "x")[1]["layers.2.k_b"]
    assert bound.shape == (4 * 32, 16)
    np.testing.assert_allclose(
        bound.to_f32().reshape(4, 32, 16).swapaxes(1, 2), k_b, atol=0.02, rtol=0
    )
