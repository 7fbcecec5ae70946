"""Running ahead (``backends.lookahead``): the step that will probably be asked for, launched early.

The last step's tokens are not known to the host by then.

Its tokens are those that the device has drawn. When the core asks for a step, each item that asks
for exactly what was computed gets it; all others are computed as usual. The core knows nothing of
it. All launches are on one stream: a block that was given away meanwhile is written later by its
new owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.backends.lookahead import is_where, next_item
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
        is_same = item.sampling is mine.sampling and item.seeds == mine.seeds
        return i if is_same and is_where(item, mine, block_size) else -1


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
    work = []
    for item in step.work:
        if len(item.tokens) != 1 or not item.seeds or not is_plain(item):
            return None
        following = next_item(item, (-1,), block_size, max_model_len)
        if following is None:
            return None
        work.append(following)
    return tuple(work)
