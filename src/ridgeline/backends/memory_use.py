"""What arrays take: the bytes that they hold, and those that are in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.interface import Held
from ridgeline.system.machine import drop_pages, resident_bytes


def held(arrays: Iterable[NDArray[Any]], *, is_mapped: bool = False) -> Held:
    """Return what arrays take; one that is given twice counts once.

    In memory are whole pages, huge ones among them: with an array counts what was reserved for its
    alignment, but not what else stands in a file (``is_mapped``).
    """
    kept = [array for array in arrays if array.nbytes]
    areas = kept if is_mapped else [_reserved(array) for array in kept]
    in_memory = sum(resident_bytes(*place) for place in {_place(area) for area in areas})
    return Held(sum(size for _, size in {_place(array) for array in kept}), in_memory, is_mapped)


def release(arrays: Iterable[NDArray[Any]], *, is_mapped: bool = False) -> None:
    """Give the pages of arrays back to the system: what is in them is lost, unless a file has it.

    As in ``held``, what was reserved with an array for its alignment goes with it.
    """
    kept = [array for array in arrays if array.nbytes]
    for place in {_place(area if is_mapped else _reserved(area)) for area in kept}:
        drop_pages(*place)


def _reserved(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array that this one is cut from."""
    return array.base if isinstance(array.base, np.ndarray) else array


def _place(array: NDArray[Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
