"""LLM: the Python API. Loads a model, wires the engine, and turns prompts into answers.

It decides nothing about scheduling and computes nothing: prompts become token ids, the engine runs
step by step in the caller's thread, events become outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from ridgeline.api.adapters import Adapters, LoraWish, read_adapters, room_for
from ridgeline.api.interrupts import Interrupts
from ridgeline.api.memory import ProcessMemory, Snapshot, process_memory
from ridgeline.api.outputs import (
    Chunk,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    TokensBehindText,
    completions,
)
from ridgeline.api.text_side import Message, Prompt, TextProcessor, is_chat, is_list, is_one_prompt
from ridgeline.api.vectors import cosine, paired, shaped
from ridgeline.backends.interface import BackendRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.step import Event, TokenLogprobs
from ridgeline.decoding.search import check_search
from ridgeline.decoding.text import TextStream
from ridgeline.engine_setup.build import new_engine, new_runner
from ridgeline.engine_setup.drafting import SmallModel, find_small_model, new_speculation
from ridgeline.engine_setup.locate import locate
from ridgeline.engine_setup.options import Options, parse_bytes
from ridgeline.engine_setup.progress import bytes_bar, count_bar, say
from ridgeline.engine_setup.remarks.differences import start_lines
from ridgeline.engine_setup.resolve import resolve
from ridgeline.foresight.trace.writer import TraceWriter
from ridgeline.machine import give_back, memory_in_use
from ridgeline.models.adapters import Base
from ridgeline.models.checkpoint import load_checkpoint
from ridgeline.models.summary import summarise
from ridgeline.text.tokenizers.tokenizer import Tokenizer

Chunks = Generator[Chunk, None, None]

_BEGUN = Chunk(0, 0, "", None, None, None, None, None)


class LLM:
    """A loaded model that answers prompts.

    Prompts are text or lists of token ids. Any number may be given at once; they run together.
    Several threads may ask at the same time: their requests share steps.
    """

    def __init__(self, model: str | Path = "smollm2", **options: Any) -> None:
        """Load ``model``, pulling it first if it is a short name or a hub id that is not here.

        Args:
            model: a short name, a .gguf file, a Hugging Face directory, or a hub id.
            **options: as on the command line, with underscores
                (``engine_setup.options.Options``); contrastive search is enabled unless said.

        Raises:
            ValueError: no such model, an option out of range, or not enough memory.
            ModelFileError: the model's files are damaged or not supported (a ValueError too).
        """
        self._before, in_use = Snapshot.now(), memory_in_use()
        wishes = Options(**{"enable_contrastive_search": True} | options)
        located = locate(str(model))
        checkpoint = load_checkpoint(located.path)
        text_bytes = memory_in_use() - in_use
        self.path = checkpoint.path
        self.arch = checkpoint.arch
        self.summary = summarise(checkpoint)
        small = find_small_model(wishes, checkpoint)
        taken_bytes = small.config.total_bytes if small else 0
        lora = read_adapters(wishes.adapters, Base.of(checkpoint))
        max_lora_rank, lora_bytes = room_for(wishes, [weights for _, weights in lora.values()])
        self.config = resolve(
            wishes, checkpoint, taken_bytes=taken_bytes + lora_bytes, max_lora_rank=max_lora_rank
        )
        for line in start_lines(str(model), checkpoint, self.config):
            say(line)
        self.trace = TraceWriter(Path(wishes.trace)) if wishes.trace else None
        with bytes_bar(f"Loading {self.path.name}") as report:
            self.runner = new_runner(self.config, checkpoint, report)
        limit = parse_bytes(wishes.lora_memory, "--lora-memory") if wishes.lora_memory else None
        self.adapters = Adapters(
            Base.of(checkpoint),
            self.runner.add_adapter,
            max_lora_rank=max_lora_rank,
            limit_bytes=limit,
        )
        for name, (path, weights) in lora.items():
            self.adapters.load(name, path, weights)
        self.adapters.settle()
        self._drafting = _small_runner(small) if small else None
        in_use = memory_in_use()
        # Behind the runner, which has asked for its weights: the disk works meanwhile.
        self.text = TextProcessor(checkpoint, located.sampling)
        text_bytes += memory_in_use() - in_use
        self._text_bytes = max(0, text_bytes)
        listeners = [self.trace] if self.trace else []
        speculation = new_speculation(self.config.speculative, small, self._drafting)
        self.engine = new_engine(self.config, checkpoint, self.runner, listeners, speculation)
        self._interrupts = Interrupts()
        self._inboxes: dict[int, deque[Event]] = {}  # events by request, until they are taken
        # Around the engine and the inboxes. A forgotten stream may end in the thread that has it.
        self._lock = RLock()
        give_back()

    def default_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling that the model's files or its card recommend, with ``changes``."""
        return self.text.default_params(**changes)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids, and back."""
        return self.text.tokenizer

    def memory(self) -> ProcessMemory:
        """Return what takes this process's memory now, line by line. Any thread may call."""
        parts = dict(self.runner.memory())
        if self._drafting:
            own = self._drafting.memory()
            parts |= {f"draft_model.{name}": part for name, part in own.items()}
        grown = {"text": self._text_bytes, "text.tokenizers.tokenizer": self.text.library_bytes}
        return process_memory(parts, grown, self.engine, self._before)

    # --- answers -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        suffix: str | None = None,
        lora_request: LoraWish | Sequence[LoraWish] = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, and return them in order.

        Args:
            prompts: text, token ids, or a list of either.
            sampling_params: one for all or one for each; None takes the model's defaults.
            suffix: text that follows the answers: they fill the middle between a prompt and this.
                For models that were trained for it.
            lora_request: the name of an adapter that was loaded (``lora``), or vLLM's
                ``LoRARequest``, which loads it; one for all prompts or one for each.
            progress: show a bar; None shows one when there are several prompts.

        Raises:
            ValueError: a prompt or its parameters can never run; nothing was computed then.
        """
        many: Sequence[Prompt] = [prompts] if is_one_prompt(prompts) else prompts  # type: ignore[assignment, list-item]
        if not suffix:
            encoded = [self.text.encode(prompt) for prompt in many]
            return self._collect(encoded, many, sampling_params, progress, lora_request)
        encoded = [self.text.encode_infill(prompt, suffix).ids for prompt in many]
        params = self._params_of_each(sampling_params, len(many))
        params = [self.text.ending_at_fim(sampling) for sampling in params]
        return self._collect(encoded, many, params, progress, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraWish | Sequence[LoraWish] = None,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; ``template`` is passed to the chat template.

        Raises:
            ValueError: as in ``generate``; or the model has no chat template, or it refuses.
        """
        one = not is_list(messages) or is_chat(messages)
        many: Sequence[Any] = [messages] if one else messages
        self.text.check_task(SamplingParams())
        prompts = [self.text.chat_template.render_ids(chat, **template) for chat in many]
        texts = [None] * len(prompts)
        return self._collect(prompts, texts, sampling_params, progress, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        progress: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of one text or many, in order.

        A text's vector depends on nothing but the text: bit for bit, whatever runs beside it.

        Args:
            prompts: text, token ids, or a list of either.
            dimensions: how many first values to keep; None keeps all.
            normalize: scale vectors to length 1; None does what the model's files say, else true.
            progress: show a bar; None shows one when there are several texts.

        Raises:
            ValueError: a text can never run, or has fewer dimensions.
            RuntimeError: the model made no vector of a text; the message says why.
        """
        many: Sequence[Prompt] = [prompts] if is_one_prompt(prompts) else prompts  # type: ignore[assignment, list-item]
        if dimensions is not None:
            shaped((0.0,) * self.text.vector_size, dimensions)  # before work begins
        self.text.check_vectors()
        encoded = [self.text.encode_whole(prompt) for prompt in many]
        requests, vectors = self._vectors(encoded, progress)
        scales = self.text.normalises if normalize is None else normalize
        return [
            EmbeddingRequestOutput(
                request.id,
                list(request.prompt),
                EmbeddingOutput(shaped(vectors[i], dimensions, normalises=scales)),
                request.num_cached_tokens,
            )
            for i, request in enumerate(requests)
        ]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], progress: bool | None = None
    ) -> list[float]:
        """Return how near texts are to each other: one to many, or each to the other's.

        A model with a classifier reads each pair together (a cross-encoder), and gives its score;
        of any other model it is the cosine of the texts' vectors.

        Raises:
            ValueError: the numbers of texts do not fit, or a text can never run.
            RuntimeError: the model failed on a text; the message says why.
        """
        ones, others = ([x] if isinstance(x, str) else list(x) for x in (text_1, text_2))
        pairs = paired(ones, others)
        if self.text.has_scores:
            encoded = [self.text.encode_pair(*pair) for pair in pairs]
            _, scores = self._vectors(encoded, progress)
            return [scores[i][0] for i in range(len(pairs))]
        texts = list(dict.fromkeys((*ones, *others)))
        encoded = [self.text.encode_whole(text) for text in texts]
        _, rows = self._vectors(encoded, progress)
        vectors = {text: rows[i] for i, text in enumerate(texts)}
        return [cosine(vectors[one], vectors[other]) for one, other in pairs]

    def _vectors(
        self, prompts: Sequence[Sequence[int]], progress: bool | None
    ) -> tuple[list[Request], dict[int, tuple[float, ...]]]:
        """Return the requests and the vectors of prompts."""
        requests = self._submit(prompts, SamplingParams(pool=self.text.pooling), None, pools=True)
        vectors: dict[int, tuple[float, ...]] = {}
        with (
            closing(self._chunks(requests, Load(is_read=False))) as chunks,
            _bar("Embedding", progress, len(prompts)) as report,
        ):
            for chunk in chunks:
                if chunk.vector is None:
                    raise RuntimeError(f"text {chunk.prompt_index}: {chunk.error}")
                vectors[chunk.prompt_index] = chunk.vector
                report(len(vectors), len(prompts))
        return requests, vectors

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoraWish = None,
    ) -> Chunks:
        """Yield the answer to a prompt or a conversation as it grows; ``close()`` stops it."""
        return self.stream_many([prompt], sampling_params, lora_request=lora_request)

    def stream_many(
        self,
        prompts: Sequence[Prompt | Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoraWish | Sequence[LoraWish] = None,
    ) -> Chunks:
        """Yield the answers to several prompts, which run side by side, as they grow.

        Raises:
            ValueError: as in ``generate``; or answers are to be chosen when all are complete.
        """
        encoded = [
            self.text.chat_template.render_ids(prompt)  # type: ignore[arg-type]
            if is_chat(prompt)
            else self.text.encode(prompt)  # type: ignore[arg-type]
            for prompt in prompts
        ]
        requests = self._submit(encoded, sampling_params, lora_request, is_stream=True)
        return self._chunks(requests, Load())

    # --- the loop ------------------------------------------------------------------------------

    def _submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoraWish | Sequence[LoraWish],
        *,
        is_stream: bool = False,
        pools: bool = False,
    ) -> list[Request]:
        """Queue all prompts, or none if one of them can never run."""
        params = self._params_of_each(sampling_params, len(prompts))
        adapters = self.adapters.leases(lora_request, len(prompts))
        adds: list[partial[int]] = []
        for prompt, sampling, adapter in zip(prompts, params, adapters, strict=True):
            self.text.check_task(sampling)
            if sampling.pool and not pools:
                raise ValueError(f"pool is {sampling.pool!r}: for vectors there is LLM.embed")
            sampling.validate_ids(self.arch.vocab_size)
            check_search(sampling, is_stream=is_stream)
            ids = tuple(prompt)
            add = partial(
                self.engine.add,
                ids,
                sampling,
                new_text=partial(self.text.new_text, ids, sampling),
                adapter=adapter,
                prediction=self.text.encode_prediction(sampling),
                new_constraint=self.text.new_constraint(sampling),
                token_rules=self.text.lexicon.rules(sampling),
            )
            adds.append(add)
        requests: list[Request] = []
        with self._lock:
            try:
                requests.extend(self.engine.requests[add()] for add in adds)
            except BaseException:
                for request in requests:
                    self.engine.abort(request.id)
                raise
            self._inboxes |= {request.id: deque() for request in requests}
        return requests

    def _params_of_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_params()] * num_prompts
        else:
            params = list(sampling_params)
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling_params")
        for sampling in params:
            if not isinstance(sampling, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, not {sampling!r:.80}")
        return params

    def _chunks(self, requests: list[Request], load: Load) -> Chunks:
        """Run the engine until these requests have ended; others keep their events."""
        chunks = self._run(requests, load)
        next(chunks)  # begun, it ends its requests when closed or forgotten; else it would not
        return chunks

    def _run(self, requests: list[Request], load: Load) -> Chunks:
        behind = TokensBehindText(self._new_plain_text)
        try:
            with self._interrupts:
                yield _BEGUN
                while self._await_events(requests, load):
                    for prompt_index, request in enumerate(requests):
                        inbox = self._inboxes[request.id]
                        while inbox:
                            event = inbox.popleft()
                            for told in behind.take(request, event) if load.is_read else (event,):
                                yield self._chunk(prompt_index, told)
        finally:
            with self._lock:
                for request in requests:
                    self.engine.abort(request.id)
                    del self._inboxes[request.id]

    def _new_plain_text(self, request: Request) -> TextStream:
        return self.text.new_text(request.prompt, replace(request.params, stop=()))

    def _await_events(self, requests: list[Request], load: Load) -> bool:
        """Have events in an inbox of these requests; return False when all have ended.

        Whichever thread has none runs the next step, for the requests of all threads.
        """
        with self._lock:
            if any(self._inboxes[request.id] for request in requests):
                return True
            if all(request.is_finished for request in requests):
                return False
            self._interrupts.hold()
            try:
                for event in self.engine.step(load):
                    self._inboxes[event.seq_id[0]].append(event)
            finally:
                self._interrupts.release()
            return True

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

    def _collect(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        lora_request: LoraWish | Sequence[LoraWish],
    ) -> list[RequestOutput]:
        requests = self._submit(prompts, sampling_params, lora_request)
        counts = [request.params.num_answers for request in requests]
        chunks_of: list[list[list[Chunk]]] = [[[] for _ in range(count)] for count in counts]
        ended, total = 0, sum(counts)
        bar = _bar("Answering", progress, len(prompts))
        with closing(self._chunks(requests, Load(is_read=False))) as chunks, bar as report:
            report(0, total)
            for chunk in chunks:
                chunks_of[chunk.prompt_index][chunk.index].append(chunk)
                if chunk.finish_reason:
                    ended += 1
                    report(ended, total)
        return [
            RequestOutput(
                request.id,
                text if isinstance(text, str) else None,
                list(request.prompt),
                self._prompt_logprobs(request),
                completions(request.params, [chunks for chunks in answers if chunks]),
                request.num_cached_tokens,
                request.num_draft_tokens,
                request.num_accepted_tokens,
            )
            for request, text, answers in zip(requests, texts, chunks_of, strict=True)
        ]

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {
            token: Logprob(logprob, rank, self.text.spell(token))
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        }
        own = Logprob(entry.logprob, entry.rank, self.text.spell(entry.token))
        return {entry.token: own} | ranked

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        logprobs = request.prompt_logprobs
        return [
            self._logprobs(logprobs[i]) if i in logprobs else None
            for i in range(len(request.prompt))
        ]

    # --- ending --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the trace file and the chat template's process, where there are such."""
        self.text.close()
        if self.trace:
            self.trace.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _small_runner(small: SmallModel) -> BackendRunner:
    with bytes_bar(f"Loading {small.checkpoint.path.name}") as report:
        return new_runner(small.config, small.checkpoint, report)


def _bar(
    label: str, progress: bool | None, num_prompts: int
) -> AbstractContextManager[Callable[[int, int], None]]:
    show = num_prompts > 1 if progress is None else progress
    return count_bar(label) if show else nullcontext(lambda done, total: None)
