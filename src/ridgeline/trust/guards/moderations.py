"""POST /v1/moderations: OpenAI's judgement of texts, by a guard model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request
from pydantic import Discriminator, Tag

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.protocol import EACH
from ridgeline.serve.answer.schemas import ERRORS, ClosedDict
from ridgeline.serve.answer.stages import PreparedRequest
from ridgeline.serve.engine.request_stream import StreamCaller
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import RequestModel, typed
from ridgeline.serve.http.request_state import client_left
from ridgeline.serve.model_server import ModelServer
from ridgeline.serve.observe.spans import parent_of
from ridgeline.trust.guards.guard_models import GuardModels

if TYPE_CHECKING:  # imported only where a guard judges
    from ridgeline.trust.guards.guard import Guard, Verdict

AT = 0.5  # from which score on a text is flagged

Result = TypeVar("Result")


class ModerationPart(RequestModel):
    """A part of an input."""

    extras = fields.ANY

    type: Literal["text"]
    text: str


_Part = Annotated[ModerationPart, typed(("text",), "only text is read: this guard sees no images")]


def _kind_of_input(value: Any) -> str:
    if not isinstance(value, list):
        return "[text]"
    return "[parts]" if value and isinstance(value[0], dict | ModerationPart) else "[texts]"


class ModerationsRequest(RequestModel):
    """POST /v1/moderations."""

    extras = fields.ANY

    input: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[list[str], EACH, Tag("[texts]")]
        | Annotated[list[_Part], EACH, Tag("[parts]")],
        Discriminator(_kind_of_input),
    ]
    model: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts to judge; parts are one."""
        if isinstance(self.input, str):
            return [self.input]
        parts = [one.text for one in self.input if isinstance(one, ModerationPart)]
        return ["\n".join(parts)] if parts else [str(one) for one in self.input]


class GuardReport(ClosedDict):
    """What the guard says in its own words.

    ``score`` is the probability that the text is unsafe, ``categories`` the same by the guard's own
    categories, and ``mass`` the probability that it answers with a verdict at all.
    """

    score: float
    categories: dict[str, float]
    mass: float


class Moderation(ClosedDict):
    """The judgement of a text. Categories that the guard does not know have no input types."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]
    ridgeline: GuardReport


class Moderated(ClosedDict):
    """What POST /v1/moderations returns."""

    id: str
    model: str
    results: list[Moderation]


def add_moderations(app: FastAPI, server: ModelServer, guards: GuardModels) -> None:
    """Add the route to an application; ``guards`` are those of its server."""

    @app.post("/v1/moderations", responses=ERRORS)
    async def moderations(body: ModerationsRequest, request: Request) -> Moderated:
        """Say of texts how likely they are unsafe, by a guard model's logits."""
        server.check_running()
        guard = guards.named(body.model)
        texts = body.texts
        server.check_count(len(texts), "input")
        rules = server.stages.screen()
        server.note(request, PreparedRequest(body, guard.name))
        if rules:
            rules.check_model(guard.name)
            rules.check_features(["moderations"])
            texts = rules.read(texts, "input")
        verdicts = await _while_read(request, _judged(server, guard, request, texts))
        return _answer(guard, request, verdicts)


async def _judged(
    server: ModelServer, guard: Guard, request: Request, texts: list[str]
) -> list[Verdict]:
    from ridgeline.trust.guards.guard import GuardFailed

    state = request.state
    parent = parent_of(request.headers)
    caller = StreamCaller(
        state.tenant,
        state.request_id,
        server.cache_root(state.tenant),
        state.is_background,
        partial(server.note_end, state.tenant, parent, "moderations", guard.name),
    )
    calls = (guard.judge([{"role": "user", "content": text}], caller) for text in texts)
    try:
        verdicts = await asyncio.gather(*calls)
    except GuardFailed as error:
        raise ApiError(error.status, str(error), param="input", code=error.code) from None
    num_tokens = sum(verdict.num_tokens for verdict in verdicts)
    server.limits.charge(state.tenant, num_tokens)
    state.note["prompt_tokens"] = num_tokens
    return verdicts


def _answer(guard: Guard, request: Request, verdicts: list[Verdict]) -> Moderated:
    return {
        "id": f"modr-{request.state.request_id}",
        "model": guard.name,
        "results": [_result(guard, verdict) for verdict in verdicts],
    }


def _result(guard: Guard, verdict: Verdict) -> Moderation:
    """Return OpenAI's object. What is flagged has its likeliest category flagged at least."""
    from ridgeline.trust.guards.families import OPENAI_CATEGORIES

    is_flagged, scores = verdict.score >= AT, verdict.categories
    likeliest = max(scores, key=lambda name: scores[name])
    flagged = {name for name in scores if scores[name] >= AT or (is_flagged and name == likeliest)}
    own = {
        category: [name for name, one in guard.categories.items() if category in one.openai]
        for category in OPENAI_CATEGORIES
    }
    return {
        "flagged": is_flagged,
        "categories": {c: not flagged.isdisjoint(names) for c, names in own.items()},
        "category_scores": {
            c: max((scores[name] for name in names), default=0.0) for c, names in own.items()
        },
        "category_applied_input_types": {c: ["text"] if names else [] for c, names in own.items()},
        "ridgeline": {
            "score": verdict.score,
            "categories": dict(scores),
            "mass": verdict.mass,
        },
    }


async def _while_read(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what work returns; end it if the client leaves first."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(client_left(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client left")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
