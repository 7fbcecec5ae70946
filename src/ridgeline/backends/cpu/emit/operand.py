"""What a matrix product reads and writes besides its weights."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.backends.cpu.emit.ir import Value


class Operand(NamedTuple):
    """Where a tile's activations and results are: addresses, and bytes from row to row."""

    x: Value
    x_stride: Value
    act_scales: Value
    act_scales_stride: Value
    y: Value
    y_stride: Value

    def moved(self, row: Value, y_offset: Value) -> Operand:
        """Return the same from another row on, with results further right."""
        return self._replace(
            x=self.x + row * self.x_stride,
            act_scales=self.act_scales + row * self.act_scales_stride,
            y=self.y + row * self.y_stride + y_offset,
        )


OF_ROWS = ("num_rows", *Operand._fields, "next_address")
# Outputs 32 * first .. 32 * last of all rows; results begin at column 32 * first of y.
OF_TILES = ("tiles", "first", "last", "num_records", *OF_ROWS)
