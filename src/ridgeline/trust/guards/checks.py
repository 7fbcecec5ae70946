"""What guards judge of one request: its prompts before they are computed, and answers as they grow.

An answer's events are held until it was judged up to there, so text, ids and logprobs are held
together. A guard that fails refuses, unless the file of rules lets texts pass then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.records import RequestRecord
from ridgeline.core.step import Event
from ridgeline.serve.engine.request_stream import Refusal, StreamCaller, StreamError, StreamEvent
from ridgeline.serve.http.errors import ApiError
from ridgeline.trust.guards.guard import GuardFailed, text_of
from ridgeline.trust.guards.guard_models import GuardModels
from ridgeline.trust.rules.file import JudgeRule
from ridgeline.trust.rules.policy_file import FAILED, RequestPolicy

Conversation = Sequence[Mapping[str, Any]]
_log = logging.getLogger("ridgeline.serve")


class _Growing:
    """An answer: its text, and the events that wait for a verdict."""

    def __init__(self) -> None:
        self.text = ""
        self.pending: list[StreamEvent] = []
        self.num_tokens = 0  # of these
        self.is_over = False


class Checks:
    """What guards judge of one request.

    Attributes:
        rules: those for the request.
    """

    def __init__(
        self,
        rules: RequestPolicy,
        guards: GuardModels,
        caller: StreamCaller,
        conversations: Sequence[Conversation],
        *,
        goes_on: bool = False,
    ) -> None:
        """Judge by ``rules`` for the sake of ``caller``; each prompt is a conversation.

        An answer that ``goes_on`` with the last message is judged together with it.
        """
        self._goes_on = goes_on
        self.rules, self._guards, self._caller = rules, guards, caller
        self._conversations = conversations
        self._answers: dict[tuple[int, int], _Growing] = {}
        judges = rules.key.output_judges
        self._every = min((one.every for one in judges), default=0)

    async def check_read(self, param: str) -> None:
        """Raise ApiError if a guard forbids a prompt, or cannot judge it."""
        judges = self.rules.key.input_judges
        checks = (self._hits(one, judges, "input") for one in self._conversations)
        for hits in await asyncio.gather(*checks):
            for rule in hits:
                self.rules.tell(rule, "input")
                if rule.action == "block":
                    raise self.rules.refused(rule, param)

    async def screen(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """Take events of answers; return those that may be shown now. Raises StreamError."""
        first: list[StreamEvent] = []
        last: list[StreamEvent] = []
        touched: dict[tuple[int, int], _Growing] = {}
        for index, payload in events:
            if isinstance(payload, Event):
                key = index, payload.seq_id[1]
                answer = self._answers.setdefault(key, _Growing())
                if not answer.is_over:
                    touched[key] = answer
                    answer.pending.append((index, payload))
                    answer.text += payload.text
                    answer.num_tokens += payload.token is not None
                    answer.is_over = payload.finish_reason is not None
            else:
                (last if isinstance(payload, RequestRecord) else first).append((index, payload))
        due = [
            (key, one)
            for key, one in touched.items()
            if one.is_over or one.num_tokens >= self._every
        ]
        judged = await asyncio.gather(*(self._judged(index, one) for (index, _), one in due))
        for (key, answer), rule in zip(due, judged, strict=True):
            first += answer.pending if rule is None else [(key[0], Refusal(key[1], rule.says))]
            answer.pending, answer.num_tokens = [], 0
        return first + last

    async def _judged(self, index: int, answer: _Growing) -> JudgeRule | None:
        """Return the rule that ends an answer, if one does."""
        judges = self.rules.key.output_judges
        if not answer.is_over:  # what is only noted is judged once, at the end
            judges = tuple(one for one in judges if one.action == "block")
        conversation = self._with_answer(self._conversations[index], answer.text)
        for rule in await self._hits(conversation, judges, "output"):
            self.rules.tell(rule, "output")
            if rule.action == "block":
                answer.is_over = True
                return rule
        return None

    def _with_answer(self, conversation: Conversation, text: str) -> Conversation:
        """Return a conversation with an answer, which may go on with its last message."""
        if not self._goes_on:
            return [*conversation, {"role": "assistant", "content": text}]
        *before, last = conversation
        return [*before, {"role": "assistant", "content": text_of(last) + text}]

    async def _hits(
        self, conversation: Conversation, judges: Sequence[JudgeRule], where: str
    ) -> list[JudgeRule]:
        """Return the rules whose guards find something in the last message of a conversation."""
        models = list(dict.fromkeys(one.model for one in judges))
        by_model = [[one for one in judges if one.model == model] for model in models]
        try:
            calls = (
                self._guards.judge(some[0].model).scores(conversation, some, self._caller)
                for some in by_model
            )
            results = await asyncio.gather(*calls)
        except Exception as error:
            self.rules.count_error(where)
            _log.warning("a rule of --rules failed: %s", error)
            if self.rules.serves_on_error:
                return []
            if where == "output":
                raise StreamError(FAILED, 503) from None
            is_client_error = isinstance(error, GuardFailed) and error.status == 400
            message = str(error) if is_client_error else FAILED
            raise ApiError(400 if is_client_error else 503, message, code="rules_failed") from None
        scores = {
            one.name: score
            for some, values in zip(by_model, results, strict=True)
            for one, score in zip(some, values, strict=True)
        }
        return [one for one in judges if scores[one.name] >= one.at]


def conversations_of(
    body: Any, prompts: Sequence[Sequence[int]], decode: Any, rules: RequestPolicy
) -> list[Conversation]:
    """Return each prompt of a request as a conversation, as the rules let it be read."""
    if hasattr(body, "messages"):
        return [rules.as_read([message.plain() for message in body.messages])]
    return [[{"role": "user", "content": decode(prompt)}] for prompt in prompts]
