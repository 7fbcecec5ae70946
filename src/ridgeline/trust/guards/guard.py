"""A guard model: conversations in, scores of verdicts out.

Its chat template writes the prompt, and the logits of the words that its verdict begins with make
the score: nothing is sampled, so equal texts have equal scores.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ridgeline.engine.text_processor import TextProcessor
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import StreamCaller, StreamError
from ridgeline.serve.http.fair_pool import FairThreadPool
from ridgeline.trust.guards.families import Category, GuardFamily
from ridgeline.trust.guards.verdict import Ids, log_sum, logprobs_of
from ridgeline.trust.rules.file import JudgeRule

Messages = Sequence[Mapping[str, Any]]


class Verdict(NamedTuple):
    """What a guard makes of a conversation's last message.

    Attributes:
        score: probability from 0 to 1 that it is unsafe.
        categories: the same by the guard's own categories.
        mass: probability that the guard answers with a verdict at all; of one that is well asked
            it is near 1.
        num_tokens: of the prompts.
    """

    score: float
    categories: Mapping[str, float]
    mass: float
    num_tokens: int


class GuardFailed(Exception):
    """A guard could not judge, and why, with the status and code for the client."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status, self.code = status, "invalid_value" if status == 400 else "guard_failed"


class _Word(NamedTuple):
    """The token that a word begins with where it differs from others of its kind."""

    word: str
    token: int


class _Question(NamedTuple):
    """What follows a prompt, and the words that may follow that."""

    lead: Ids
    words: tuple[_Word, ...]


