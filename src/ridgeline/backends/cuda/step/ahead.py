"""Running ahead: the step that will probably be asked for, launched before the last one's tokens
are known to the host.

Its tokens are those that the device has drawn. When the core asks for a step, each item that asks
for exactly what was computed gets it; all others are computed as usual. A row's bits do not depend
on the step that it is in, so no answer changes, and the core knows nothing of it. All launches are
on one stream: a block that was given away meanwhile is written later by its new owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.core.step import SeqId, Step, Wait, Work

if TYPE_CHECKING:
    from ridgeline.backends.cuda.step.staging import Pending


@dataclass(slots=True)
class Ahead:
    """A step under way that was not asked for yet.

    Attributes:
        work: its items, with tokens that were not known when it was launched.
        picked: what it draws, on the device.
        pending: the same on its way to the host, then what is not finite.
        tokens: what its items' tokens turned out to be, once the host knows.
    """

    work: tuple[Work, ...]
    picked: Any
    pending: Pending
    tokens: list[int] = field(default_factory=list)

    def places(self, step: Step, block_size: int) -> list[int]:
        """Return where the result of each of a step's items is, -1 if it was not computed."""
        at = {item.seq_id: i for i, item in enumerate(self.work)}
        return [self._place(item, at, block_size) for item in step.work]

    def _place(self, item: Work, at: dict[SeqId, int], block_size: int) -> int:
        i = at.get(item.seq_id, -1)
        if i < 0 or not self.tokens or not is_plain(item) or item.tokens != (self.tokens[i],):
            return -1
        mine = self.work[i]
        if item.start != mine.start or item.sampling is not mine.sampling:
            return -1
        block = item.start // block_size  # where keys and values were written
        tables = zip((item.table, *item.others), (mine.table, *mine.others), strict=True)
        is_same = all(theirs[block] == ours[block] for theirs, ours in tables)
        return i if is_same and item.seeds == mine.seeds else -1


def is_plain(item: Work) -> bool:
    """Whether nothing of an item must be known but its tokens and at most one seed."""
    asks = item.masks or item.drafts or item.top or item.pool or item.targets or item.similar
    return len(item.seeds) <= 1 and not asks


def next_work(step: Step, block_size: int, max_model_len: int) -> tuple[Work, ...] | None:
    """Return what a step of plain single tokens will be followed by; None where it is not worth
    trying.

    Their blocks must be there. While prompts wait, the next step will be theirs too, and weights
    are better read once for both.
    """
    if any(reason is not Wait.PAUSED for _, reason in step.waits):
        return None
    found = []
    for item in step.work:
        start = item.start + 1
        if len(item.tokens) != 1 or not item.seeds or not is_plain(item):
            return None
        if start + 1 >= max_model_len:
            return None
        if start // block_size >= min(map(len, (item.table, *item.others))):
            return None
        found.append(item._replace(start=start, tokens=(-1,)))
    return tuple(found)
