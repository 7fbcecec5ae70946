"""Rotary position embedding as structural facts: what turns, and how far by each position.

It computes no angle: see ``models.rope.tables``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., 2021), halves rotated together ("NeoX" order).

    Pair ``i`` of ``dim // 2`` turns by ``position * theta ** (-2 i / dim) / divisor[i]`` radians;
    cosine and sine are then multiplied by ``attention_factor``. Every published scaling of the
    context (linear, Llama 3, YaRN, LongRoPE) is such a list of divisors.

    Attributes:
        theta: base of the frequencies.
        dim: how many of a head's first channels rotate (``< head_dim`` is "partial" rope).
        divisors: one per pair, infinite for one that stands still; empty means all ones.
        attention_factor: multiplies cosine and sine.
        long_divisors: LongRoPE's second list, for models run beyond ``original_max_position``.
        original_max_position: context length before extension, tokens; 0 where it does not matter.
        query_growth: queries are multiplied by ``1 + growth ln(1 + position //
            original_max_position)``, so that scores stay sharp in long texts (Llama 4, 2025).
    """

    theta: float
    dim: int
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_divisors: tuple[float, ...] = ()
    original_max_position: int = 0
    query_growth: float = 0.0

    def divisors_for(self, max_model_len: int) -> tuple[float, ...]:
        """Return the divisors for an engine whose sequences may reach ``max_model_len`` tokens.

        The choice is made once for all positions, so that a cached key never depends on how long
        its sequence became later.
        """
        if self.long_divisors and max_model_len > self.original_max_position:
            return self.long_divisors
        return self.divisors or (1.0,) * (self.dim // 2)
