"""Padded widths of a model, records of its cache, how threads share its rows, and their buffers.

The compiled step has code for each kind of layer: ``LayerVariant`` is what that code depends on.
Buffers are as large as the largest kind needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ridgeline.backends.cpu.layout.feed_forward import FeedForward, choice_bytes, route_stride
from ridgeline.backends.cpu.layout.formats import ACT_SCALES_BYTES, TILE, VALUE_BYTES
from ridgeline.backends.cpu.layout.latent import LatentHeads
from ridgeline.backends.cpu.layout.recurrent import Recurrence
from ridgeline.backends.cpu.layout.sampling_table import scratch_bytes
from ridgeline.model.shape.model import Attention

TOKENS = 16  # per record
PRUNED_ROWS = 3  # most rows whose likeliest tokens a proxy finds: more are arithmetic
RANK_STEP = 4  # ranks of an adapter that are computed side by side
HEAD_TILES = 8  # tiles of logits that are searched while they are in the nearest cache
# How a step's work is split between threads, by how many rows (tokens) it has: up to these by
# output features; up to ``mixed_rows`` both ways; more by tokens, in blocks of at most
# ``row_block``. ``emit.step`` says what each means.
OUTPUT_SPLIT_ROWS = 6
MIXED_ROWS = 16  # without matrix tiles
ROW_BLOCK = 64  # without matrix tiles
_WIDE = 4096  # inputs of a product: its weights take long to read, its rows much of a cache
# Attention by matrix tiles, whose registers have 16 lines of 64 bytes.
TILE_ROWS, LINE, REGISTER = 16, 64, 1024  # lines of a register, and bytes
CHUNK = 16  # records whose values are copied together; the second-level cache holds them
TOGETHER = 2  # records whose scores are made side by side
MOST_ROWS = 48  # heads of queries that attend together


class AmxScratch(NamedTuple):
    """A thread's room for attention by matrix tiles: offsets, and the bytes of all.

    Scores have queries of each 16 rows, a tile for each span; then sums; then scales. Weighted
    values have those of ``CHUNK`` records, a tile for 64 tokens and 16 channels; then sums.
    """

    score_sums: int
    scales: int
    value_sums: int
    num_bytes: int


def to_tile_rows(num_rows: int) -> int:
    """Return a number of rows with those that fill their last tile."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def tile_room(num_rows: int, size: int, spans: int) -> AmxScratch:
    """Return the room for rows of heads of ``size`` channels, in whole tiles."""
    score_sums = num_rows * spans * LINE
    scales = score_sums + TOGETHER * spans * REGISTER
    value_sums = CHUNK * TILE_ROWS * size
    of_values = value_sums + num_rows * size * 2 * 4
    return AmxScratch(score_sums, scales, value_sums, max(of_values, scales + num_rows * 8 * spans))


def mixed_rows(widest: int, *, by_tiles: bool) -> int:
    """Return the most rows whose work is split both ways; ``widest`` is the longest of all rows.

    By tokens each thread reads all weights. With tiles, reading takes longer than multiplying up
    to many more rows, the more so the larger the matrices are.
    """
    if not by_tiles:
        return MIXED_ROWS
    return MIXED_ROWS * (4 if widest <= _WIDE else 8)


