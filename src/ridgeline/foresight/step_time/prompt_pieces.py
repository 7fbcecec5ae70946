"""How many tokens of prompts a step should have at least, by how long steps take on a device.

Up to some number of tokens a step takes as long as reading the weights; from there on arithmetic
decides, and the time grows with each token. Below that knee a device computes less than it could,
so prompts wait; far above it those that decode wait for each step.
"""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.model.cost.costs import Features

_MOST = 1 << 13  # tokens; more are in no step
_KNEES = 2  # docs/adr/0054-pieces-that-suit-the-device.md


def least_prompt_tokens(seconds: Callable[[Features], float]) -> int:
    """Return for how many tokens arithmetic takes twice as long as a step without prompts.

    ``seconds`` is a model of time. At most 8,192.
    """
    step_s, many_s, more_s = (seconds(_step(num)) for num in (1, _MOST, 2 * _MOST))
    token_s = (more_s - many_s) / _MOST
    return max(1, min(_MOST, round(_KNEES * step_s / token_s))) if token_s > 0 else _MOST


def _step(num_tokens: int) -> Features:
    return Features(num_tokens, num_seqs=1, num_rows=1, num_positions=0, num_pairs=0)
