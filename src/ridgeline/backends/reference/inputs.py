"""Inputs of layers in the reference backend (Gemma 3n, 2025): see ``ModelArch.input_scales``.

Their table is larger than all other weights together: it stays encoded, as the file has it, and of
a step's tokens alone the rows are decoded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.reference.parts import linear, rms_norm
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import ModelArch

Floats = NDArray[np.float32]


class LayerInputs:
    """What every layer of a model reads of each token, beside the residual stream."""

    def __init__(self, arch: ModelArch, table: Tensor, get: Callable[[str], Floats]) -> None:
        """Keep the table; ``get`` returns another tensor by its canonical name."""
        self._arch, self._table = arch, table
        self._proj, self._norm = self.arrays = [get("inputs_proj"), get("inputs_norm")]

    @property
    def table(self) -> NDArray[np.uint8]:
        """The rows of all tokens as they lie in the file."""
        return self._table.stored

    def of(self, ids: NDArray[np.intp], embedded: Floats) -> Floats:
        """Return the inputs of tokens whose scaled embeddings are given, ``[T, layers, size]``."""
        arch = self._arch
        shape = len(ids), arch.num_layers, arch.input_size
        of_row, of_product, of_sum = map(np.float32, arch.input_scales)
        rows = self._table.rows(ids).to_f32().reshape(shape)
        made = (linear(embedded, self._proj, None) * of_product).reshape(shape)
        out: Floats = (rms_norm(made, self._norm, arch.norm_eps) + rows * of_row) * of_sum
        return out
