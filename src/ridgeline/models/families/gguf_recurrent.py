"""Families with recurrent layers in GGUF files, but LFM2, by ``general.architecture``.

llama.cpp's converter stores what decays states as minus an exponential, convolutions without their
empty axis, multipliers of Falcon-H1 within the weights, and value heads of Qwen3.5 in the order in
which key heads serve them by turns.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.gguf import FAMILIES as _PLAIN
from ridgeline.models.families.gguf_names import SHARED
from ridgeline.models.families.table import Family, const, has, integer, number, quotient

SSM_LAYER = {
    "in": "ssm_in.weight",
    "conv": "ssm_conv1d.weight",
    "conv_bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "a_log": "ssm_a",
    "skip": "ssm_d",
    "gated_scale": "ssm_norm.weight",
    "out": "ssm_out.weight",
}
SSM = {
    "recurrent.num_heads": integer("ssm.time_step_rank"),
    "recurrent.head_dim": quotient("ssm.inner_size", "ssm.time_step_rank"),
    "recurrent.state_dim": integer("ssm.state_size"),
    "recurrent.num_groups": integer("ssm.group_count"),
    "recurrent.kernel": integer("ssm.conv_kernel"),
    "recurrent.conv_bias": has("blk.0.ssm_conv1d.bias"),
}
_DELTA_LAYER = {
    "mlp_norm": "post_attention_norm.weight",
    "q_gate": "attn_q.weight",
    "qkv": "attn_qkv.weight",
    "z": "attn_gate.weight",
    "beta": "ssm_beta.weight",
    "decay": "ssm_alpha.weight",
    "conv": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "a_log": "ssm_a",
    "gated_scale": "ssm_norm.weight",
    "out": "ssm_out.weight",
    **SHARED,
    "shared_scale": "ffn_gate_inp_shexp.weight",
}
_DELTA = {
    "mixer.gated": const(True),
    "recurrent.num_key_heads": integer("ssm.group_count"),
    "recurrent.num_value_heads": integer("ssm.time_step_rank"),
    "recurrent.key_dim": integer("ssm.state_size"),
    "recurrent.value_dim": quotient("ssm.inner_size", "ssm.time_step_rank"),
    "recurrent.kernel": integer("ssm.conv_kernel"),
}
_BY_TURNS = {"recurrent.by_turns": const(True)}
_SHARED_SIZE = {"shared.size": integer("expert_shared_feed_forward_length")}
_SHARED = {"ffn.shared_gated": const(True), **_SHARED_SIZE}


def _delta(family: Family) -> Family:
    """Return a family of the same experts or MLP, with the delta rule in most layers."""
    return replace(
        family,
        layer={**family.layer, **_DELTA_LAYER},
        recurrent="delta",
        decays=True,
        attention_layers="full_attention_interval",
        pattern=4,
        unused=("rope.dimension_sections",),  # of pictures; of text all are alike
    )


def _granite(family: Family) -> Family:
    """Return Granite 4's family of the same MLP or experts: attention without rope in few layers.

    Bamba's files have the same name, but their layers turn.
    """
    return replace(
        family,
        layer={**family.layer, **SSM_LAYER, **SHARED},
        facts={
            **family.facts,
            **SSM,
            "rope.turns": const(False),
            "mixer.qkv_bias": has("attn_q.bias"),
            "mixer.o_bias": has("attn_output.bias"),
            "recurrent.conv_bias": has("ssm_conv1d.bias"),
        },
        recurrent="ssm",
        decays=True,
        must={"rope.scaling.finetuned": False},
        unused=(),
    )


_DENSE, _SPARSE = _delta(_PLAIN["qwen3"]), _delta(_PLAIN["qwen3moe"])
_GRANITE = _granite(_PLAIN["granite"])
_GRANITE_OF_EXPERTS = _granite(_PLAIN["granitemoe"])
FAMILIES = {
    "mamba2": Family(
        _PLAIN["qwen3"].outer,
        {"attn_norm": "attn_norm.weight"} | SSM_LAYER,
        "blk.{}.",
        {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_rms_epsilon"),
            "ffn.size": const(0),
        }
        | SSM,
        recurrent="ssm",
        decays=True,
    ),
    "falcon-h1": replace(
        _PLAIN["qwen3"],
        layer={**_PLAIN["qwen3"].layer, **SSM_LAYER},
        facts={
            **_PLAIN["qwen3"].facts,
            **SSM,
            "mixer.qk_norm": const(""),
            "recurrent.gated_norm": const(False),  # whether it is before the gate is not said
        },
        instead={"mlp_norm": "ffn_norm"},  # which llama.cpp has without a suffix
        recurrent="ssm",
        beside=True,
        decays=True,
    ),
    "granitehybrid": replace(
        _GRANITE,
        facts={
            **_GRANITE.facts,
            "ffn.size": integer("expert_shared_feed_forward_length", "feed_forward_length"),
        },
    ),
    "granitehybrid of experts": replace(
        _GRANITE_OF_EXPERTS, facts={**_GRANITE_OF_EXPERTS.facts, **_SHARED_SIZE}
    ),
    "qwen35": replace(_DENSE, facts={**_DENSE.facts, **_DELTA, **_BY_TURNS}),
    "qwen35moe": replace(_SPARSE, facts={**_SPARSE.facts, **_DELTA, **_BY_TURNS, **_SHARED}),
    "qwen3next": replace(
        _SPARSE,
        layer={**_SPARSE.layer, **dict.fromkeys(("beta", "decay"), "ssm_ba.weight")},
        facts={**_SPARSE.facts, **_DELTA, **_SHARED},
    ),
}
