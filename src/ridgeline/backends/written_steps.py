"""Steps on their way to other processes: of each item what is new against the step before.

A sequence's tables and texts only grow, and its sampling is one object all its life. So little of a
step has to travel, and where two steps share an object here, they share one there: what decides by
``is`` decides the same on every rank. What no runner reads is left out.
"""

from __future__ import annotations

from typing import Any

from ridgeline.core.step import SeqId, Step, Wait, Work

_GROWING = ("table", "history")  # fields that are tuples


class Sender:
    """Writes steps; each refers to the one that was written before."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[SeqId, Work] = {}

    def write(self, step: Step) -> Any:
        """Return what ``Receiver.read`` makes the step of."""
        items = [self._item(item, self._known.get(item.seq_id)) for item in step.work]
        self._known = {item.seq_id: item for item in step.work}
        waits = [wait for wait in step.waits if wait[1] is not Wait.PAUSED][:1]
        return items, step.copies, tuple(waits), step.state_copies

    def _item(self, item: Work, known: Work | None) -> Any:
        if known is None:
            return item, None
        grown = [_grown(getattr(item, name), getattr(known, name)) for name in _GROWING]
        others = [_grown(*pair) for pair in zip(item.others, known.others, strict=True)]
        changes: dict[str, Any] = dict.fromkeys(_GROWING, ()) | {"others": ()}
        if item.sampling is known.sampling:
            changes["sampling"] = None
        return item._replace(**changes), (grown, others)


class Receiver:
    """Reads what one ``Sender`` wrote, all of it and in order."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[SeqId, Work] = {}

    def read(self, written: Any) -> Step:
        """Return the step that was written."""
        items, copies, waits, state_copies = written
        work = tuple(self._item(*pair) for pair in items)
        self._known = {item.seq_id: item for item in work}
        return Step(work, copies, (), (), waits, state_copies)

    def _item(self, item: Work, growth: Any) -> Work:
        if growth is None:
            return item
        known, (grown, others) = self._known[item.seq_id], growth
        changes: dict[str, Any] = {
            name: _whole(getattr(known, name), part)
            for name, part in zip(_GROWING, grown, strict=True)
        }
        changes["others"] = tuple(map(_whole, known.others, others))
        if item.sampling is None:
            changes["sampling"] = known.sampling
        return item._replace(**changes)


def _grown(new: tuple[int, ...], known: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return how much of what was known a tuple begins with, and the rest of it."""
    if new is known:
        return len(known), ()
    kept = len(known) if new[: len(known)] == known else 0
    return kept, new[kept:]


def _whole(known: tuple[int, ...], part: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
    kept, rest = part
    return known if kept == len(known) and not rest else known[:kept] + rest
