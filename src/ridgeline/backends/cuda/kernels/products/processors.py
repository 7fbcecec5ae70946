"""What a device can do that launches depend on."""

from __future__ import annotations

from functools import cache

import torch


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
