"""What stands before the layers, on arrays of numpy: an embedding's rows become the first inputs.

Of learnt positions and segments the embedding is added here. The cuda backend does the same on
tensors. What stands behind the layers is ``sampler.step_output``, for all backends.

Learnt biases of scores, by the distance of two tokens in buckets, are spread out here (T5; Raffel
et al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.step import Work
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch

Floats = NDArray[np.float32]
_FARTHEST = 128  # tokens, from where on all distances to one side share a bucket


class EmbeddingNorm:
    """A LayerNorm of rows, each by itself: a row has the same bits whatever is beside it.

    Models have one where an embedding's rows enter (BLOOM, 2022).
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Decode its weight and bias."""
        tensors = checkpoint.tensors
        self._eps = np.float32(checkpoint.arch.norm_eps)
        self.arrays = [tensors[n].to_f32() for n in ("embedding_norm", "embedding_norm_bias")]

    def __call__(self, rows: Floats) -> Floats:
        """Return rows ``[tokens, hidden]`` after the norm."""
        out, (weight, bias) = np.empty_like(rows), self.arrays
        for i, row in enumerate(rows):
            centred = row - row.mean()
            out[i] = centred / np.sqrt(np.square(centred).mean() + self._eps) * weight + bias
        return out


class FirstInputs:
    """Norm, scale, learnt positions and segments of a model: those that it has."""

    def __init__(
        self,
        arch: ModelArch,
        positions: Floats | None,
        norm: Callable[[Floats], Floats] | None,
    ) -> None:
        """Take the learnt embedding of positions, ``[positions, width]``, and the norm of rows."""
        self._arch, self._positions, self._norm = arch, positions, norm

    def make(
        self,
        x: Floats,
        positions: Sequence[int] | NDArray[np.intp],
        work: tuple[Work, ...],
        row_of_token: Sequence[int] | slice = slice(None),
    ) -> None:
        """Turn a step's rows of the embedding into what the first layer reads, in place.

        Args:
            x: ``[tokens, width]``, the model's channels first and then any padding.
            positions: of each row, in its text.
            work: the items of the step.
            row_of_token: of each token in the order of the work; by default its own number.
        """
        arch = self._arch
        if self._norm is not None:
            channels = x[:, : arch.hidden_size]
            channels[:] = self._norm(channels)
        if arch.embed_scale != 1.0:
            x *= np.float32(arch.embed_scale)
        if self._positions is not None:
            places = np.array(positions) + arch.position_offset
            if arch.num_segments > 1:
                of_tokens = np.fromiter(segments(work, arch.separator), np.intp, len(x))
                places[row_of_token] += of_tokens * (arch.position_rows // arch.num_segments)
            x += self._positions[places]


def segments(items: tuple[Work, ...], separator: int) -> Iterator[int]:
    """Yield for each token of a step which segment of its text it is in: 1 behind the separator."""
    for item in items:
        count = len(item.tokens)
        first = item.tokens.index(separator) + 1 if separator in item.tokens else count
        yield from [0] * first + [1] * (count - first)


def biases_by_distance(weights: Floats, max_model_len: int) -> Floats:
    """Return what each head adds to a score, ``[heads, distances]``.

    A key as far from its query as the middle is from a place has its number at that place, those
    before the query to the left; there is room for the rest of a block of 16 keys at both ends.

    Args:
        weights: ``[buckets, heads]``, half of the buckets for keys behind the query.
        max_model_len: tokens of the longest text.
    """
    half = max_model_len + 16
    distance = np.arange(-half, half)
    side = len(weights) // 2
    bucket = np.searchsorted(_starts(side), np.abs(distance), side="right") - 1
    return np.ascontiguousarray(weights[bucket + side * (distance > 0)].T)


def _starts(num_buckets: int) -> list[int]:
    """Return the distance at which each bucket of one side begins.

    Half of them have one distance each; the others grow like powers, in whole numbers.
    """
    exact = num_buckets // 2
    rest = num_buckets - exact
    starts, start = list(range(exact)), exact
    for step in range(rest):
        while start**rest * exact**step < exact**rest * _FARTHEST**step:
            start += 1
        starts.append(start)
    return starts
