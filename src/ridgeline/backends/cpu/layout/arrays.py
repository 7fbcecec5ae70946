"""Memory for kernels: aligned, on huge pages where the system has them, zero until written."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T", bound=np.generic)
_HUGE_PAGE = 1 << 21


def aligned(shape: int | tuple[int, ...], dtype: type[_T]) -> NDArray[_T]:
    """Return zeros that begin at a multiple of 64 bytes, or of a huge page if there are many."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    boundary = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else 64
    if sys.platform == "win32":
        area = mmap.mmap(-1, num_bytes + boundary)
    else:
        area = mmap.mmap(-1, num_bytes + boundary, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if boundary == _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # an operating system without them
            area.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(area, np.uint8)
    begin = -raw.ctypes.data % boundary
    return raw[begin : begin + num_bytes].view(dtype).reshape(shape)


def address(array: NDArray[Any]) -> int:
    """Return where an array's first element is."""
    return int(array.ctypes.data)


def aligned_copy(array: NDArray[_T]) -> NDArray[_T]:
    """Return a copy in memory that kernels like."""
    out = aligned(array.shape, array.dtype.type)
    out[...] = array
    return out
