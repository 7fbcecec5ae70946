"""Which models can judge: guards of a known family, and encoders for topics.

An encoder judges by its vectors: how near a text is to examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Event
from ridgeline.engine.outputs import cosine
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import (
    ClientGone,
    RequestStream,
    StreamCaller,
    StreamError,
    StreamReader,
)
from ridgeline.serve.http.fair_pool import FairThreadPool
from ridgeline.trust.guards.families import FAMILIES, family_of
from ridgeline.trust.guards.guard import Guard, GuardFailed, text_of
from ridgeline.trust.guards.verdict import Ids
from ridgeline.trust.rules.file import JudgeRule

Vector = tuple[float, ...]
_WILDGUARD = Path(__file__).with_name("wildguard.jinja")


class TopicEncoder:
    """A model that makes vectors.

    Attributes:
        name: of the model.
        categories: it has none of its own.
    """

    categories: Mapping[str, Any] = {}

    def __init__(
        self, name: str, text: TextProcessor, engine: EngineClient, pool: FairThreadPool
    ) -> None:
        """Compare with this model's vectors; ``pool`` tokenises."""
        self.name = name
        self._text, self._engine, self._pool = text, engine, pool
        self._max_model_len = engine.settings.max_model_len
        self._of_examples: dict[str, Vector] = {}

    def trouble(self) -> str | None:
        """Return why it makes no vectors any more, if so."""
        why = self._engine.trouble()
        return f"the encoder {self.name}: {why}" if why else None

    def check(self, rule: JudgeRule) -> None:
        """Raise ValueError if a rule asks what no encoder can say."""
        if rule.categories or not rule.examples:
            raise ValueError(f"{self.name} makes vectors: write examples, and no categories")

    async def scores(
        self,
        messages: Sequence[Mapping[str, Any]],
        rules: Sequence[JudgeRule],
        caller: StreamCaller,
    ) -> list[float]:
        """Return for each rule the greatest cosine of the last message and one of its examples.

        Of a text that is longer than the model reads the nearest part counts. Raises GuardFailed.
        """
        try:
            wanted = {one for rule in rules for _, texts in rule.examples for one in texts}
            missing = sorted(wanted - self._of_examples.keys())
            parts = await self._pool.run(partial(self._parts, text_of(messages[-1])))
            encoded = await self._pool.run(lambda: [self._parts(one)[0] for one in missing])
            vectors = await self._vectors([*encoded, *parts], caller)
        except (ValueError, StreamError) as error:
            raise GuardFailed(f"the encoder {self.name} failed: {error}", 503) from error
        self._of_examples |= zip(missing, vectors, strict=False)
        own = vectors[len(missing) :]
        return [
            self._nearest(own, (one for _, some in rule.examples for one in some)) for rule in rules
        ]

    def _nearest(self, vectors: Sequence[Vector], examples: Iterable[str]) -> float:
        return max(cosine(one, self._of_examples[text]) for text in examples for one in vectors)

    def _parts(self, text: str) -> list[Ids]:
        """Return the token ids of a text, in parts that the model can read."""
        ids = self._text.encode(text)
        if len(ids) <= self._max_model_len or len(text) < 2:
            return [tuple(ids)]
        middle = len(text) // 2
        return self._parts(text[:middle]) + self._parts(text[middle:])

    async def _vectors(self, prompts: list[Ids], caller: StreamCaller) -> list[Vector]:
        stream = RequestStream(
            prompts,
            SamplingParams(pool=self._text.pooling),
            self._text.new_text,
            caller,
            StreamReader(is_growing=False),
        )
        vectors: dict[int, Vector] = {}
        self._engine.submit(stream)
        try:
            while batch := await stream.events():
                for index, event in batch:
                    if isinstance(event, Event) and event.vector is not None:
                        vectors[index] = event.vector
        finally:
            self._engine.abandon(stream, ClientGone())
        if len(vectors) < len(prompts):
            raise StreamError("the model made no vector")
        return [vectors[index] for index in range(len(prompts))]


Judge = Guard | TopicEncoder


def judge_of(
    name: str, text: TextProcessor, engine: EngineClient, pool: FairThreadPool
) -> Judge | None:
    """Return a model as what judges, None if it is none. Raises ValueError as ``Guard`` does."""
    if family := family_of(text.chat_template.source):
        return Guard(name, text, engine, pool, family)
    is_encoder = not text.has_head and not text.has_scores
    return TopicEncoder(name, text, engine, pool) if is_encoder else None


def known_judge(
    name: str, text: TextProcessor, engine: EngineClient, pool: FairThreadPool
) -> Judge:
    """Return a model as what it must be. Raises ValueError if it cannot judge.

    WildGuard is known by its name, as its files have no template; the prompts are then ours.
    """
    if "wildguard" in name.lower() and family_of(text.chat_template.source) is None:
        text.use_chat_template(_WILDGUARD)
    judge = judge_of(name, text, engine, pool)
    if judge is None:
        names = ", ".join(family.name for family in FAMILIES)
        raise ValueError(
            f"--guard {name} is neither an encoder nor a known guard model, by its chat template: "
            f"use one of {names}"
        )
    return judge