def row_block(widest: int, *, by_tiles: bool) -> int:
    """Return the most rows that a thread takes through a layer together, not below ``mixed_rows``.

    Rows of bytes are so quickly multiplied by tiles that more of them must share a weight.
    """
    if not by_tiles:
        return ROW_BLOCK
    return ROW_BLOCK * (4 if widest <= _WIDE else 2)  # what the second-level cache holds


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Shape of attention: numbers of heads, padded parts of a head, and the cache's format.

    A layer without attention has none of anything.
    """

    attention: Attention  # but for what the code does not depend on: see ``model_sizes``
    num_kv_heads: int  # of a latent the groups of query heads that read it together
    half: int  # padded number of rotating pairs
    rest: int  # padded number of channels that do not rotate
    num_channels: int  # of a cached key, before padding
    kv_cache_dtype: str  # int8, int8-int4, f16 or f32
    eps: float
    grows: bool = False  # queries are multiplied by a number of their position
    latent: LatentHeads | None = None  # then each of ``num_kv_heads`` reads the same records
    # The same in all layers of a model: queries of one sequence, and bytes of a row's query. A
    # thread writes a block's queries for the next layer beside those that others still read.
    most_together: int = 4
    by_tiles: bool = False  # several queries attend by matrix tiles
    least_query_bytes: int = 0

    @property
    def size(self) -> int:
        """Channels of a head, padded."""
        return 2 * self.half + self.rest

    @property
    def num_heads(self) -> int:
        """Query heads; 0 without attention."""
        return self.attention.num_heads

    @property
    def projections(self) -> tuple[str, ...]:
        """The matrices of queries, keys and values, in this order: see ``model.shape.model``."""
        return self.attention.projections if self.num_heads else ()

    @property
    def owns(self) -> bool:
        """Whether keys and values are its own."""
        return self.attention.kv_of is None

    @property
    def changes_attended(self) -> bool:
        """Whether something is done to what is attended to, before it is multiplied by o."""
        return self.attention.gated or self.attention.out_scale != 1.0

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // max(self.num_kv_heads, 1)

    @property
    def is_quantised(self) -> bool:
        """Whether the cache has bytes with scales."""
        return self.kv_cache_dtype in ("int8", "int8-int4")

    @property
    def has_narrow_values(self) -> bool:
        """Whether values have 4 bits, and are rotated: see ``emit.narrow_values``."""
        return self.kv_cache_dtype == "int8-int4"

    @property
    def value_bytes(self) -> int:
        """Bytes of a number in the cache, where values are narrow of a key's."""
        return {"int8": 1, "int8-int4": 1, "f16": 2, "f32": 4}[self.kv_cache_dtype]

    @property
    def values_at(self) -> int:
        """Offset of the values in a record, behind the keys."""
        return TOKENS * self.size * self.value_bytes

    @property
    def parts(self) -> int:
        """Keys and values, or keys alone."""
        return 1 if self.latent else 2

    @property
    def record_bytes(self) -> int:
        """Bytes of 16 tokens of one head."""
        return self.scales_at + (64 * (self.parts - 1 + self.spans) if self.is_quantised else 0)

    @property
    def record_step(self) -> int:
        """Bytes from a head's record to the next head's."""
        return 0 if self.latent else self.record_bytes

    @property
    def out_size(self) -> int:
        """Channels of what a head attended to, padded."""
        return self.latent.value if self.latent else self.size

    @property
    def has_planes(self) -> bool:
        """Whether probabilities become integers, in two planes of bytes."""
        return self.is_quantised and not self.latent

    @property
    def span(self) -> int:
        """Channels of a query or key that share a scale."""
        return 32 if self.size % 32 == 0 else 16

    @property
    def spans(self) -> int:
        """Scales of a query or key of a head."""
        return self.size // self.span

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a record: values', and from 64 bytes on, keys', span by span."""
        values = 0 if self.latent else self.values_at >> int(self.has_narrow_values)
        return self.values_at + values

    @property
    def key_scales_at(self) -> int:
        """Offset of those of keys: of a latent all."""
        return self.scales_at + 64 * (self.parts - 1)

    @property
    def splits_key_bias(self) -> bool:
        """Whether the large part of the keys' bias stays out of the cache: see ``emit.attention``.

        With a norm after the bias, the two cannot be told apart.
        """
        return self.attention.qkv_bias and not self.attention.qk_norm and self.is_quantised

    @property
    def bias_factors_at(self) -> int:
        """Offset in a row's query of each head's factors of the keys' bias."""
        return self.num_heads * (self.size + 8 * self.spans)

    @property
    def query_bytes(self) -> int:
        """Bytes of a row's query."""
        per_head = self.size + 8 * self.spans if self.is_quantised else self.size * 4
        if self.splits_key_bias:
            per_head += 8 * self.half
        return max(self.least_query_bytes, -(-self.num_heads * per_head // 64) * 64)

    @property
    def tile(self) -> int:
        """The largest number of queries of one sequence that are handled together."""
        most_rows = MOST_ROWS if self.by_tiles else 24
        return max(1, min(self.most_together, most_rows // max(self.group, 1)))

    @property
    def score_rows(self) -> int:
        """Rows of scores that are there at once."""
        rows = self.tile * self.group
        return to_tile_rows(rows) if self.by_tiles else rows

    @property
    def suits_tiles(self) -> bool:
        """Whether matrix tiles can read keys as they lie, and pairs of 16 channels of values."""
        reach = -(-self.size // LINE) * REGISTER
        return self.has_planes and self.size % 32 == 0 and reach <= self.record_bytes

    @property
    def tile_room(self) -> AmxScratch:
        """What attention by tiles needs of a thread's memory."""
        return tile_room(self.score_rows, self.size, self.spans)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All layers' own inputs of a token: see ``arch.model.ModelArch.input_scales``."""

    size: int  # padded channels of each
    num_channels: int  # before padding
    scales: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class LayerVariant:
    """What the code for a layer depends on: layers of one kind share it."""

    hidden: int  # padded width of the residual stream
    heads: AttentionLayout
    ffn: FeedForward
    o_bias: bool = False
    norm_names: tuple[str, ...] = ("attn_norm", "mlp_norm")
    is_parallel: bool = False  # attention and the feed-forward network read the same rows
    norms_replace: bool = False  # a norm's result is the residual stream from there on
    input: FeedForward | None = None  # what adds the layer's own input
    out_scale: bool = False
    recurrence: Recurrence | None = None  # a mixer that keeps a state

    @property
    def attention(self) -> int:
        """All heads of what a row attended to."""
        return self.heads.num_heads * self.heads.out_size

    @property
    def qkv(self) -> int:
        """Queries, keys and values of a row; behind those of a latent its compressed query."""
        if self.heads.latent:
            return self.heads.latent.columns(self.heads.num_heads)[""]
        num_kv = max(len(self.heads.projections) - 1, 0) * self.heads.num_kv_heads
        return self.attention + num_kv * self.heads.size

    @property
    def cache_bytes(self) -> int:
        """Bytes of 16 tokens of all key/value heads."""
        records = 1 if self.heads.latent else self.heads.num_kv_heads
        return records * self.heads.record_bytes if self.heads.owns else 0

    @property
    def readers(self) -> tuple[tuple[str, ...], ...]:
        """Matrices that read the same row, of those that adapters change."""
        of_ffn = () if self.ffn.experts else (self.ffn.inner, ("down",))
        return () if self.heads.latent else self.heads.projections, ("o",), *of_ffn

    @property
    def matrices(self) -> tuple[str, ...]:
        """All matrices in the order in which they are read; of experts the place is the first's."""
        names = [*self.heads.projections]
        if self.heads.latent and self.heads.latent.q_rank:
            names.append("q_b")
        if self.heads.attention.gated:
            names.append("q_gate")
        if self.recurrence:
            names += [name for name, _ in self.recurrence.columns]
        if self.heads.num_heads:
            names.append("o")
        if self.recurrence:
            names.append("out")
        if self.ffn.size:
            names += [*self.ffn.inner, "down"]
        for prefix, ffn in (("dense_", self.dense), ("input_", self.input)):
            names += [prefix + name for name in (*ffn.inner, "down")] if ffn else []
        return tuple(names)

    @property
    def dense(self) -> FeedForward | None:
        """The dense network beside experts, if there is one."""
        return self.ffn.dense

    def inputs(self, matrix: str) -> int:
        """Return the padded width of what a matrix of a layer reads."""
        return {"o": self.attention, "down": self.ffn.size}.get(matrix, self.hidden)

    @property
    def ffns(self) -> tuple[FeedForward, ...]:
        """All feed-forward networks."""
        return tuple(ffn for ffn in (self.ffn, self.dense, self.input) if ffn)


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Padded widths of a model, in floats, and where things are in a thread's local memory."""

    kinds: tuple[LayerVariant, ...]
    kind_of: tuple[int, ...]  # the kind of each layer
    num_channels: int  # of the residual stream, before padding
    hidden: int
    activations: str  # the form that products take (see ``formats``)
    vocab_size: int
    norm: str = "rms"
    norm_bias: bool = False
    residual_scale: float = 1.0
    head_bias: bool = False
    logit_softcap: float = 0.0
    inputs: Inputs | None = None
    max_lora_rank: int = 0  # of adapters; 0 leaves them out
    has_tiles: bool = False  # the processor multiplies tiles of bytes, and is allowed to
    profiled: bool = False  # kernels count the cycles of each kind of work (``emit.clock``)

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.kind_of)

    @property
    def layers(self) -> tuple[LayerVariant, ...]:
        """The kind of each layer."""
        return tuple(self.kinds[number] for number in self.kind_of)

    @property
    def all_heads(self) -> tuple[AttentionLayout, ...]:
        """Each shape of attention once."""
        return tuple(dict.fromkeys(kind.heads for kind in self.kinds if kind.heads.num_heads))

    @property
    def recurrence(self) -> Recurrence | None:
        """The shape of the mixers that keep a state: of all such layers the same."""
        return next((kind.recurrence for kind in self.kinds if kind.recurrence), None)

    @property
    def state_ends(self) -> tuple[int, ...]:
        """Where each layer's part of a state ends, in floats; the next begins there."""
        of_layers = (kind.recurrence for kind in self.layers)
        return tuple(accumulate(one.state if one else 0 for one in of_layers))

    @property
    def mixed_stride(self) -> int:
        """Bytes from row to row of what layers project beside queries, keys and values.

        All layers have one: a thread may project rows for the next while others read theirs.
        """
        gates = [4 * (kind.attention + 48) for kind in self.kinds if kind.heads.attention.gated]
        return max([*gates, self.recurrence.stride if self.recurrence else 0])

    @property
    def all_ffns(self) -> tuple[FeedForward, ...]:
        """Each shape of feed-forward network once."""
        return tuple(dict.fromkeys(ffn for kind in self.kinds for ffn in kind.ffns))

    @property
    def inputs_stride(self) -> int:
        """Bytes of all layers' own inputs of a token."""
        return self.num_layers * self.inputs.size * 4 if self.inputs else 0

    @property
    def together(self) -> tuple[int, int]:
        """The smallest and the largest number of queries of one sequence that attend together."""
        heads = self.kinds[0].heads
        return 2 if heads.by_tiles else heads.tile, heads.tile

    @property
    def query_bytes(self) -> int:
        """Bytes of a row's query."""
        return self.kinds[0].heads.query_bytes

    @property
    def widest(self) -> int:
        """The longest row that is ever quantised."""
        inner = [ffn.size for ffn in self.all_ffns]
        width = self.recurrence.output_width if self.recurrence else 0
        width = max([width, *(heads.latent.q_rank for heads in self.all_heads if heads.latent)])
        return max(self.hidden, width, *inner, *(kind.attention for kind in self.kinds))

    @property
    def float_stride(self) -> int:
        """Bytes from row to row of float activations: 0 if a row is quantised before the next."""
        return self.widest * 4 if self.activations == "floats" else 0

    @property
    def value_bytes(self) -> int:
        """Bytes of a quantised activation."""
        return VALUE_BYTES[self.activations]

    @property
    def value_stride(self) -> int:
        """Bytes from row to row of quantised activations."""
        return self.widest * VALUE_BYTES[self.activations]

    @property
    def act_scales_stride(self) -> int:
        """Bytes from row to row of the scales and sums of quantised activations."""
        return self.widest // TILE * ACT_SCALES_BYTES

    @property
    def head_x_stride(self) -> int:
        """Bytes from row to row of the head's activations."""
        return self.hidden * VALUE_BYTES[self.activations]

    @property
    def head_act_scales_stride(self) -> int:
        """Bytes from row to row of their scales and sums."""
        return self.hidden // TILE * ACT_SCALES_BYTES

    @property
    def proxy_stride(self) -> int:
        """Bytes from row to row of proxy logits, and of what all outputs have in common."""
        return (-(-self.vocab_size // TILE) + 1) * TILE * 4

    @property
    def adapter_bytes(self) -> int:
        """Bytes of a value of an adapter."""
        return 4 if self.activations == "floats" else 2

    @property
    def low_rank_stride(self) -> int:
        """Bytes from row to row of products with the A of adapters, of at most three matrices."""
        return 3 * self.rank_bytes

    @property
    def rank_bytes(self) -> int:
        """Bytes of a row's products with one A."""
        return -(-self.max_lora_rank // RANK_STEP) * RANK_STEP * 4

    @property
    def multiplies_by_tiles(self) -> bool:
        """Whether products of at least 16 rows go by matrix tiles."""
        return self.activations == "rows" and self.has_tiles

    @property
    def mixed_rows(self) -> int:
        """Return the most rows whose work is split both ways."""
        return mixed_rows(self.widest, by_tiles=self.multiplies_by_tiles)

    @property
    def row_block(self) -> int:
        """Return the most rows that a thread takes through a layer together."""
        return row_block(self.widest, by_tiles=self.multiplies_by_tiles)

    def local_offsets(self) -> dict[str, int]:
        """Return the offset of each buffer in a thread's local memory.

        Last come ``scores``, whose length depends on the context and is not compiled in, and after
        them the planes of probabilities, half as long.
        """
        lengths = {
            "rotated": self.widest * 4,
            **self._activation_bytes("in"),
            **self._activation_bytes("gated"),
            "qkv": self.row_block * max(kind.qkv for kind in self.kinds) * 4,
            "y": self.row_block * self.hidden * 4,
            "gate_up": self.row_block * max(ffn.gate_up_stride for ffn in self.all_ffns),
            "attended": self.row_block * max(kind.attention for kind in self.kinds) * 4,
            "x": (OUTPUT_SPLIT_ROWS + 1) * self.hidden * 4,
            "scales": self.score_rows * 4,
            "floors": PRUNED_ROWS * 4,
            "logits": ROW_BLOCK * 4 * HEAD_TILES * TILE * 4,
            **scratch_bytes(self.vocab_size),
            **self._expert_bytes(),
            **self._latent_bytes(),
            "tiles": max([0, *(h.tile_room.num_bytes for h in self.all_heads if h.by_tiles)]),
            **({"low_rank": self.row_block * self.low_rank_stride} if self.max_lora_rank else {}),
            **({"beside": self.row_block * self.hidden * 4} if self.has_both else {}),
        }
        offsets, at = {}, 0
        for name, length in lengths.items():
            offsets[name] = at
            at += -(-length // 4096) * 4096 + 64  # off the page grid: see gate_up_stride
        return offsets | {"scores": at}

    def _activation_bytes(self, group: str) -> dict[str, int]:
        """Return room for a block of rows of activations, before and after they are quantised."""
        return {
            f"{group}_floats": self.widest * 4 + self.row_block * self.float_stride,
            f"{group}_values": self.row_block * self.value_stride,
            f"{group}_act_scales": self.row_block * self.act_scales_stride,
        }

    def _latent_bytes(self) -> dict[str, int]:
        """Return room for a group's absorbed queries, and for the latents that its tile saw."""
        shapes = [heads for heads in self.all_heads if heads.latent]
        rank = max((heads.latent.rank for heads in shapes if heads.latent), default=0)
        absorbed = max((heads.group for heads in shapes), default=0) * rank * 4
        return {"absorbed": absorbed, "latents": self.score_rows * rank * 4} if shapes else {}

    def _expert_bytes(self) -> dict[str, int]:
        experts = [ffn.experts for ffn in self.all_ffns if ffn.experts]
        if not experts:
            return {}
        strides = [route_stride(one) for one in experts]
        dense = {"joined": self.hidden * 4} if any(kind.dense for kind in self.kinds) else {}
        if any(one.beside for one in experts):
            dense |= self._activation_bytes("dense")
        return dense | {
            "routes": self.row_block * max(strides),
            "choice": max(choice_bytes(one) for one in experts),
            "picked": self.row_block * 4,
            **self._activation_bytes("gathered"),
            "expert_y": self.row_block * self.hidden * 4,
            "expert_sums": self.row_block * self.hidden * 4,
        }

    def local_bytes(self, scores_stride: int) -> int:
        """Return the bytes of a thread's local memory, for rows of scores of this stride."""
        scores = self.score_rows * scores_stride
        return -(-(self.local_offsets()["scores"] + scores + scores // 2) // 4096) * 4096

    @property
    def score_rows(self) -> int:
        """Rows of scores that are there at once."""
        return max((heads.score_rows for heads in self.all_heads), default=0)

    @property
    def has_both(self) -> bool:
        """Whether a layer has attention and a mixer that keeps a state."""
        return any(kind.recurrence and kind.heads.num_heads for kind in self.kinds)
