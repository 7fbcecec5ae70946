"""What the names of model families imply for a shape: ``model_type`` of a config.json as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's name implies.

    Attributes:
        norms: of the residual stream, in each layer.
        norm_bias: norms have a bias.
        gated: the MLP has a gate.
        qkv_bias: q, k and v always have a bias.
        bias_switch: ``attention_bias`` gives q, k and v biases.
        o_bias: it gives one to the output of attention as well.
        mlp_switch: ``mlp_bias`` gives the MLP biases.
        qk_norm: as in ``layers.attention``.
        optional_qk_norm: the same, only where ``use_qk_norm`` is set.
        sinks: as in ``layers.attention``.
        output_gate: as in ``layers.attention``.
        window: which layers see a window where ``layer_types`` is silent: "" none, "all", "switch"
            (with ``use_sliding_window``, not the lower ones), or every layer but each N-th.
        default_window: where the config does not mention one, tokens.
        head_dim: where the config does not mention it; 0 divides the width.
        tied: the head is the embedding where the config is silent.
        router_bias: the router has a bias, for balance.
        expert_bias: experts have biases.
        by_layer: as in ``shape_by_layer``.
        input_size: of such a layer's own input, where the config does not mention it.
        positions: rows of learnt positions beyond those of the context; None where there are none.
        head_bias: the head has a bias.
        embedding_norm: a norm stands behind the embedding.
    """

    norms: int = 2
    norm_bias: bool = False
    gated: bool = True
    qkv_bias: bool = False
    bias_switch: bool = True
    o_bias: bool = True
    mlp_switch: bool = False
    qk_norm: str = ""
    optional_qk_norm: str = ""
    sinks: bool = False
    output_gate: bool = False
    window: str | int = ""
    default_window: int = 0
    head_dim: int = 0
    tied: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    by_layer: bool = False
    input_size: int = 0
    positions: int | None = None
    head_bias: bool = False
    embedding_norm: bool = False


LLAMA = Family(mlp_switch=True)
_PLAIN = Family()
_GATED = Family(qk_norm="head", output_gate=True)
_DEEPSEEK = Family(router_bias=True)
_GPT = Family(gated=False, norm_bias=True, mlp_switch=True)
_FALCON = replace(_GPT, tied=True)
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "granitemoe": LLAMA,
    "granitemoehybrid": LLAMA,
    "granitemoeshared": LLAMA,
    "smollm3": replace(LLAMA, tied=True),
    "stablelm": Family(norm_bias=True, o_bias=False),
    "seed_oss": Family(o_bias=False, mlp_switch=True),
    "llama4_text": _PLAIN,
    "mistral": Family(window="all", default_window=4096, bias_switch=False),
    "ministral": Family(window="all", bias_switch=False),
    "ministral3": Family(window="all", bias_switch=False, head_dim=128),
    "mixtral": Family(window="all", bias_switch=False),
    "phi3": Family(window="all", bias_switch=False),
    "phimoe": Family(window="all", norm_bias=True),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        Family(qkv_bias=True, o_bias=False, window="switch", default_window=4096),
    ),
    "qwen3": Family(qk_norm="head", window="switch", default_window=4096, head_dim=128),
    "qwen3_moe": Family(qk_norm="head", window="switch", default_window=4096),
    "qwen3_next": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": _GATED,
    "gemma": Family(head_dim=256, tied=True),
    "gemma2": Family(norms=4, window=2, head_dim=256, tied=True),
    "gemma3_text": Family(norms=4, qk_norm="head", window=6, head_dim=256, tied=True),
    "gemma3n_text": Family(norms=4, qk_norm="head", window=5, head_dim=256, tied=True),
    "gemma4_text": Family(
        window=6, default_window=512, head_dim=256, tied=True, by_layer=True, input_size=256
    ),
    "gemma4_unified_text": Family(
        window=6, default_window=1024, head_dim=256, tied=True, by_layer=True
    ),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4_moe": Family(o_bias=False, router_bias=True, optional_qk_norm="head"),
    "glm": Family(o_bias=False),
    "glm4": Family(norms=4, o_bias=False),
    "gpt_oss": Family(sinks=True, window=2, expert_bias=True, head_dim=64),
    "olmo2": Family(qk_norm="heads"),
    "olmo3": Family(qk_norm="heads", window=4),
    "olmoe": Family(qk_norm="heads"),
    "cohere": Family(norms=1, tied=True, optional_qk_norm="heads"),
    "cohere2": Family(norms=1, tied=True, window=4),
    "starcoder2": Family(gated=False, norm_bias=True, mlp_switch=True, window="all", tied=True),
    "lfm2": Family(qk_norm="head", tied=True),
    "lfm2_moe": Family(qk_norm="head", tied=True, router_bias=True),
    "mamba": Family(norms=1, tied=True),
    "falcon_mamba": Family(norms=1, tied=True),
    "mamba2": Family(norms=1),
    "jamba": Family(bias_switch=False),
    "bamba": Family(mlp_switch=True),
    "nemotron_h": _PLAIN,
    "falcon_h1": Family(mlp_switch=True),
    "minimax_m2": Family(qk_norm="heads", router_bias=True),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "arcee": Family(gated=False, mlp_switch=True),
    "nemotron": Family(gated=False, norm_bias=True, mlp_switch=True),
    "olmo": Family(),
    "qwen3_vl_text": Family(qk_norm="head", head_dim=128),
    "exaone4": Family(qk_norm="head", window=4, default_window=4096),
    "ernie4_5": Family(tied=True, head_dim=128),
    "ernie4_5_moe": Family(tied=True, router_bias=True),
    "dots1": Family(qk_norm="head", router_bias=True, window="switch", default_window=4096),
    # From before Llama: see ``own_names``.
    "gpt2": replace(_GPT, tied=True, positions=0),
    "gpt_bigcode": replace(_GPT, tied=True, positions=0),
    "gptj": replace(_GPT, norms=1, head_bias=True),
    "gpt_neox": _GPT,
    "opt": replace(_GPT, tied=True, positions=2),
    "bloom": replace(_GPT, tied=True, embedding_norm=True),
    "mpt": Family(gated=False, tied=True),
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "phi": replace(_GPT, norms=1, head_bias=True),
    "chatglm": Family(o_bias=False),
}
