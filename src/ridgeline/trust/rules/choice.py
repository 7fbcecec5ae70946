"""Answers under rules: the pieces of each choice, and the tokens that may be told of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ridgeline.core.decoding.text import HeldEntries
from ridgeline.core.step import Event, TokenLogprobs
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.serve.answer.choice_state import FILTERED, ChoiceState
from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.answer.response_builder import ResponseBuilder
from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.rules.policy_file import RequestPolicy
from ridgeline.trust.rules.tokens import Entry, SearchedToken, SearchedTokens
from ridgeline.trust.text_rules.answer import AnswerGuard, BegunText


class FilteredAnswers:
    """What the rules let out of the answers to one request.

    Attributes:
        with_logprobs: whether they tell of tokens.
    """

    def __init__(
        self,
        rules: RequestPolicy,
        text: TextProcessor,
        answers: ResponseBuilder,
        *,
        is_constrained: bool,
    ) -> None:
        """Show nothing that ``rules`` forbid.

        They cannot change text that ``is_constrained``: it has a form to keep.
        """
        self._rules, self._text, self._answers = rules, text, answers
        self._body, self._stream = answers.body, answers.stream
        self._is_constrained, self.with_logprobs = is_constrained, answers.with_logprobs
        self._begun_by: dict[int, BegunText] = {}  # by prompt

    def choice(self, prompt: int) -> FilteredChoice | None:
        """Return what lets out one more answer to a prompt, None where no rule is for it."""
        begun, body = self._begun(prompt), self._body
        # What echoes its beginning begins before it.
        guard_begun = self._rules.begun("") if body.echo else begun
        guard = self._rules.new_guard(is_constrained=self._is_constrained, begun=guard_begun)
        if guard is None:
            return None
        if not (self.with_logprobs or body.return_token_ids):
            return FilteredChoice(self, guard, None, None)
        echoes = body.echo and not isinstance(body, ChatRequest)
        before = () if echoes else self._stream.prompts[prompt]
        decode = self._text.tokenizer.new_decoder(before, self._stream.params.skip_special_tokens)
        token_bytes, begun = self._text.tokenizer.token_bytes, guard_begun if echoes else begun
        tokens = self._rules.new_tokens(token_bytes, decode, begun)
        return FilteredChoice(self, guard, tokens, self._answers.new_pending(prompt))

    def _begun(self, prompt: int) -> BegunText:
        """Return what the answers to a prompt begin with that go on with a text of its own."""
        if prompt not in self._begun_by:
            body = self._body
            is_new = isinstance(body, ChatRequest) and not body.continue_final_message
            text = "" if is_new else self._text.begun_text(self._stream.prompts[prompt])
            self._begun_by[prompt] = self._rules.begun(text)
        return self._begun_by[prompt]

    def shown(self, value: Any) -> Any:
        """Return what an answer repeats of its request, as the rules let it out."""
        return self._rules.shown(value)

    def may_show(self, prompt: int) -> bool:
        """Whether rules let an answer tell of all tokens of a prompt."""
        return self._rules.is_shown(self._text.tokenizer.decode(self._stream.prompts[prompt]))

    def visible_of_prompt(self, entries: list[Entry]) -> list[Entry]:
        """Return what may be told of a prompt's tokens; a bare token stands for nothing."""
        tokenizer = self._text.tokenizer
        tokens = self._rules.new_tokens(tokenizer.token_bytes, tokenizer.new_decoder())
        searched = list(map(tokens.feed, entries))
        tokens.finish()
        return [one.entry if one.is_told else 0 for one in searched]

    def stopped_by(self, reason: str | int | None) -> str:
        """Return the text that has ended an answer and is not in it, if any has."""
        if reason is None or self._stream.params.include_stop_str_in_output:
            return ""
        if isinstance(reason, str):
            return reason
        return "" if self._text.tokenizer.is_special(reason) else self._text.spell(reason)


