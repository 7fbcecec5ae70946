"""The norm of an embedding's rows, where they enter the model (BLOOM, 2022)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.tensors import Checkpoint

Floats = NDArray[np.float32]


class EmbeddingNorm:
    """A LayerNorm of rows, each by itself: a row has the same bits whatever is beside it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Decode its weight and bias."""
        tensors = checkpoint.tensors
        self._eps = np.float32(checkpoint.arch.norm_eps)
        self.arrays = [tensors[n].to_f32() for n in ("embedding_norm", "embedding_norm_bias")]

    def of(self, row: Floats) -> Floats:
        """Return a row ``[hidden]`` after the norm."""
        weight, bias = self.arrays
        centred = row - row.mean()
        out: Floats = centred / np.sqrt(np.square(centred).mean() + self._eps) * weight + bias
        return out
