"""What the server asks of its engine, and what it reads of it: values alone, never its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ridgeline.core.records import EngineRecord, Record
from ridgeline.foresight.simulator.forecast import State
from ridgeline.serve.engine.request_stream import RequestStream


class EngineSnapshot(NamedTuple):
    """What an engine is at between two steps, in lengths: what a forecast begins with.

    Attributes:
        now_s: on the engine's clock.
        state: of its requests.
        numbers: of these requests, by the stream that they belong to.
        waiting: which prompts of which streams wait before the engine, in the order of arrival.
    """

    now_s: float
    state: State
    numbers: Mapping[RequestStream, Sequence[int]]
    waiting: Sequence[tuple[RequestStream, int]]


class EngineClient(Protocol):
    """An engine that runs beside the event loop. All is to be called on the loop, unless it says
    otherwise.

    Attributes:
        settings: how it is set up.
        listeners: are called with each record, in the engine's thread.
        step_timeout_s: after which a step hangs.
        step_began_s: while a step is under way, when it began.
        before_step: is called before each step, in the engine's thread.
        on_submit: is told of each stream that is submitted.
    """

    settings: EngineRecord
    listeners: list[Callable[[Record], None]]
    step_timeout_s: float
    step_began_s: float | None
    before_step: Callable[[], object] | None
    on_submit: Callable[[RequestStream], None]

    @property
    def num_streams(self) -> int:
        """Requests that are not over."""

    @property
    def num_queued(self) -> int:
        """Prompts that wait before the engine."""

    def trouble(self) -> str | None:
        """Return why the engine takes no requests now, if so."""

    def submit(self, stream: RequestStream) -> None:
        """Queue all prompts of a stream. Raises StreamError if the engine takes none."""

    def abandon(self, stream: RequestStream, why: Exception) -> None:
        """End a stream before its time; its requests end before the next step."""

    def permit(self, num_prompts: float) -> None:
        """Let this many of the prompts that wait enter from now on; inf lets all."""

    def between_steps(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called in the engine's thread, where it may ask for ``snapshot``.

        A stream that was submitted before waits or is in the engine by then, unless it is over.
        """

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Have ``function`` called on the loop. Any thread may call."""

    def snapshot(self) -> EngineSnapshot:
        """Return what the engine is at. To be called in its thread alone, between two steps."""

    def view(self, owner: str | None = None) -> dict[str, Any]:
        """Return ids and numbers for a page, as JSON; of one owner's requests, if one is given.

        To be called in the engine's thread alone, between two steps.
        """

    def num_cached(self, stream: RequestStream, index: int) -> int:
        """Return how many tokens of a stream's prompt the prefix cache has now."""

    def tenant_of(self, request_id: int) -> str:
        """Return whose request this is; for listeners, and until the step that ends it is over."""
