"""Every kernel's twin in torch, with the same name and arguments, written to be read.

They say what a kernel has to return. On a CPU they compute whole models, so that ``--tiny`` runs
everything around the kernels without a GPU. They sum in float32, in whatever order torch uses,
and in float64 if their inputs are float64.
"""

from ridgeline.backends.cuda.measure.twins.draws import adjust, draw, rank
from ridgeline.backends.cuda.measure.twins.layers import (
    add_low_rank,
    add_norm,
    attend,
    copy_blocks,
    gate,
    grouped_product,
    norm,
    packed_product,
    product,
    rope_and_cache,
)
from ridgeline.backends.cuda.measure.twins.recurrent import convolve, remember, scan

__all__ = [
    "add_low_rank",
    "add_norm",
    "adjust",
    "attend",
    "convolve",
    "copy_blocks",
    "draw",
    "gate",
    "grouped_product",
    "norm",
    "packed_product",
    "product",
    "rank",
    "remember",
    "rope_and_cache",
    "scan",
]
