"""Granite 4 and Bamba: which layers have attention, whether it turns, and what files say twice."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.model.cost import costs
from ridgeline.model.cost.shapes import weight_params
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import arch_from_config, model_from_gguf
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.shape.model import Experts, Mlp
from tests.model.files.test_published import CONFIGS
from tests.model.files.tiny import CONFIG, as_tensors, gguf_metadata, gguf_weights

SMALL: dict[str, Any] = CONFIGS["granite-4.0-h-350m"]["config"]
TINY: dict[str, Any] = CONFIGS["granite-4.0-h-tiny"]["config"]


def test_layers_are_named_one_by_one() -> None:
    arch = arch_from_config(SMALL, {}, "x")
    with_attention = [i for i, layer in enumerate(arch.layers) if layer.attention is not None]
    assert with_attention == [10, 13, 17, 27]
    others = [i for i, layer in enumerate(arch.layers) if layer.recurrent is not None]
    assert sorted(with_attention + others) == [*range(32)]
    assert arch.attentions[0].scale == 0.015625
    assert (arch.embed_scale, arch.residual_scale, arch.logit_scale) == (12.0, 0.246, 1 / 3)
    kinds = {key: value for key, value in SMALL.items() if key != "layer_types"}
    named = {"layers_block_type": SMALL["layer_types"]}  # of the first files
    assert arch_from_config(kinds | named, {}, "x") == arch
    newer = ["full_attention" if one == "attention" else "linear_attention" for one in
             SMALL["layer_types"]]  # fmt: skip
    assert arch_from_config(SMALL | {"layer_types": newer}, {}, "x") == arch


def test_positions_count_only_where_a_config_says_rope() -> None:
    for changes, turns in (
        ({}, False),
        ({"position_embedding_type": None}, False),
        ({"position_embedding_type": "rope"}, True),
    ):
        arch = arch_from_config(SMALL | changes, {}, "x")
        assert {mixer.rope is not None for mixer in arch.attentions} == {turns}
    with pytest.raises(ModelFileError, match="position_embedding_type 'alibi' is not supported"):
        arch_from_config(SMALL | {"position_embedding_type": "alibi"}, {}, "x")


def test_a_model_without_experts_has_what_is_the_shared_expert_of_others() -> None:
    assert arch_from_config(SMALL, {}, "x").layers[0].ffn == Mlp(2048)
    ffn = arch_from_config(TINY, {}, "x").layers[0].ffn
    assert ffn == Experts(64, 6, 512, shared=Mlp(1024))


def test_a_shared_expert_stands_beside_those_of_granite_3_if_the_config_has_one() -> None:
    plain = CONFIGS["granite-3.1-1b-a400m"]["config"]
    config = plain | {
        "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
        "shared_intermediate_size": 1024,
    }  # fmt: skip
    arch = arch_from_config(config, {}, "x")
    assert arch.layers[0].ffn == Experts(32, 8, 512, shared=Mlp(1024))
    more = 24 * 3 * 1024 * 1024
    assert costs.weight_params(arch) == CONFIGS["granite-3.1-1b-a400m"]["num_params"] + more
    assert weight_params(shape_of_config(config)) == costs.weight_params(arch)
    without = arch_from_config(config | {"shared_intermediate_size": 0}, {}, "x")
    assert without == arch_from_config(plain, {}, "x")


def test_bamba_turns_half_of_each_head() -> None:
    sizes = {"num_hidden_layers": 4, "attn_layer_indices": [1], "head_dim": None}
    kept = {k: v for k, v in SMALL.items() if k.startswith(("hidden", "mamba", "num", "vocab"))}
    bamba = kept | sizes | {
        "architectures": ["BambaForCausalLM"], "intermediate_size": 96, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "num_experts_per_tok": None,
    }  # fmt: skip
    arch = arch_from_config(bamba, {}, "x")
    assert [layer.attention is not None for layer in arch.layers] == [False, True, False, False]
    assert (arch.attentions[0].head_dim, arch.attentions[0].rope_dim) == (64, 32)
    with pytest.raises(ModelFileError, match="time_step_limit is "):
        arch_from_config(bamba | {"time_step_limit": [0.0, 0.1]}, {}, "x")


def test_a_file_of_attention_alone_says_sizes_of_parts_that_it_does_not_have() -> None:
    """llama.cpp's converter writes them for every Granite 4."""
    more = {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1,
            "ssm.inner_size": 64, "ssm.time_step_rank": 4,
            "expert_shared_feed_forward_length": 64}  # fmt: skip
    metadata, raw = gguf_metadata(CONFIG, "granite"), as_tensors(gguf_weights(CONFIG, "granite"))
    wanted, _ = model_from_gguf(metadata, raw, "x.gguf")
    said = {f"granite.{key}": value for key, value in more.items()}
    assert model_from_gguf(metadata | said, raw, "x.gguf")[0] == wanted
    with pytest.raises(ModelFileError, match=r"granite\.ssm\.other is 1"):
        model_from_gguf(metadata | {"granite.ssm.other": 1}, raw, "x.gguf")


def test_a_file_of_bamba_is_refused_by_what_it_says_of_positions() -> None:
    metadata = {
        "general.architecture": "granitehybrid", "granitehybrid.rope.scaling.finetuned": True,
    }  # fmt: skip
    with pytest.raises(ModelFileError, match=r"scaling\.finetuned is True, which is not supp"):
        model_from_gguf(metadata, {}, "x.gguf")
