"""Weights to quantise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def heavy_tailed(rows: int, columns: int = 1024) -> NDArray[np.float32]:
    """Weights as models have them: mostly small, some far out."""
    rng = np.random.default_rng(0)
    return (rng.standard_t(5, size=(rows, columns)) * 0.02).astype(np.float32)
