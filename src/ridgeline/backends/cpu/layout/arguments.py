"""The kernels' arguments as structs of named 64-bit words: of a step, a matrix and a layer."""

from __future__ import annotations

# ``sync`` and ``num_threads`` come first: ``threads`` relies on it.
ARGUMENTS = (
    "sync", "num_threads", "num_rows", "num_head_rows", "does_layers",
    "layers", "x", "queries", "cache", "records_stride",
    "tables", "table_stride", "positions", "sequences", "text_lengths",
    "non_finite", "items", "blocks", "block_bounds", "output_begins",
    "rope_by_pair", "rope_by_pair_stride",
    "local_memory", "local_stride", "scores_stride",
    "final_norm", "final_norm_bias", "head_bias",
    "head_tiles", "head_kind", "head_num_tiles", "head_num_records", "head_tile_bytes",
    "head_rows", "logits_rows", "logits", "logits_stride", "argmax", "head_x", "head_act_scales",
    "proxy_tiles", "proxy_kind", "proxy_num_tiles", "proxy_num_records", "proxy_tile_bytes",
    "prunes", "distances", "lengths", "proxy_logits", "proxy_argmax",
    "draws", "draw_firsts", "num_drawn_rows",
    "counters", "shares", "adapters", "num_adapted",
)  # fmt: skip
MATRIX = ("tiles", "kind", "num_tiles", "num_records", "tile_bytes")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER = (
    "number", "kind", "cache_at",
    "window", "cos", "sin", "attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm",
    "attn_norm_bias", "mlp_norm_bias", "attn_post_norm_bias", "mlp_post_norm_bias",
    "qkv_bias", "qk_norms", "sinks", "o_bias", "key_bias", "key_bias_pairs",
    "gate_bias", "up_bias", "down_bias", "router", "router_bias",
    *(f"{matrix}_{part}" for matrix in MATRICES for part in MATRIX),
)  # fmt: skip
# Of an adapter in a layer; a matrix without one has rank 0. The scale is an f32, in the lower half.
ADAPTER = tuple(f"{matrix}_{part}" for matrix in MATRICES for part in ("rank", "a", "b", "scale"))
# Work that threads steal from each other.
STOLEN = ("q", "k", "v", "o", "gate", "down", "head", "blocks", "draws")
SHARE_BYTES = 64  # of a thread's counters, one for each of these: a cache line
EXACT_AT = 4 * len(STOLEN)  # behind them: tiles with candidates of pruning, beside the head's
