"""Vectors of texts: a step's items with ``pool`` get one each, made of their final states.

Every sum is over one item's own tokens, in their order and in float64, so a text's vector depends
on nothing else: not on the batch, the threads, or how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.step import Step, StepOutput

_NOT_FINITE = "the vector is not finite"


def pooled(
    step: Step, output: StepOutput, hidden: Callable[[range], NDArray[np.float32]]
) -> StepOutput:
    """Return a step's output with the vectors of its ``pool`` items.

    "last" is the last token's state, "cls" the first one's, "mean" the mean of all, for which all
    tokens must be in this step. ``hidden`` returns the final states, ``[tokens, channels]``, of
    tokens of the step; they are numbered in the order of its work.
    """
    if not any(item.pool for item in step.work):
        return output
    vectors: dict[int, tuple[float, ...]] = {}
    errors = dict(output.errors)
    ends = accumulate(len(item.tokens) for item in step.work)
    for i, (item, end) in enumerate(zip(step.work, ends, strict=True)):
        if not item.pool or i in errors:
            continue
        first = end - len(item.tokens)
        wanted = {"last": range(end - 1, end), "cls": range(first, first + 1)}
        tokens = wanted.get(item.pool, range(first, end))
        assert item.pool == "last" or not item.start, "a text in pieces has no such vector"
        states = np.ascontiguousarray(hidden(tokens), np.float64)
        vector = np.add.reduce(states, axis=0) / len(tokens)  # row after row
        if np.isfinite(vector).all():
            vectors[i] = tuple(vector.tolist())
        else:
            errors[i] = _NOT_FINITE
    return output._replace(vectors=vectors, errors=errors)