class Guard:
    """A model that judges conversations.

    Attributes:
        name: of the model.
    """

    def __init__(
        self,
        name: str,
        text: TextProcessor,
        engine: EngineClient,
        pool: FairThreadPool,
        family: GuardFamily,
    ) -> None:
        """Judge with a model of ``family``; ``pool`` renders prompts.

        Raises ValueError if the model's tokens do not tell its verdicts apart.
        """
        self.name = name
        self._text, self._engine, self._pool, self._family = text, engine, pool, family
        words = (*family.safe, *family.unsafe)
        self._verdict = self._question(family.lead, words)
        self._is_unsafe = {one.token: one.word in family.unsafe for one in self._verdict.words}
        self._category: _Question | None = None
        if not family.asks_each:
            written = [one.written for one in family.categories.values()]
            self._category = self._question(family.lead + family.behind, written)

    @property
    def categories(self) -> Mapping[str, Category]:
        """What it may find, by its own names."""
        return self._family.categories

    def trouble(self) -> str | None:
        """Return why it judges nothing any more, if so."""
        why = self._engine.trouble()
        return f"the guard {self.name}: {why}" if why else None

    def _question(self, lead: str, words: Iterable[str]) -> _Question:
        """Return the tokens that all of the texts begin with, and those in which they differ."""
        encode = partial(self._text.tokenizer.encode, parse_special=False, add_bos=False)
        texts = {word: encode(lead + word) for word in words}
        num_equal = 0
        for column in zip(*texts.values(), strict=False):
            if len(set(column)) > 1:
                break
            num_equal += 1
        firsts = {word: ids[num_equal : num_equal + 1] for word, ids in texts.items()}
        differ = {tuple(ids) for ids in firsts.values()}
        if len(differ) < len(texts) or () in differ:
            raise ValueError(
                f"{self.name} looks like {self._family.name}, but its tokenizer does not tell "
                f"apart {', '.join(texts)}: it cannot be a guard here"
            )
        common = next(iter(texts.values()))[:num_equal]
        return _Question(tuple(common), tuple(_Word(word, ids[0]) for word, ids in firsts.items()))

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Return the categories that names mean, or their numbers alone; none means all.

        Raises ValueError for a category that the guard does not know.
        """
        categories = list(self.categories)
        short = {one.split()[0]: one for one in categories if re.match(r"S\d+ ", one)}
        for name in names:
            if name not in (*categories, *short):
                has = ", ".join(categories)
                raise ValueError(f"{self.name} has no category {name!r:.80}; it has {has}")
        return [short.get(name, name) for name in names] or categories

    def score(self, verdict: Verdict, categories: Iterable[str]) -> float:
        """Return how likely a text is unsafe, in these categories alone; none means all."""
        if not categories:
            return verdict.score
        scores = [verdict.categories[name] for name in self.chosen(categories)]
        return max(scores) if self._family.asks_each else sum(scores)

    def check(self, rule: JudgeRule) -> None:
        """Raise ValueError if a rule asks what this guard cannot say."""
        if rule.examples:
            raise ValueError(f"{self.name} is a guard: write categories, and no examples")
        self.chosen(rule.categories)

    async def scores(
        self, messages: Messages, rules: Sequence[JudgeRule], caller: StreamCaller
    ) -> list[float]:
        """Return the score of a conversation's last message by each rule. Raises GuardFailed."""
        verdict = await self.judge(messages, caller)
        return [self.score(verdict, rule.categories) for rule in rules]

    async def judge(self, messages: Messages, caller: StreamCaller) -> Verdict:
        """Return the verdict on the last message of a conversation. Raises GuardFailed."""
        try:
            read = _conversation(messages)
            if self._family.reads_last:
                read = read[-2:] if read[-1]["role"] == "assistant" else read[-1:]
            if self._family.has_lines:
                return await self._judge_lines(read, caller)
            if self._family.asks_each:
                return await self._judge_each(read, caller)
            return await self._judge_once(read, caller)
        except (ValueError, StreamError) as error:
            status = 400 if isinstance(error, ValueError) else error.status
            raise GuardFailed(f"the guard {self.name} failed: {error}", status) from error

    async def _judge_each(self, messages: Messages, caller: StreamCaller) -> Verdict:
        categories = self._family.categories
        results = await asyncio.gather(
            *(self._unsafe(messages, one.variables, caller) for one in categories.values())
        )
        scores = {name: score for name, (score, _, _) in zip(categories, results, strict=True)}
        mass, num_tokens = min(one[1] for one in results), sum(len(one[2]) for one in results)
        return Verdict(max(scores.values()), scores, mass, num_tokens)

    async def _judge_lines(self, messages: Messages, caller: StreamCaller) -> Verdict:
        """Judge by a verdict of several lines: before each stands the likeliest of those above."""
        family, text, mass = self._family, "", 1.0
        prompt = await self._pool.run(partial(self._text.chat_template.render_ids, messages))
        scores = dict.fromkeys(family.categories, 0.0)
        last = list(scores)[-1 if messages[-1]["role"] == "assistant" else 0]
        for name, category in family.categories.items():
            text += category.written
            question = self._question(text, (*family.safe, *family.unsafe))
            logprobs = await self._logprobs(tuple(prompt), question, caller)
            total = log_sum(list(logprobs.values()))
            unsafe = [logprobs[one.token] for one in question.words if one.word in family.unsafe]
            scores[name], mass = math.exp(log_sum(unsafe) - total), min(mass, math.exp(total))
            if name == last:
                break
            text += max(question.words, key=lambda one: logprobs[one.token]).word + "\n"
        return Verdict(scores[last], scores, mass, len(prompt))

    async def _judge_once(self, messages: Messages, caller: StreamCaller) -> Verdict:
        score, mass, prompt = await self._unsafe(messages, {}, caller)
        assert self._category is not None
        logprobs = await self._logprobs(prompt, self._category, caller)
        total = log_sum(list(logprobs.values()))
        shares = (math.exp(logprobs[one.token] - total) for one in self._category.words)
        scores = {
            name: score * share for name, share in zip(self._family.categories, shares, strict=True)
        }
        return Verdict(score, scores, mass, len(prompt))

    async def _unsafe(
        self, messages: Messages, variables: Mapping[str, Any], caller: StreamCaller
    ) -> tuple[float, float, Ids]:
        """Return how likely a verdict is unsafe, and a verdict at all; and the rendered prompt."""
        render = partial(self._text.chat_template.render_ids, messages, **variables)
        prompt = self._opened(await self._pool.run(render))
        logprobs = await self._logprobs(prompt, self._verdict, caller)
        total = log_sum(list(logprobs.values()))
        unsafe = log_sum([value for token, value in logprobs.items() if self._is_unsafe[token]])
        return math.exp(unsafe - total), math.exp(total), prompt

    def _opened(self, prompt: Sequence[int]) -> Ids:
        """Return a prompt without the space at its end, if the guard is to write that."""
        end = len(prompt)
        while self._family.lead.isspace() and end and self._text.spell(prompt[end - 1]).isspace():
            end -= 1
        return tuple(prompt[:end])

    async def _logprobs(
        self, prompt: Ids, question: _Question, caller: StreamCaller
    ) -> dict[int, float]:
        tokens = [one.token for one in question.words]
        return await logprobs_of(self._engine, self._text, prompt + question.lead, tokens, caller)


def _conversation(messages: Messages) -> list[dict[str, str]]:
    """Return messages of user and assistant by turns, as guards were trained on.

    What neither wrote, such as a tool, counts as the user's: the model reads it.
    """
    turns: list[dict[str, str]] = []
    for message in messages:
        role = "assistant" if message.get("role") == "assistant" else "user"
        content = text_of(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append({"role": role, "content": content})
    if not turns or turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": ""})
    return turns


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says, its calls included."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    return f"{content}\n{json.dumps(calls, ensure_ascii=False)}" if calls else content
