"""Dense families with LayerNorm in GGUF files, by ``general.architecture``. Literal tables.

llama.cpp's converters sort the rows of GPT-NeoX's fused projection into queries, keys and values,
and turn GPT-2's matrices. StableLM, Phi-2 and GPT-NeoX turn by a base of 10,000, which no key says.
"""

from __future__ import annotations

from ridgeline.models.families.gguf_names import LAYER, OUTER, PREFIX, REFUSED, refused_but
from ridgeline.models.families.table import Family, const, has, integer, number

_OUTER = OUTER | {
    "norm_bias": "output_norm.bias",
    "head_bias": "output.bias",
}
_LAYER = LAYER | {
    "attn_norm_bias": "attn_norm.bias",
    "mlp_norm_bias": "ffn_norm.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
_QKV = dict.fromkeys("qkv", "attn_qkv.weight") | dict.fromkeys(
    ("q_bias", "k_bias", "v_bias"), "attn_qkv.bias"
)
_MODEL = {
    "hidden_size": integer("embedding_length"),
    "norm": const("layer"),
    "norm_eps": number("attention.layer_norm_epsilon"),
    "mixer.num_heads": integer("attention.head_count"),
    "mixer.qkv_bias": has("blk.0.attn_q.bias"),
    "ffn.size": integer("feed_forward_length"),
}
_COHERE = {"logit_scale": number("logit_scale"), "layer.norms": const("beside")}
_ALL_BIASES = {
    "norm_bias": const(True),
    "mixer.qkv_bias": const(True),
    "mixer.o_bias": const(True),
    "ffn.gated": const(False),
    "ffn.bias": const(True),
    "ffn.activation": const("gelu_tanh"),
}

FAMILIES = {
    "stablelm": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL | {"norm_bias": const(True)},
        refuse=REFUSED,
        # As in llama.cpp the norm before the MLP says it, for converters write true by default.
        unused=("use_parallel_residual",),
    ),
    "command-r": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL | _COHERE,
        interleaved=True,
        refuse=refused_but("logit_scale"),
    ),
    "cohere2": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL | _COHERE,
        windows="pattern",
        pattern=4,
        ropes={"full": "none"},
        interleaved=True,
        refuse=refused_but("logit_scale", "attention.sliding_window_pattern"),
    ),
    "starcoder2": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL | _ALL_BIASES,
        windows="all",
        default_window=4096,  # of all published ones; converters leave it out
        refuse=REFUSED,
    ),
    "phi2": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL | _ALL_BIASES | {"head_bias": const(True), "layer.norms": const("beside")},
        instead=_QKV,  # of the first files
        refuse=REFUSED,
    ),
    "gptneox": Family(
        _OUTER,
        _LAYER | _QKV,
        PREFIX,
        # Files do not name the activation; Pythia's is the exact one.
        _MODEL
        | _ALL_BIASES
        | {"layer.norms": const("beside, own"), "ffn.activation": const("gelu")},
        refuse=REFUSED,
        must={"use_parallel_residual": True},
    ),
    "falcon": Family(
        _OUTER,
        _LAYER | _QKV | {"mlp_norm": "attn_norm.weight", "mlp_norm_bias": "attn_norm.bias"},
        PREFIX,
        _MODEL
        | _ALL_BIASES
        | {  # as of GPT-NeoX files do not name the activation
            "layer.norms": has("blk.0.attn_norm_2.weight", yes="beside, own", no="beside"),
            "mixer.qkv_bias": has("blk.0.attn_qkv.bias"),
            "mixer.o_bias": has("blk.0.attn_output.bias"),
            "ffn.bias": has("blk.0.ffn_up.bias"),
            "ffn.activation": const("gelu"),
        },
        instead={"attn_norm": "attn_norm_2.weight", "attn_norm_bias": "attn_norm_2.bias"},
        refuse=REFUSED,
        must={"tensor_data_layout": "jploski"},  # queries first, then keys, then values
    ),
    "nemotron": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL
        | _ALL_BIASES
        | {
            "mixer.qkv_bias": has("blk.0.attn_q.bias"),
            "mixer.o_bias": has("blk.0.attn_output.bias"),
            "ffn.bias": has("blk.0.ffn_up.bias"),
            "ffn.activation": const("relu2"),
        },
        refuse=REFUSED,
        unused=("attention.layer_norm_rms_epsilon",),  # converters write it twice
    ),
    "olmo": Family(
        _OUTER,
        _LAYER,
        PREFIX,
        _MODEL,
        interleaved=True,
        plain_norms=True,
        refuse=(*REFUSED, "attention.clamp_kqv"),
    ),
    "gpt2": Family(
        _OUTER | {"positions": "position_embd.weight"},
        _LAYER | _QKV,
        PREFIX,
        _MODEL | _ALL_BIASES,
        ropes={"full": "none"},
        refuse=REFUSED,
    ),
}
