"""What was read of one choice of an answer and is not shown yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.core.decoding.text import HeldEntries
from ridgeline.core.step import Event, TokenLogprobs
from ridgeline.text.messages.call_bounds import CALL_BOUNDS
from ridgeline.text.messages.message import AnswerReader
from ridgeline.text.messages.tool_calls import MessageDelta

FILTERED = "content_filter"  # how an answer ended that a filter has ended


class ChoiceFilter(Protocol):
    """Lets out of one choice what it may say."""

    def echo(
        self, pieces: Sequence[MessageDelta], entries: Sequence[TokenLogprobs | int]
    ) -> list[MessageDelta]:
        """Return what is shown of a text that the choice begins with, and take its tokens."""

    def let_out(
        self, answer: ChoiceState, pieces: Sequence[MessageDelta], event: Event
    ) -> list[TokenLogprobs]:
        """Take an event and the pieces read of it; add to the choice what may be shown.

        Returns the tokens whose text that is.
        """


@dataclass
class ChoiceState:
    """One of the choices: the part of it that was read and is not yet shown."""

    index: int
    reader: AnswerReader
    filter: ChoiceFilter | None = None  # what lets its pieces out, if anything does
    pieces: list[MessageDelta] = field(default_factory=list)
    logprobs: list[TokenLogprobs | int] = field(default_factory=list)  # a bare token has none
    pending: HeldEntries[TokenLogprobs] | None = None  # logprobs ahead of the text
    num_tokens: int = 0
    cumulative_logprob: float = 0.0  # if tokens are ranked
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    has_begun: bool = False  # a token came
    has_role: bool = False  # a chunk of a chat named the role
    num_calls: int = 0  # shown
    offset: int = 0  # characters of the tokens shown, for ``text_offset``
    decode: Callable[[int], str] | None = None
    token_ids: list[int] | None = None  # where they are asked for: those not shown yet
    shown_pieces: list[MessageDelta] | None = None  # all of them, where that is wanted
    has_prompt_ids: bool = False  # a chunk had those of the prompt

    @property
    def shown_text(self) -> str:
        """All text that was shown, where its pieces stay."""
        return "".join(text for _, text in self.shown_pieces or ())

    @property
    def bound(self) -> str:
        """Which bound of calls has ended it, if one has."""
        return str(self.stop_reason) if self.num_calls and self.stop_reason in CALL_BOUNDS else ""

    def refuse(self, says: str) -> ChoiceState:
        """End it with what is said instead; return itself."""
        self.pieces += [MessageDelta("refusal", says)] if says else []
        self.finish_reason, self.stop_reason = FILTERED, None
        return self

    def show(self) -> list[MessageDelta]:
        """Return the pieces that are shown now, and then count as shown."""
        pieces, self.pieces = self.pieces, []
        if self.shown_pieces is not None:
            self.shown_pieces += pieces
        return pieces


def means_of(answers: Iterable[ChoiceState]) -> list[float]:
    """Return the mean log-probability of each answer's tokens."""
    return [answer.cumulative_logprob / max(answer.num_tokens, 1) for answer in answers]
