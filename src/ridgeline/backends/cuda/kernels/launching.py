"""What launches depend on in a device: its processors, and its shared memory.

``launch`` has as many loads under way as a GPU's shared memory has room for. The tables of tiles
are Hopper's, which has 227 KB for a program; Ampere has 163 KB, and cards for desktops 99 KB. Fewer
stages change when loads begin, and no bit.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime.errors import OutOfResources

fewer_stages: dict[tuple[object, tuple[tuple[str, object], ...]], int] = {}  # by kernel and options


@cache
def num_processors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a GPU; 2 for a CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return 2
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Return whether tiles can be loaded by the copy engine (TMA): from Hopper on.

    True for a CPU, where kernels are interpreted.
    """
    if device.type == "cpu":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return bool(major >= 9)


def launch(kernel, grid, *given, num_stages, **options):
    """Launch ``kernel[grid]`` on what is ``given``, with at most ``num_stages``.

    Raises OutOfResources if it does not fit with a single one.
    """
    key = kernel, tuple(options.items())
    stages = fewer_stages.get(key, num_stages)
    while True:
        try:
            kernel[grid](*given, num_stages=stages, **options)
        except OutOfResources:
            if stages == 1:
                raise
            stages -= 1
            fewer_stages[key] = stages
        else:
            return
