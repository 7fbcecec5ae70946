"""Names in GGUF files that several families share, and keys that most refuse."""

from __future__ import annotations

PREFIX = "blk.{}."
OUTER = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
SHARED = {f"shared_{name}": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")}
REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "attention.sliding_window_pattern",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
    "expert_count",
)


def refused_but(*keys: str) -> tuple[str, ...]:
    """Return the keys that most families refuse, but these."""
    return tuple(key for key in REFUSED if key not in keys)
