"""Arrays in memory: aligned for kernels, what they take of it, and giving it back.

For kernels they are on huge pages where the system has them, and zero until written. What arrays
take are the bytes that they hold, and those that are in memory.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.interface import MemoryUse
from ridgeline.system.machine import drop_pages, resident_bytes

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


def memory_use(arrays: Iterable[NDArray[Any]], *, is_mapped: bool = False) -> MemoryUse:
    """Return what arrays take; one that is given twice counts once.

    In memory are whole pages, huge ones among them: with an array counts what was reserved for its
    alignment, but not what else stands in a file (``is_mapped``).
    """
    nonempty = [array for array in arrays if array.nbytes]
    areas = nonempty if is_mapped else [_reserved(array) for array in nonempty]
    in_memory = sum(resident_bytes(*place) for place in {_place(area) for area in areas})
    return MemoryUse(
        sum(size for _, size in {_place(array) for array in nonempty}), in_memory, is_mapped
    )


def release(arrays: Iterable[NDArray[Any]], *, is_mapped: bool = False) -> None:
    """Give the pages of arrays back to the system: what is in them is lost, unless a file has it.

    As in ``memory_use``, what was reserved with an array for its alignment goes with it.
    """
    nonempty = [array for array in arrays if array.nbytes]
    for place in {_place(area if is_mapped else _reserved(area)) for area in nonempty}:
        drop_pages(*place)


def _reserved(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array that this one is cut from."""
    return array.base if isinstance(array.base, np.ndarray) else array


def _place(array: NDArray[Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
