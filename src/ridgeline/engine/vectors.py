"""What is done with vectors of texts outside of the engine: cut, scaled to length 1, compared.

Sums are exact before they are rounded (``math.fsum``), so a value depends on its vectors alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_MOST_SHOWN = 4


def shaped(
    vector: Sequence[float], dimensions: int | None = None, *, normalises: bool = True
) -> list[float]:
    """Return the first ``dimensions`` values of a vector, all if None, as float32.

    If it ``normalises``, they are scaled to length 1 after the cut (Kusupati et al., "Matryoshka
    Representation Learning", 2022). Raises ValueError if the vector has fewer.
    """
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise ValueError(
            f"dimensions is {dimensions}: this model's vectors have {len(vector)}, take 1 to that"
        )
    cut = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in cut)) if normalises else 1.0
    out: list[float] = np.array([value / (length or 1.0) for value in cut], np.float32).tolist()
    return out


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors of equal size; 0 where one is zero."""
    lengths = [math.sqrt(math.fsum(value * value for value in vector)) for vector in (one, other)]
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / (lengths[0] * lengths[1] or 1.0)


def paired(ones: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of one text with many, or of many with as many.

    Raises ValueError if their numbers do not fit.
    """
    if len(ones) not in (1, len(others)) or not others:
        raise ValueError(
            f"text_1 has {len(ones)} texts: give one, or as many as text_2 ({len(others)})"
        )
    return list(zip(list(ones) * (len(others) // len(ones)), others, strict=True))


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first values of a vector, and how many it has, as vLLM's examples do."""
    shown = ", ".join(map(repr, embeds[:_MOST_SHOWN]))
    more = ", ..." if len(embeds) > _MOST_SHOWN else ""
    print(f"{prefix}: [{shown}{more}] (size={len(embeds)})")