class FilteredChoice:
    """What the rules let out of one choice.

    Attributes:
        echoed: of tokens that the answer begins with; as ``entries``.
        entries: of tokens whose text the last event has settled, none of what was replaced.
        stop_reason: what has ended it, if that may be told.
    """

    def __init__(
        self,
        answers: FilteredAnswers,
        guard: AnswerGuard,
        tokens: SearchedTokens | None,
        buffer: HeldEntries[SearchedToken] | None,
    ) -> None:
        """Let pieces out through ``guard``; ``tokens`` and ``buffer`` are there if any are told."""
        self._answers, self._guard, self._tokens, self._buffer = answers, guard, tokens, buffer
        self._ready = deque[SearchedToken]()  # whose text is shown
        self._num_echoed = 0  # the first of these
        self.echoed: list[Entry] = []
        self.entries: list[TokenLogprobs] = []
        self.stop_reason: str | int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether a rule has ended the answer."""
        return self._guard.blocked is not None

    def echo(self, pieces: Sequence[MessageDelta], entries: Sequence[Entry]) -> list[MessageDelta]:
        """Return what is shown of a text that the answer begins with, and take its tokens."""
        shown = self._guard.take(pieces, is_over=False)
        if self._tokens is not None and not self._guard.blocked:
            self._ready += map(self._tokens.feed, entries)
            self._num_echoed = len(self._ready)
        return shown

    def let_out(
        self, answer: ChoiceState, pieces: Sequence[MessageDelta], event: Event
    ) -> list[TokenLogprobs]:
        """Add to an answer what the rules let out, and return the tokens whose text that is."""
        answers, stopped_by = self._answers, self._answers.stopped_by(event.stop_reason)
        answer.pieces += self.take(pieces, event, answer.reader.num_held, stopped_by)
        answer.stop_reason = self.stop_reason
        if stopped_by and answers.shown(stopped_by) != stopped_by:
            answer.stop_reason = None
        if self.is_blocked:
            answer.finish_reason, answer.stop_reason = FILTERED, None
        if answers.with_logprobs:
            answer.logprobs += self.echoed
        return self.entries

    def take(
        self, pieces: Sequence[MessageDelta], event: Event, num_unread: int, stopped_by: str
    ) -> list[MessageDelta]:
        """Take an event and the pieces read of it; return those that are shown.

        ``num_unread`` is how many characters the reader of the message holds back. ``stopped_by``
        is the text that has ended the answer and is not shown, if any has.
        """
        guard, is_over = self._guard, event.finish_reason is not None
        num_hits = guard.num_hits
        shown = guard.take(pieces, is_over=False)
        if is_over:
            # A match that the end would cut short is one.
            rest = guard.completing(stopped_by) if stopped_by else None
            shown += guard.take([rest] if rest else [], is_over=True)
        has_hit = guard.blocked is not None or guard.num_hits > num_hits
        self.stop_reason = None if has_hit else event.stop_reason
        if self._buffer is not None and self._tokens is not None:
            self._take_token(self._buffer, self._tokens, event, num_unread, has_hit=has_hit)
        return shown

    def _take_token(
        self,
        buffer: HeldEntries[SearchedToken],
        tokens: SearchedTokens,
        event: Event,
        num_unread: int,
        *,
        has_hit: bool,
    ) -> None:
        is_over = event.finish_reason is not None
        if event.token is not None:
            entry = event.logprobs or TokenLogprobs(event.token, 0.0, 0, ())
            buffer.feed(event.token, tokens.feed(entry))
        if is_over:
            tokens.finish()
        news = buffer.take(len(event.text), num_unread + self._guard.num_held, is_over=is_over)
        if has_hit:
            news = []
            buffer.drop_begun()
        self._ready += news
        if self._guard.blocked:
            self._ready.clear()
        self.echoed, self.entries = [], []
        while self._ready and self._ready[0].is_known:
            self._tell(self._ready.popleft())

    def _tell(self, token: SearchedToken) -> None:
        is_echoed = self._num_echoed > 0
        self._num_echoed -= is_echoed
        if not token.is_told:
            return
        if is_echoed:
            self.echoed.append(token.entry)
        elif isinstance(token.entry, TokenLogprobs):
            self.entries.append(token.entry)
