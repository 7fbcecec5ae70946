"""How weights are kept: one ``WeightFormat`` for each kind.

Weights are packed in tiles of 32 outputs; a tile is a sequence of records, one for each 32 inputs,
read front to back exactly once:

    w4   640 bytes  [2 halves][4][64] bytes + [2 halves][2][16] f16
                    byte (v, 4 o + i) of a half: output o; low nibble input 4 v + i, high nibble
                    input 16 + 4 v + i. Then scale d and offset m of each output: weight = d q + m.
    w5   768 bytes  the nibbles as in w4; [2 halves][8] words of 64 bits, bit 4 o + i of word v the
                    fifth bit of input 4 v + i; then d and m as in w4
    s4   576 bytes  the nibbles as in w4; [2 halves][16] f16 scales d: weight = d (q - 8)
    s5   704 bytes  nibbles and fifth bits as in w5; scales d as in s4: weight = d (q - 16)
    z4   608 bytes  as s4, and then the zero z of each output, [2 halves][16] bytes:
                    weight = d (q - z)
    t4   576 bytes  as s4, but the nibble is a place in a table t of 16 signed bytes: weight =
                    d t[q]. The table stands behind a tile's records, 128 added, four times
    k4   592 bytes  in blocks of 8: [2 halves][2][16] f16 d and e, then 8 times the nibbles as in
                    w4 and [2 halves][2][16] bytes f and g: weight = d f q - e g
    k5   720 bytes  the same with nibbles and fifth bits as in w5
    k6   840 bytes  in blocks of 8: [2 halves][16] f16 d, then 8 times the nibbles as in w4;
                    [2 halves][2][64] bytes, bits 2 v and 2 v + 1 of byte (h, 4 o + i) the upper
                    two of input 16 h + 4 v + i; and [2 halves][2][16] signed bytes, f of the first
                    and g of the last 16 inputs: weight = d f (q - 32) or d g (q - 32)
    w8  1088 bytes  [2 halves][8][64] bytes + [2 halves][16] f16
                    byte (v, 4 o + i): input 4 v + i as q + 128. Then scale d: weight = d q.
    r8  1024 bytes  in pairs: [2 halves][2 records][8][64] bytes as in w8, so that 16 lines are 64
                    inputs of 16 outputs; an odd last record has a pair of zero bytes. After a
                    tile's records its scales, 32 f32
    bf16 2048 bytes [2 halves][16 pairs of inputs][16 outputs][2] bf16
    f32  4096 bytes [32 inputs][32 outputs] f32

The form of a row of activations depends on the format of the weights (``activations``):

    groups  signed bytes, and for each 32 of them six floats (act_scales): the scales of the first
            and of the last 16, their sum (of bytes times scale), -128 times that, and -32 times the
            sum of the first and of the last 16. Scales for 16 instead of 32 halve the error of
            quantising (docs/results.md#kernels), which is nearly the whole error.
    rows    signed bytes with one scale, after a Hadamard rotation, which spreads outliers. In
            act_scales: the scale as f32, and -128 times the sum of the bytes as i32.
    bf16, floats  the numbers themselves
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TILE = 32  # outputs of a tile, and inputs of a record
GEMV_TILES = 4  # most that a GEMV multiplies side by side (``Processor.streams``)
BLOCK_RECORDS = 8  # of the formats that have blocks
ACT_SCALES_BYTES = 24  # of a row, for each record
VALUE_BYTES = {"groups": 1, "rows": 1, "bf16": 2, "floats": 4}  # of an activation
MAX_ROTATED = 512  # channels that a Hadamard rotation mixes at most

_Shapes = tuple[tuple[int, int], ...]
_GROUPS: _Shapes = ((8, 1), (4, 1), (2, 2), (1, 2))
_PAIRS: _Shapes = ((8, 2), (4, 2), (2, 2), (1, 2))
_FLOATS: _Shapes = ((6, 2), (2, 2), (1, 2))


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A kind of packed weights.

    Attributes:
        bits: of a value, before its scale.
        record_bytes: of 32 inputs of a tile, with their share of what blocks have in front.
        activations: the form of activations in products with these weights.
        head_bytes: in front of each block of 8 records; 0 if there are no blocks.
        tail_bytes: after the records of a tile.
        has_table: nibbles are places in the table in the tail.
        has_zero: a byte for each output stands behind the scales.
        has_pairs: two records lie together, first a half of both; their number is even.
        shift_to_middle: by how many bits values move to the left to become bytes around 128, as
            those of w8 are; None where they have offsets instead of a middle.
        tile_shapes: rows x halves that a kernel computes at once, the largest first. They fill the
            registers without spilling, and spread the cost of unpacking a record over as many rows
            as possible.
    """

    bits: int
    record_bytes: int
    activations: str = "groups"
    head_bytes: int = 0
    tail_bytes: int = 0
    has_table: bool = False
    has_zero: bool = False
    has_pairs: bool = False
    shift_to_middle: int | None = None
    tile_shapes: _Shapes = _GROUPS

    @property
    def has_nibbles(self) -> bool:
        """Whether the low four bits of values are kept in nibbles."""
        return self.bits < 8

    def num_records(self, num_inputs: int) -> int:
        """Return how many records hold this many inputs."""
        records = -(-num_inputs // TILE)
        return records + records % 2 if self.has_pairs else records

    def tile_bytes(self, num_records: int) -> int:
        """Return the bytes of a tile with ``num_records`` records."""
        return num_records * self.record_bytes + self.tail_bytes


FORMATS: Mapping[str, WeightFormat] = {
    "w4": WeightFormat(4, 640),
    "w5": WeightFormat(5, 768),
    "s4": WeightFormat(4, 576, shift_to_middle=4),
    "s5": WeightFormat(5, 704, shift_to_middle=3),
    "z4": WeightFormat(4, 608, has_zero=True),
    "t4": WeightFormat(4, 576, tail_bytes=64, has_table=True, shift_to_middle=0),
    "k4": WeightFormat(4, 592, head_bytes=128),
    "k5": WeightFormat(5, 720, head_bytes=128),
    "k6": WeightFormat(6, 840, head_bytes=64),
    "w8": WeightFormat(8, 1088, shift_to_middle=0),
    "r8": WeightFormat(8, 1024, "rows", tail_bytes=TILE * 4, has_pairs=True, tile_shapes=_PAIRS),
    "bf16": WeightFormat(16, 2048, "bf16", tile_shapes=_PAIRS),
    "f32": WeightFormat(32, 4096, "floats", tile_shapes=_FLOATS),
}
KINDS = tuple(FORMATS)  # their numbers in the kernels' arguments
