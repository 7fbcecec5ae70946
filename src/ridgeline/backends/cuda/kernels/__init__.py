"""The Triton kernels. Each has a twin in ``twins`` with the same name and arguments.

Importing this package imports Triton. Nothing here knows of sequences, steps or models.
"""

from ridgeline.backends.cuda.kernels.attention import attend
from ridgeline.backends.cuda.kernels.copy_blocks import copy_blocks
from ridgeline.backends.cuda.kernels.draws.adjust import adjust
from ridgeline.backends.cuda.kernels.draws.draw import draw
from ridgeline.backends.cuda.kernels.draws.ranks import rank
from ridgeline.backends.cuda.kernels.gating import gate
from ridgeline.backends.cuda.kernels.norm import add_norm, norm
from ridgeline.backends.cuda.kernels.products.grouped import grouped_product
from ridgeline.backends.cuda.kernels.products.low_rank import add_low_rank
from ridgeline.backends.cuda.kernels.products.packed import packed_product
from ridgeline.backends.cuda.kernels.products.plain import product
from ridgeline.backends.cuda.kernels.recurrent import convolve, remember, scan
from ridgeline.backends.cuda.kernels.rope_and_cache import rope_and_cache

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
