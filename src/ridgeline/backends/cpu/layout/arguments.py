"""The kernels' arguments by name: 64-bit words, mostly addresses, of a step and of each layer."""

from __future__ import annotations

# ``sync`` and ``num_threads`` come first: ``threads`` relies on it.
PLAN = (
    "sync", "num_threads", "num_rows", "num_head_rows", "does_layers",
    "layers", "x", "queries", "cache", "layer_stride", "records_stride",
    "tables", "table_stride", "positions", "sequences",
    "poison", "items", "blocks", "block_bounds", "asked", "cos", "sin",
    "turns", "turns_stride",
    "private", "private_stride", "scores_stride",
    "final_norm",
    "head_tiles", "head_kind", "head_num_tiles", "head_num_records", "head_tile_bytes",
    "head_rows", "logits_rows", "logits", "logits_stride", "best", "head_x", "head_entries",
    "sketch_tiles", "sketch_kind", "sketch_num_tiles", "sketch_num_records", "sketch_tile_bytes",
    "screens", "distances", "lengths", "rough", "guesses",
    "draws", "draw_firsts", "num_drawn_rows",
    "counters", "shares",
)  # fmt: skip
MATRIX = ("tiles", "kind", "num_tiles", "num_records", "tile_bytes")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER = (
    "window", "attn_norm", "mlp_norm", "qkv_bias", "qk_norms", "o_bias",
    "key_bias", "key_bias_pairs",
    *(f"{matrix}_{part}" for matrix in MATRICES for part in MATRIX),
)  # fmt: skip
# Work that threads steal from each other.
SHARED = ("q", "k", "v", "o", "gate", "down", "head", "blocks", "draws")
SHARE_BYTES = 64  # of a thread's counters, one for each of these: a cache line
EXACT_AT = 4 * len(SHARED)  # after them: tiles that screening left in doubt, beside the head's
