"""How many bytes matrices take in a file, one by one: what a ledger's lines add up to."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.model.cost.format_bytes import Storage
from ridgeline.model.cost.shapes import Matrix


def stored_bytes(storage: Storage, matrices: Iterable[tuple[str, Matrix]]) -> int:
    """Return the bytes of all of these matrices, with their full names."""
    total = 0.0
    for name, matrix in matrices:
        matrix_format = storage.of(name, matrix)
        total += matrix_format.values_bytes(matrix) + matrix_format.scales_bytes(matrix)
    return round(total)
