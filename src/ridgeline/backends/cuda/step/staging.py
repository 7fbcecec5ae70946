"""Host arrays and their twins on the device, in named parts: a step travels in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 16  # bytes
_IN_ROTATION = 3  # host arrays: one is written while the copies of others may be under way


class StagedArray(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, up to where the next may begin."""
        size = math.prod(self.shape) * int(self.dtype.itemsize)
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Staging:
    """``host``: numpy views by name, to be written; ``device``: tensors by name, to be read.

    On a CPU both are the same memory.
    """

    def __init__(self, parts: Mapping[str, StagedArray], device: torch.device) -> None:
        """Allocate all parts as one run of bytes on either side."""
        total = sum(part.num_bytes for part in parts.values())
        self._pins = device.type == "cuda"
        self._hosts = [
            torch.zeros(total, dtype=torch.uint8, pin_memory=self._pins)
            for _ in range(_IN_ROTATION if self._pins else 1)
        ]
        on_device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.array = on_device if self._pins else self._hosts[0]
        self.device = _views(self.array, parts)
        self._views = [
            {name: view.numpy() for name, view in _views(host, parts).items()}
            for host in self._hosts
        ]
        self._copied: list[Any] = [None] * len(self._hosts)
        self._next = 0

    @property
    def host(self) -> Mapping[str, Any]:
        """The parts that are sent next."""
        return self._views[self._next]

    def send(self) -> None:
        """Start the copy. The arrays written next are free once their own last copy has ended."""
        if not self._pins:
            return
        self.array.copy_(self._hosts[self._next], non_blocking=True)
        event = self._copied[self._next] = torch.cuda.Event()
        event.record()
        self._next = (self._next + 1) % _IN_ROTATION
        if self._copied[self._next] is not None:
            self._copied[self._next].synchronize()


class Pending:
    """Integers on their way to the host. Waiting for them waits for nothing that came later."""

    def __init__(self, array: torch.Tensor) -> None:
        """Start the copy of ``array``."""
        self._host, self._copied = array, None
        if array.device.type == "cuda":
            self._host = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
            self._host.copy_(array, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def get(self) -> list[int]:
        """Wait, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[int] = self._host.tolist()
        return values


def _views(array: torch.Tensor, parts: Mapping[str, StagedArray]) -> dict[str, torch.Tensor]:
    begins = accumulate((part.num_bytes for part in parts.values()), initial=0)
    return {
        name: array[begin : begin + math.prod(part.shape) * part.dtype.itemsize]
        .view(part.dtype)
        .view(part.shape)
        for (name, part), begin in zip(parts.items(), begins, strict=False)
    }
