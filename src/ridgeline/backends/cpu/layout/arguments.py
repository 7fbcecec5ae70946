"""The kernels' arguments as structs of named 64-bit words: of a step, a matrix and a layer."""

from __future__ import annotations

# ``sync`` and ``threads`` come first: the emitted ``run`` relies on it.
ARGUMENTS = (
    "sync", "threads", "num_rows", "num_head_rows", "does_layers",
    "layers", "x", "queries", "cache", "records_stride",
    "tables", "table_stride", "positions", "sequences", "sequences_stride", "text_lengths",
    "non_finite", "items", "blocks", "block_bounds", "output_begins",
    "rope_by_pair", "rope_by_pair_stride", "relative_bias", "relative_bias_stride",
    "local_memory", "local_stride", "scores_stride",
    "final_norm", "final_norm_bias", "head_bias",
    "head_tiles", "head_kind", "head_num_tiles", "head_num_records", "head_tile_bytes",
    "head_rows", "logits_rows", "logits", "logits_stride", "argmax", "head_x", "head_act_scales",
    "proxy_tiles", "proxy_kind", "proxy_num_tiles", "proxy_num_records", "proxy_tile_bytes",
    "prunes", "distances", "lengths", "proxy_logits", "proxy_argmax",
    "draws", "draw_firsts", "num_drawn_rows",
    "counters", "shares", "adapters", "num_adapted",
    "inputs", "input_products", "inputs_norm",
    "inputs_tiles", "inputs_kind", "inputs_num_tiles", "inputs_num_records", "inputs_tile_bytes",
    "mixed", "order", "segments", "num_segments", "states", "state_stride",
)  # fmt: skip
MATRIX = ("tiles", "kind", "num_tiles", "num_records", "tile_bytes")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
# Beside those that adapters change: gates of attention, of a dense network beside experts, of a
# layer's own input, of latent attention, and of a mixer that keeps a state.
_MIXERS = ("q_gate", "in", "qkv", "z", "beta", "decay", "out")
_LATENT = ("q_a", "q_b", "kv_a")
_OTHERS = ("dense_gate", "dense_up", "dense_down", "input_gate", "input_down", *_LATENT,
           *_MIXERS)  # fmt: skip
_NORMS = (
    "attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm",
    "router_norm", "experts_norm", "experts_post_norm", "beside_post_norm", "input_post_norm",
)  # fmt: skip
LAYER = (
    "number", "kind", "group", "cache_at",
    "window", "cos", "sin", "query_scales", *_NORMS, *(f"{norm}_bias" for norm in _NORMS),
    "qkv_bias", "qk_norms", "sinks", "o_bias", "key_bias", "key_bias_pairs",
    "k_b", "v_b", "q_a_norm", "kv_a_norm",
    "gate_bias", "up_bias", "down_bias", "router", "router_bias", "choice_bias",
    "expert_scales", "shared_scale", "out_scale",
    "state_at", "conv", "conv_bias", "in_bias", "rates", "gated_scale",
    *(f"{matrix}_{part}" for matrix in (*MATRICES, *_OTHERS) for part in MATRIX),
)  # fmt: skip
# Of an adapter in a layer; a matrix without one has rank 0. The scale is an f32, in the lower half.
ADAPTER = tuple(f"{matrix}_{part}" for matrix in MATRICES for part in ("rank", "a", "b", "scale"))
# Work that threads steal from each other.
STOLEN = (
    "q", "k", "v", "o", "gate", "down", "head", "blocks", "draws",
    "dense_gate", "dense_down", "input_gate", "input_down", *_LATENT, *_MIXERS,
)  # fmt: skip
SHARE_BYTES = 128  # of a thread's counters, one for each of these: whole cache lines
EXACT_AT = 4 * len(STOLEN)  # behind them: tiles with candidates of pruning, beside the head's
