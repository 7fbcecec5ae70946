"""The shape of attention: heads, records of the cache, and how rows share registers."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.backends.cpu.emit.ir import I32, I64, Function, Value

TOKENS = 16  # per record


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of attention: numbers of heads, padded parts of a head, and the cache's format."""

    num_heads: int
    num_kv_heads: int
    half: int  # padded number of rotating pairs
    rest: int  # padded number of channels that do not rotate
    num_channels: int  # before padding
    cache: str  # int8, f16 or f32
    qkv_bias: bool
    qk_norm: bool
    eps: float

    @property
    def size(self) -> int:
        """Channels of a head, padded."""
        return 2 * self.half + self.rest

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in the cache."""
        return {"int8": 1, "f16": 2, "f32": 4}[self.cache]

    @property
    def record_bytes(self) -> int:
        """Bytes of 16 tokens of one head."""
        scales = 64 * (1 + self.spans) if self.cache == "int8" else 0
        return 2 * TOKENS * self.size * self.value_bytes + scales

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
        return 2 * TOKENS * self.size

    @property
    def splits_key_bias(self) -> bool:
        """Whether the large part of the keys' bias is kept out of the cache: see ``attention``.

        A norm of keys comes after their bias, which cannot be told from them then.
        """
        return self.qkv_bias and not self.qk_norm and self.cache == "int8"

    @property
    def bias_factors_at(self) -> int:
        """Offset in a row's query of each head's factors of the keys' bias."""
        return self.num_heads * (self.size + 8 * self.spans)

    @property
    def query_bytes(self) -> int:
        """Bytes of a row's query."""
        per_head = self.size + 8 * self.spans if self.cache == "int8" else self.size * 4
        if self.splits_key_bias:
            per_head += 8 * self.half
        return -(-self.num_heads * per_head // 64) * 64

    @property
    def tile(self) -> int:
        """Queries of one sequence that are handled together, if there are so many."""
        return max(1, min(4, 24 // self.group))


def record_at(fn: Function, records: Value, stride: Value, table: Value, index: Value) -> Value:
    """Return the address of a sequence's ``index``-th visible record."""
    return records + fn.load(table + index * 4, I32, 4).signed(I64) * stride


def row_parts(heads: Heads, num_rows: int, sums_per_vector: int) -> list[tuple[range, int]]:
    """Cut rows into parts whose sums fit the registers; with each, vectors side by side.

    As many vectors as go: a row's factor is loaded once for all of them.
    """
    vectors = heads.size // 16
    wide = max(w for w in (4, 3, 2, 1) if vectors % w == 0)
    size = 24 // sums_per_vector // wide
    return [(range(low, min(low + size, num_rows)), wide) for low in range(0, num_rows, size)]
