"""Steps on their way to other processes: of each item what is new against the last time.

A sequence's tables and texts only grow, and its sampling is one object all its life. So little of a
step has to travel, and where two steps share an object here, they share one there: what decides by
``is`` decides the same on every rank. What no runner reads is left out.
"""

from __future__ import annotations

from typing import Any

from ridgeline.core.step import SeqId, Step, Wait, Work

_GROWING = ("table", "history")  # fields that are tuples


class _LastItems:
    """The items of the last few steps, each as it was last: the same at both ends."""

    def __init__(self, num_steps: int) -> None:
        """Know nothing yet."""
        self._num_steps, self._number = num_steps, 0
        self._items: dict[SeqId, tuple[int, Work]] = {}  # with the step's number, oldest first

    def get(self, seq_id: SeqId) -> Work | None:
        """Return a sequence's last item, if it is not too old."""
        entry = self._items.get(seq_id)
        return entry[1] if entry else None

    def note(self, work: tuple[Work, ...]) -> None:
        """Take a step's items."""
        self._number += 1
        for item in work:
            self._items.pop(item.seq_id, None)
            self._items[item.seq_id] = self._number, item
        while self._items:
            first = next(iter(self._items))
            if self._items[first][0] > self._number - self._num_steps:
                break
            del self._items[first]


class StepEncoder:
    """Writes steps; each refers to those that were written before."""

    def __init__(self, num_steps: int = 1) -> None:
        """Refer to the last ``num_steps``, which the receiver must know too."""
        self._last_items = _LastItems(num_steps)

    def write(self, step: Step) -> Any:
        """Return what ``StepDecoder.read`` makes the step of."""
        items = [self._item(item, self._last_items.get(item.seq_id)) for item in step.work]
        self._last_items.note(step.work)
        waits = [wait for wait in step.waits if wait[1] is not Wait.PAUSED][:1]
        return items, step.copies, tuple(waits), step.state_copies

    def _item(self, item: Work, last: Work | None) -> Any:
        if last is None:
            return item, None
        grown = [_grown(getattr(item, name), getattr(last, name)) for name in _GROWING]
        others = [_grown(*pair) for pair in zip(item.others, last.others, strict=True)]
        changes: dict[str, Any] = dict.fromkeys(_GROWING, ()) | {"others": ()}
        if item.sampling is last.sampling:
            changes["sampling"] = None
        return item._replace(**changes), (grown, others)


class StepDecoder:
    """Reads what one ``StepEncoder`` wrote, all of it and in order."""

    def __init__(self, num_steps: int = 1) -> None:
        """Keep as many steps as the sender refers to."""
        self._last_items = _LastItems(num_steps)

    def read(self, written: Any) -> Step:
        """Return the step that was written."""
        items, copies, waits, state_copies = written
        work = tuple(self._item(*pair) for pair in items)
        self._last_items.note(work)
        return Step(work, copies, (), (), waits, state_copies)

    def _item(self, item: Work, growth: Any) -> Work:
        if growth is None:
            return item
        last, (grown, others) = self._last_items.get(item.seq_id), growth
        assert last is not None
        changes: dict[str, Any] = {
            name: _whole(getattr(last, name), part)
            for name, part in zip(_GROWING, grown, strict=True)
        }
        changes["others"] = tuple(map(_whole, last.others, others))
        if item.sampling is None:
            changes["sampling"] = last.sampling
        return item._replace(**changes)


def _grown(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return how much of what was known a tuple begins with, and the rest of it."""
    if new is old:
        return len(old), ()
    count = len(old) if new[: len(old)] == old else 0
    return count, new[count:]


def _whole(old: tuple[int, ...], part: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
    count, rest = part
    return old if count == len(old) and not rest else old[:count] + rest
