"""The number of processors of a device."""

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
