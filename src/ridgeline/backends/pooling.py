"""Vectors of texts: a step's items with ``pool`` get one each, made of their final states.

Of a model with a classifier, a vector is one number: the score of a pair of texts.

Every sum is over one item's own tokens, in their order and in float64, so a text's vector depends
on nothing else: not on the batch, the threads, or how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.step import Step, StepOutput
from ridgeline.model.files.tensors import Checkpoint, Dense

_NOT_FINITE = "the vector is not finite"
_FLAT = 20.0  # from here on tanh is 1 in float64
_TERMS = 14  # of the exponential's series, for float64
_LN2 = 0.6931471803691238, 1.9082149292705877e-10  # in two parts: products with the first are exact

Doubles = NDArray[np.float64]


class Scorer:
    """A classifier on a pooled state: a tanh layer, then one output (Devlin et al., 2019)."""

    part = "scores"

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read its weights."""
        names = ("pooler", "pooler_bias", "scores", "scores_bias")
        self.arrays = [checkpoint.tensors[name].to_f32() for name in names]
        self._squashes = checkpoint.arch.scores == "sigmoid"

    def __call__(self, state: Doubles) -> Doubles:
        """Return the score as the only value of a vector."""
        pooler, pooler_bias, scores, scores_bias = self.arrays
        inner = tanh(_product(pooler, state) + pooler_bias)
        score = _product(scores, inner) + scores_bias
        return (1.0 + tanh(score * 0.5)) * 0.5 if self._squashes else score


class Projections:
    """Dense layers, one after another, on a pooled state."""

    part = "dense"

    def __init__(self, dense: Sequence[Dense]) -> None:
        """Read their weights."""
        self._layers = [
            (one.weight.to_f32(), None if one.bias is None else one.bias.to_f32(), one.squashes)
            for one in dense
        ]
        pairs = [(weight, bias) for weight, bias, _ in self._layers]
        self.arrays = [array for pair in pairs for array in pair if array is not None]

    def __call__(self, state: Doubles) -> Doubles:
        """Return what the last of them makes of a state."""
        for weight, bias, squashes in self._layers:
            state = _product(weight, state) + (0.0 if bias is None else bias)
            state = tanh(state) if squashes else state
        return state


def pooling_head(checkpoint: Checkpoint) -> list[Scorer | Projections]:
    """Return what pooled states go through, if anything: one thing at most."""
    if checkpoint.arch.scores:
        return [Scorer(checkpoint)]
    return [Projections(checkpoint.dense)] if checkpoint.dense else []


def _product(matrix: NDArray[np.float32], vector: Doubles) -> Doubles:
    """Return the product, each sum in an order that no library chooses."""
    product: Doubles = (matrix.astype(np.float64) * vector).sum(axis=1)
    return product


def tanh(x: Doubles) -> Doubles:
    """Return the hyperbolic tangent, of sums and products alone: those of libraries differ."""
    y = -2.0 * np.minimum(np.abs(x), _FLAT)
    power = np.rint(y / sum(_LN2))
    remainder = y - power * _LN2[0] - power * _LN2[1]
    series = np.ones_like(remainder)
    for n in range(_TERMS, 0, -1):
        series = 1.0 + remainder * series / n
    small = np.ldexp(series, power.astype(np.int32))
    result: Doubles = np.sign(x) * (1.0 - small) / (1.0 + small)
    return result


def pooled(
    step: Step,
    output: StepOutput,
    hidden: Callable[[range], NDArray[np.float32]],
    scorer: Callable[[Doubles], Doubles] = lambda state: state,
) -> StepOutput:
    """Return a step's output with the vectors of its ``pool`` items.

    "last" is the last token's state, "cls" the first one's, "mean" the mean of all, for which all
    tokens must be in this step. ``hidden`` returns the final states, ``[tokens, channels]``, of
    tokens of the step; they are numbered in the order of its work. ``scorer`` makes the vector of
    what is pooled.
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
        state = np.add.reduce(states, axis=0) / len(tokens)  # row after row
        if np.isfinite(state).all():
            vectors[i] = tuple(scorer(state).tolist())
        else:
            errors[i] = _NOT_FINITE
    return output._replace(vectors=vectors, errors=errors)
