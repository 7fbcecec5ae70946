"""From prompts to requests in an engine, and from its events to what users of the API get.

The steps run in the threads that wait for answers: whichever has nothing to read runs the next one,
for the requests of all threads. Ctrl-C is heard between steps, as half a commit would leave an
inconsistent state.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from threading import RLock
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from ridgeline.core.decoding.search import check_search
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Adapter, Request
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.step import Event, TokenLogprobs
from ridgeline.engine.adapters import Adapters, AnyLora
from ridgeline.engine.outputs import (
    Chunk,
    Logprob,
    RequestOutput,
    TokensBehindText,
    completions,
    refused,
)
from ridgeline.engine.setup.progress import count_bar
from ridgeline.engine.text_processor import TextProcessor, cut
from ridgeline.engine.vllm import frozen

Events = Generator[tuple[int, Event], None, None]  # which of the requests, and what of it
R = TypeVar("R")
_BEGUN = (-1, Event((-1, -1), None, "", None, None, None, None))
Chunks = Generator[Chunk, None, None]
Params = SamplingParams | Sequence[SamplingParams] | None
AnyLoras = AnyLora | Sequence[AnyLora]


class Interrupts:
    """Keeps SIGINT back from ``hold`` to ``release``, and otherwise passes it on at once.

    The handler stays from step to step: changing it twice in each step takes a twentieth of the
    time that a small model needs for one token (docs/results.md#kernels). May be entered again, and
    in any thread; it does something only in the main one, where signals arrive. One thread at a
    time may hold. A handler that other code sets meanwhile stays.
    """

    def __init__(self) -> None:
        """Do nothing yet."""
        self._num_entered = 0
        self._counting = threading.Lock()
        self._is_held = self._is_pending = False
        self._before: object = None  # whose handler it was; None while it is not ours

    def __enter__(self) -> None:
        with self._counting:
            self._num_entered += 1
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._receive) or signal.SIG_DFL

    def __exit__(self, *error: object) -> None:
        with self._counting:
            self._num_entered -= 1
        is_main = threading.current_thread() is threading.main_thread()
        if self._num_entered == 0 and is_main and self._before is not None:
            if signal.getsignal(signal.SIGINT) == self._receive:
                signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]
            self._before = None

    def hold(self) -> None:
        """From now on keep the signal back."""
        self._is_held = True

    def release(self) -> None:
        """Pass on a signal that came meanwhile, to the handler that is set now."""
        self._is_held = False
        if self._is_pending:
            self._is_pending = False
            signal.raise_signal(signal.SIGINT)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._is_pending = True
        elif callable(self._before):
            self._before(signum, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


class Loop:
    """An engine that several threads may ask at the same time: their requests share steps."""

    def __init__(self, engine: Engine) -> None:
        """Run ``engine``, which nothing else may step."""
        self.engine = engine
        self._interrupts = Interrupts()
        self._inboxes: dict[int, deque[Event]] = {}  # events by request, until they are taken
        # Around the engine and the inboxes. A forgotten stream may end in the thread that has it.
        self._lock = RLock()

    def submit(
        self,
        adds: Mapping[int, Callable[[], int]],
        refuse: Callable[[int, ValueError], None],
    ) -> dict[int, Request]:
        """Queue requests, each by what adds it to the engine; return those that are queued.

        ``refuse`` is told of one that can never run. If it raises, no request is queued.
        """
        requests: dict[int, Request] = {}
        with self._lock:
            try:
                for i, add in adds.items():
                    try:
                        requests[i] = self.engine.requests[add()]
                    except ValueError as error:
                        refuse(i, error)
            except BaseException:
                for request in requests.values():
                    self.engine.abort(request.id)
                raise
            self._inboxes |= {request.id: deque() for request in requests.values()}
        return requests

    def alone(self, work: Callable[[], R]) -> R:
        """Return what ``work`` returns, between two steps."""
        with self._lock:
            return work()

    def events(self, requests: Mapping[int, Request], load: Load) -> Events:
        """Run the engine until these requests have ended; others keep their events."""
        events = self._run(requests, load)
        next(events)  # begun, it ends its requests when closed or forgotten; else it would not
        return events

    def _run(self, requests: Mapping[int, Request], load: Load) -> Events:
        try:
            with self._interrupts:
                yield _BEGUN
                while self._await_events(requests, load):
                    for i, request in requests.items():
                        inbox = self._inboxes[request.id]
                        while inbox:
                            yield i, inbox.popleft()
        finally:
            with self._lock:
                for request in requests.values():
                    self.engine.abort(request.id)
                    del self._inboxes[request.id]

    def _await_events(self, requests: Mapping[int, Request], load: Load) -> bool:
        """Have events in an inbox of these requests; return False when all have ended."""
        with self._lock:
            if any(self._inboxes[request.id] for request in requests.values()):
                return True
            if all(request.is_finished for request in requests.values()):
                return False
            self._interrupts.hold()
            try:
                for event in self.engine.step(load):
                    self._inboxes[event.seq_id[0]].append(event)
            finally:
                self._interrupts.release()
            return True


class Submission(NamedTuple):
    """Prompts that were asked, by their places.

    Attributes:
        requests: those that are queued.
        errors: why the others can never run.
    """

    requests: dict[int, Request]
    errors: dict[int, str]


class Requests:
    """What asks an engine, and reads its events."""

    def __init__(
        self,
        text: TextProcessor,
        engine: Engine,
        adapters: Adapters,
        load: Callable[[Sequence[int], bytes], None] | None,
    ) -> None:
        """Ask ``engine``, which nothing else may step.

        ``load`` puts into its cache what is kept elsewhere of a prompt behind a root.
        """
        self._load = load
        self._text, self._engine, self._adapters = text, engine, adapters
        self._loop = Loop(engine)
        self.alone = self._loop.alone

    def submit(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        params: Sequence[SamplingParams],
        lora_request: AnyLoras,
        *,
        is_many: bool = True,
        is_stream: bool = False,
        pools: bool = False,
        return_errors: bool = False,
    ) -> Submission:
        """Queue all prompts, which ``encode`` makes token ids.

        If one can never run, none is queued, and with ``return_errors`` the others. Raises
        ValueError, which of ``is_many`` prompts says which one.
        """
        adapters = self._adapters.leases(lora_request, len(prompts))
        errors: dict[int, str] = {}
        adds: dict[int, Callable[[], int]] = {}

        def refuse(i: int, error: ValueError) -> None:
            if not return_errors:
                raise ValueError(f"prompt {i}: {error}") if is_many else error
            errors[i] = str(error)

        for i, (prompt, sampling, adapter) in enumerate(
            zip(prompts, params, adapters, strict=True)
        ):
            try:
                if sampling.pool and not pools:
                    raise ValueError(f"pool is {sampling.pool!r}: use LLM.embed for embeddings")
                check_search(sampling, is_stream=is_stream)
                adds[i] = self._add(encode, prompt, sampling, adapter)
            except ValueError as error:
                refuse(i, error)
        return Submission(self._loop.submit(adds, refuse), errors)

    def _add(
        self,
        encode: Callable[[Any], list[int]],
        prompt: Any,
        sampling: SamplingParams,
        adapter: Adapter,
    ) -> Callable[[], int]:
        """Return what adds a request to the engine. Raises ValueError."""
        self._text.check_task(sampling)
        sampling.validate_ids(self._text.vocab_size)
        ids = cut(encode(prompt), sampling, self._engine.max_model_len)
        sampling = self._with_all(sampling)
        return partial(
            self._enter,
            ids,
            sampling,
            new_text=partial(self._text.new_text, ids, sampling),
            adapter=adapter,
            prediction=self._text.encode_prediction(sampling),
            new_constraint=self._text.new_constraint(sampling),
            token_rules=self._text.lexicon.rules(sampling),
        )

    def _enter(self, ids: tuple[int, ...], sampling: SamplingParams, **options: Any) -> int:
        """Add a request to the engine, behind what is kept of its prompt elsewhere."""
        if self._load and sampling.prompt_logprobs is None:  # else all of it is computed
            self._load(ids, options["adapter"].digest)
        return self._engine.add(ids, sampling, **options)

    def _with_all(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with as many logprobs as there are tokens, where that is less."""
        names, size = ("logprobs", "prompt_logprobs"), self._text.vocab_size
        counts = {name: getattr(sampling, name) for name in names}
        changes: dict[str, Any] = {
            name: size for name, k in counts.items() if k is not None and not 0 <= k <= size
        }
        return replace(sampling, **changes) if changes else sampling

    def params_of_each(self, sampling_params: Params, num_prompts: int) -> list[SamplingParams]:
        """Return the parameters of each prompt, given one for all, one for each, or none.

        What is changed afterwards does not reach them. Raises ValueError if there is not one for
        each, one is something else, or its values contradict each other.
        """
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self._text.default_params()] * num_prompts
        else:
            params = list(sampling_params)
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling_params")
        for sampling in params:
            if not isinstance(sampling, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, not {sampling!r:.80}")
        return [frozen(sampling) for sampling in params]

    def chunks(self, requests: Mapping[int, Request], load: Load) -> Chunks:
        """Run the engine until these requests have ended."""
        return self._read(requests, self._loop.events(requests, load), load)

    def _read(self, requests: Mapping[int, Request], events: Events, load: Load) -> Chunks:
        behind = TokensBehindText(self._new_plain_text)
        with closing(events):
            for i, event in events:
                ready = behind.take(requests[i], event) if load.is_read else (event,)
                yield from (self._chunk(i, one) for one in ready)

    def _new_plain_text(self, request: Request) -> TextStream:
        return self._text.new_text(request.prompt, replace(request.params, stop=()))

    def _chunk(self, prompt_index: int, event: Event) -> Chunk:
        return Chunk(
            prompt_index,
            event.seq_id[1],
            event.text,
            event.token,
            self._logprobs(event.logprobs) if event.logprobs else None,
            event.finish_reason and event.finish_reason.value,
            event.stop_reason,
            event.error,
            event.vector,
        )

    def outputs(
        self, submission: Submission, texts: Sequence[str | None], progress: bool | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the outputs of prompts that were given as ``texts``, each when it is complete."""
        chunks = self.chunks(submission.requests, Load(is_read=False))
        return self._collected(submission, texts, chunks, progress)

    def _collected(
        self, batch: Submission, texts: Sequence[str | None], chunks: Chunks, progress: bool | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        for i, error in batch.errors.items():
            yield i, refused(texts[i], error)
        requests = batch.requests
        counts = {i: request.params.num_answers for i, request in requests.items()}
        chunks_of: dict[int, list[list[Chunk]]] = {
            i: [[] for _ in range(counts[i])] for i in counts
        }
        ended, total = 0, sum(counts.values())
        with closing(chunks), progress_bar("Answering", progress, len(texts)) as report:
            report(0, total)
            for chunk in chunks:
                i = chunk.prompt_index
                chunks_of[i][chunk.index].append(chunk)
                if chunk.finish_reason:
                    ended, counts[i] = ended + 1, counts[i] - 1
                    report(ended, total)
                    if not counts[i]:
                        yield i, self._output(requests[i], texts[i], chunks_of.pop(i))
        for i, answers in chunks_of.items():  # one that failed before its answers were several
            yield i, self._output(requests[i], texts[i], answers)

    def _output(
        self, request: Request, text: str | None, answers: list[list[Chunk]]
    ) -> RequestOutput:
        return RequestOutput(
            request.id,
            text,
            list(request.prompt),
            self._prompt_logprobs(request),
            completions(request.params, [chunks for chunks in answers if chunks]),
            request.num_cached_tokens,
            request.num_draft_tokens,
            request.num_accepted_tokens,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {
            token: Logprob(logprob, rank, self._text.spell(token))
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        }
        own = Logprob(entry.logprob, entry.rank, self._text.spell(entry.token))
        return {entry.token: own} | ranked

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        logprobs = request.prompt_logprobs
        return [
            self._logprobs(logprobs[i]) if i in logprobs else None
            for i in range(len(request.prompt))
        ]


def progress_bar(
    label: str, progress: bool | None, num_prompts: int
) -> AbstractContextManager[Callable[[int, int], None]]:
    """Return a bar, as ``progress`` says; None shows one where there are several prompts."""
    show = num_prompts > 1 if progress is None else progress
    return count_bar(label) if show else nullcontext(lambda done, total: None)
