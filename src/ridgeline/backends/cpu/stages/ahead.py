"""Tokens that stages compute before they are asked for (``backends.ahead``).

As soon as the last stage has drawn some tokens of a step, the first begins with them, while the
last one goes on with the rest of the step. What comes out of the last but one is kept until the
next step asks for it. The last stage itself never runs ahead: it alone knows what a request asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline.backends.ahead import is_where, next_item
from ridgeline.backends.cpu.stages.parts import LEAST_ROWS, TokenSpan
from ridgeline.core.step import SeqId, Step, StepOutput, Work


class PartAhead(NamedTuple):
    """Some sequences' next tokens, which stages compute.

    Attributes:
        number: what the stages call it.
        work: an item of one token each.
    """

    number: int
    work: tuple[Work, ...]

    def asked(
        self, step: Step, at: Mapping[SeqId, int], block_size: int
    ) -> tuple[list[TokenSpan], list[int]]:
        """Return which of a step's items this is, and which of its rows they are.

        ``at`` is where each sequence's item is in the step.
        """
        pieces, rows = [], []
        for row, mine in enumerate(self.work):
            i = at.get(mine.seq_id, -1)
            if i < 0 or step.work[i].tokens != mine.tokens:
                continue
            if is_where(step.work[i], mine, block_size):
                pieces.append(TokenSpan(i, 0, 1))
                rows.append(row)
        return pieces, rows


class Drawn:
    """The tokens that a step has drawn, to be computed in parts of about equal size."""

    def __init__(self, step: Step, most: int, block_size: int, max_model_len: int) -> None:
        """Expect the results of a step; make at most ``most`` parts of them."""
        self._step, self._limits = step, (block_size, max_model_len)
        count = sum(map(_goes_on, step.work))
        num_parts = max(1, min(most, count // LEAST_ROWS))
        self._full = -(-count // num_parts)
        self._work: list[Work] = []

    def note(self, pieces: Sequence[TokenSpan], output: StepOutput) -> tuple[Work, ...]:
        """Take the results of a part; return the next tokens if they are enough for a part."""
        for place, (piece, tokens) in enumerate(zip(pieces, output.tokens, strict=True)):
            item = self._step.work[piece.item]
            if piece.high < len(item.tokens) or place in output.errors or not _goes_on(item):
                continue
            following = next_item(item, tokens, *self._limits)
            if following is not None:
                self._work.append(following)
        return self.rest() if len(self._work) >= self._full else ()

    def rest(self) -> tuple[Work, ...]:
        """Return what is not in a part yet."""
        work, self._work = tuple(self._work), []
        return work


def _goes_on(item: Work) -> bool:
    """Whether a single token is drawn behind an item, which is probably the text's next."""
    return len(item.seeds) == 1 and not (item.drafts or item.top)
