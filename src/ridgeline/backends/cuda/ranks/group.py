"""What ranks tell each other within a step: outputs, side by side in the order of ranks.

Only values travel, never sums of them. So no result depends on the number of ranks.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

# A rank that is lost is found and ended by ``processes``, long before the library's own limit.
_LIMIT = timedelta(hours=12)


class Ranks:
    """A rank among others, or alone."""

    def __init__(
        self, rank: int = 0, count: int = 1, group: Any = None, progress: Any = None
    ) -> None:
        """Take the group that is connected.

        Args:
            rank: of this process.
            count: of ranks.
            group: of the library, None for one rank.
            progress: int64 ``[count]``, memory of all ranks: how far each has come.
        """
        self.rank, self.count, self._group = rank, count, group
        self._progress: NDArray[np.int64] = np.zeros(1, np.int64) if progress is None else progress

    def advance(self) -> None:
        """Let others see that this rank has come further."""
        self._progress[self.rank] += 1

    def gather(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return the columns of all ranks, ``[T, columns]``, those of the first rank first.

        Every rank has equally many, except the last ones where ``size`` says how many there are in
        all.
        """
        if self.count == 1:
            return x
        if size is not None and (missing := -(-size // self.count) - x.shape[1]):
            x = torch.nn.functional.pad(x, (0, missing))
        whole = self._all(x).transpose(0, 1).reshape(len(x), -1).contiguous()  # kernels need it
        return whole if size is None or whole.shape[1] == size else whole[:, :size].contiguous()

    def embedded(self, embedding: Tensor, tokens: Tensor, size: int) -> Tensor:
        """Return the rows of ``tokens`` of an embedding of ``size`` rows, of which each rank has
        a part.
        """
        if self.count == 1:
            return embedding[tokens]
        each = -(-size // self.count)
        mine = (tokens - self.rank * each).clamp(0, len(embedding) - 1)
        of_ranks = self._all(embedding[mine])
        return of_ranks[tokens // each, torch.arange(len(tokens), device=tokens.device)]

    def least(self, number: int, device: torch.device) -> int:
        """Return the least of the numbers of all ranks."""
        if self.count == 1:
            return number
        return int(self._all(torch.tensor([number], device=device)).amin())

    def abort(self) -> None:
        """Wake what waits for ranks that have ended; any thread may call."""
        if not isinstance(self._group, dist.ProcessGroupGloo):  # which sees that they are gone
            self._group.abort()

    def _all(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, which are of one shape, ``[count, ...]``."""
        self.advance()
        out = x.new_empty((self.count, *x.shape))
        sent = x.contiguous().view(-1).view(torch.uint8)
        self._group._allgather_base(out.view(-1).view(torch.uint8), sent).wait()
        return out


def connect(folder: Path, rank: int, count: int, device: torch.device, progress: Any) -> Ranks:
    """Wait for all ranks, which find each other by files in ``folder``; return this one."""
    store = dist.FileStore(str(folder / "ranks"), count)
    group: Any
    if device.type == "cuda":
        group = dist.ProcessGroupNCCL(store, rank, count, dist.ProcessGroupNCCL.Options())
    else:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _LIMIT
        group = dist.ProcessGroupGloo(store, rank, count, options)
    return Ranks(rank, count, group, progress)
