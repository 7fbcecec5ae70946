"""What vLLM's examples print with."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_SHOWN = 4


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first values of a vector, and how many it has."""
    shown = ", ".join(map(repr, embeds[:_MOST_SHOWN]))
    more = ", ..." if len(embeds) > _MOST_SHOWN else ""
    print(f"{prefix}: [{shown}{more}] (size={len(embeds)})")
