"""GLM-4 and what followed it, but for what is made like DeepSeek V3. Literal tables.

The first half of a head's channels turns. GLM-4-0414 has norms around; GLM-4.5 has none of them,
but experts, chosen as DeepSeek V3's are.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.deepseek import (
    GGUF_DENSE_NAMES,
    GGUF_SPARSE,
    GGUF_SPARSE_NAMES,
    ROUTERS,
    SPARSE_NAMES,
    V3_SPARSE,
)
from ridgeline.models.families.gguf_names import LAYER as GGUF_LAYER
from ridgeline.models.families.gguf_names import OUTER as GGUF_OUTER
from ridgeline.models.families.gguf_names import PREFIX as GGUF_PREFIX
from ridgeline.models.families.gguf_names import REFUSED, refused_but
from ridgeline.models.families.hf_parts import (
    DENSE_NAMES,
    FUSED,
    LAYER,
    MODEL,
    OUTER,
    PARTIAL,
    PREFIX,
)
from ridgeline.models.families.table import (
    Family,
    const,
    either,
    flag,
    has,
    integer,
    number,
    numbered,
)

_NAMES = LAYER | {name: FUSED[name] for name in ("gate", "up")}
_FACTS = MODEL | {
    "norm_eps": number("rms_norm_eps", default=1.5625e-7),
    "mixer.head_dim": integer("head_dim", default=128),
    "mixer.qkv_bias": flag("attention_bias", default=True),
}
_HALF_TURNS = {"partial_rotary_factor": 0.5}
_GLM = Family(
    OUTER, _NAMES, PREFIX, _FACTS, interleaved=True, rope_keys=PARTIAL, defaults=_HALF_TURNS
)
FAMILIES = {
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        layer=_NAMES
        | {
            "attn_post_norm": "post_self_attn_layernorm.weight",
            "mlp_post_norm": "post_mlp_layernorm.weight",
        },
        facts=_FACTS | {"layer.norms": const("around")},
    ),
    "Glm4MoeForCausalLM": Family(
        OUTER,
        LAYER | SPARSE_NAMES,
        PREFIX,
        MODEL
        | V3_SPARSE
        | {
            "mixer.qkv_bias": flag("attention_bias"),
            "mixer.qk_norm": either("use_qk_norm", yes="head", no=""),
        },
        has_experts=True,
        instead=DENSE_NAMES,
        dense_layers="first_k_dense_replace",
        rope_keys=PARTIAL,
        defaults={**_HALF_TURNS, "first_k_dense_replace": 1},
        unused=("num_nextn_predict_layers",),
    ),
}

_GGUF_FUSED = GGUF_LAYER | {"gate": "ffn_up.weight"}
_GGUF_FACTS = {
    "hidden_size": integer("embedding_length"),
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "mixer.num_heads": integer("attention.head_count"),
    "mixer.qkv_bias": const(True),
    "ffn.size": integer("feed_forward_length"),
}
GGUF_FAMILIES = {
    "chatglm": Family(
        GGUF_OUTER,
        _GGUF_FUSED,
        GGUF_PREFIX,
        _GGUF_FACTS,
        interleaved=True,
        instead=dict.fromkeys("qkv", "attn_qkv.weight")  # of files with the model's own names
        | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "attn_qkv.bias"),
        refuse=REFUSED,
    ),
    "glm4": Family(
        GGUF_OUTER,
        _GGUF_FUSED,
        GGUF_PREFIX,
        _GGUF_FACTS | {"mixer.qkv_bias": has("blk.0.attn_q.bias"), "layer.norms": const("around")},
        interleaved=True,
        refuse=REFUSED,
    ),
    "glm4moe": Family(
        GGUF_OUTER,
        GGUF_LAYER | GGUF_SPARSE_NAMES | {"mlp_norm": "post_attention_norm.weight"},
        GGUF_PREFIX,
        _GGUF_FACTS
        | GGUF_SPARSE
        | {
            "mixer.qkv_bias": has("blk.0.attn_q.bias"),
            "mixer.qk_norm": has("blk.0.attn_q_norm.weight", yes="head", no=""),
            "ffn.router": numbered("expert_gating_func", among=ROUTERS, default=2),
        },
        has_experts=True,
        instead=GGUF_DENSE_NAMES,
        dense_layers="leading_dense_block_count",
        refuse=refused_but("expert_count"),
        unused=("rope.dimension_sections",),  # of pictures; of text all are alike
    ),
}
