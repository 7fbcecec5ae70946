"""What a server is given besides a model: what reads requests, and what their answers pass.

The events of an answer pass a row: what holds them back (``engine.request_stream.Hold``), then what
another server began (``Earlier``), each ``Stage``, and as text the ``AnswerFilter``. Nothing here
knows what any of them is for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import TokenLogprobs
from ridgeline.serve.answer.choice_state import ChoiceFilter, ChoiceState
from ridgeline.serve.answer.schemas import StageFields
from ridgeline.serve.engine.request_stream import RequestStream, StreamEvent
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_state import RequestState
from ridgeline.serve.http.web_server import FrontApp

Value = TypeVar("Value")
Take = Callable[[StreamEvent], list[bytes]]


class Stage(Protocol):
    """Sees each event of the answers to a request before it is written."""

    def take(self, event: StreamEvent) -> Sequence[StreamEvent]:
        """Take an event; return those that go on. Raises StreamError."""

    def end(self, texts: Mapping[str, str]) -> StageFields:
        """Return fields for the end of the answers, which show ``texts``, by their places."""


class AnswerFilter(Protocol):
    """Lets out of the answers to a request what they may say."""

    def choice(self, prompt: int) -> ChoiceFilter | None:
        """Return what lets out one more answer to a prompt, None if it may say all."""

    def shown(self, value: Any) -> Any:
        """Return what an answer repeats of its request, as it may be shown."""

    def may_show(self, prompt: int) -> bool:
        """Whether an answer may tell of all tokens of a prompt."""

    def visible_of_prompt(self, entries: list[TokenLogprobs | int]) -> list[TokenLogprobs | int]:
        """Return what may be told of a prompt's tokens; a bare token stands for nothing."""


class AnswerRow(NamedTuple):
    """What the events of a request's answers pass; most have nothing of it."""

    stages: tuple[Stage, ...] = ()
    filter: AnswerFilter | None = None


class Earlier(Protocol):
    """What another server has shown of an answer, and what is noted for the one after this."""

    @property
    def goes_on(self) -> bool:
        """Whether another server began the answer."""

    @property
    def only_reads(self) -> bool:
        """Whether this server only reads what was shown, and ``has_read`` whether it has."""

    @property
    def has_read(self) -> bool:
        """Whether all was read that is to be."""

    def begin(self, stream: RequestStream, fingerprint: str) -> list[StreamEvent]:
        """Let a stream go on there; return the events that were shown. Raises StreamError."""

    def frames(self, one: StreamEvent, take: Take) -> list[bytes]:
        """Return what an event adds to the answer, as ``take`` writes it, and note the event."""

    def notes(self) -> bytes:
        """Return what was noted since the last call."""


def behind(stages: Sequence[Stage], take: Take) -> Take:
    """Return what lets an event pass all stages, and then has it taken."""
    if not stages:
        return take

    def take_what_goes_on(event: StreamEvent) -> list[bytes]:
        events: Any = (event,)
        for stage in stages:
            events = chain.from_iterable(map(stage.take, events))
        return [part for one in events for part in take(one)]

    return take_what_goes_on


class Screen(Protocol):
    """Reads what one request brings before work begins, and raises ApiError for what may not be."""

    @property
    def digest(self) -> bytes:
        """What else its answers hang on."""

    @property
    def checks_ids(self) -> bool:
        """Whether prompts are also read as the text of their token ids."""

    def check_model(self, model: str) -> None:
        """Check a model's name."""

    def check_features(self, used: Collection[str]) -> None:
        """Check by their names what a request uses."""

    def params_of(
        self, body: Any, make: Callable[..., SamplingParams], vocab_size: int
    ) -> SamplingParams:
        """Return the parameters of a request for an answer, within what may be."""

    def read(self, value: Value, param: str) -> Value:
        """Return what a field brings, a text or JSON, as a model may read it."""

    def check_read(self, text: str, param: str) -> None:
        """Check a text of a field that cannot be changed any more."""

    def shown(self, value: Value) -> Value:
        """Return what an answer repeats of the request, as it may be shown."""


class Answers(Protocol):
    """The answers to one request, while they grow."""

    @property
    def choices(self) -> Sequence[ChoiceState]:
        """Their parts that are known and not shown yet."""

    def new_id(self, prefix: str, *place: int) -> str:
        """Return an id for a place in the answer, which follows from the request alone."""


class PreparedRequest(NamedTuple):
    """What is to be known of a request that was prepared.

    Attributes:
        body: what it asks.
        model: that it is asked of, and ``fingerprint`` what its answers hang on.
        params: of the engine.
        answers: that are to come.
    """

    body: BaseModel
    model: str
    fingerprint: str | None = None
    params: SamplingParams | None = None
    answers: Answers | None = None


class Observer(Protocol):
    """Is told of each request: what it asks, and how it has ended."""

    @property
    def num_lost(self) -> int:
        """How many requests could not be noted."""

    def watch(self, edge: FrontApp) -> FrontApp:
        """Return what stands around an edge, and sees all requests that come over HTTP."""

    def begin(self, state: RequestState) -> None:
        """Take a request that comes by another way; ``state`` is its own until its end."""

    def take(self, state: RequestState, request: PreparedRequest) -> None:
        """Take what a request asks for, before it is answered."""

    async def finished(self, state: RequestState, line: Mapping[str, Any]) -> ApiError | None:
        """Take what the server's log says of a request; return why it may not end, if so."""

    def loss(self) -> str | None:
        """Return what is to be said of requests that could not be noted, if there are any."""
