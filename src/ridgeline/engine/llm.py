"""LLM: the Python API. Loads a model, wires the engine, and turns prompts into answers.

It decides nothing about scheduling and computes nothing: prompts become token ids, the engine runs
step by step in the caller's thread, events become outputs.

An engine that has nothing to do can give its memory back, until the next request. At level 1 it
forgets its prefix cache and gives back what the cache, states and scratch memory take. At level 2
weights go too, as far as they are mapped from a file: the system keeps that in its own cache while
it has room, and reads it again when a weight is needed. Nothing has to be woken: the first step
finds zeros where nothing is to be known, and weights where they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np

from ridgeline.backends.interface import BackendRunner
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.decoding.drafts.draft_model import DraftModel
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.request import Request
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.engine import vllm as vllm_params
from ridgeline.engine.adapters import Adapters, AnyLora, read_adapters, room_for
from ridgeline.engine.memory import ProcessMemory, Snapshot, process_memory
from ridgeline.engine.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    paired,
    shaped,
)
from ridgeline.engine.requests import AnyLoras, Chunks, Params, Requests, progress_bar
from ridgeline.engine.setup.build import new_engine, new_runner, new_tier, packed_folder
from ridgeline.engine.setup.drafting import SmallModel, find_small_model, new_speculation
from ridgeline.engine.setup.home import locate
from ridgeline.engine.setup.identity import facts, fingerprint
from ridgeline.engine.setup.options import Options, parse_bytes
from ridgeline.engine.setup.progress import bytes_bar, say
from ridgeline.engine.setup.resolve import resolve, start_lines
from ridgeline.engine.text_processor import (
    AnyPrompt,
    Message,
    TextProcessor,
    as_many,
    is_chat,
    is_list,
    text_of,
)
from ridgeline.engine.vllm import (
    INSTEAD,
    BeamSearchOutput,
    BeamSearchParams,
    Metric,
    TokenizerView,
    UseTqdm,
    beams_of,
    metrics_of,
    taken,
    wants_progress,
)
from ridgeline.foresight.counts import Counts
from ridgeline.model.files.adapters import Base
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.summary import summarise
from ridgeline.system.machine import give_back, memory_in_use, memory_of
from ridgeline.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ridgeline.engine.kv_disk.cache_tier import Tier
    from ridgeline.foresight.trace import TraceWriter

LEVELS = (1, 2)
ContentFormat = Literal["auto", "string", "openai"]


class Sleep:
    """Whether an engine sleeps, and how deep.

    Attributes:
        level: 0 while it is awake.
    """

    def __init__(
        self, engine: Engine, runners: Sequence[BackendRunner], caches: Sequence[KVCache]
    ) -> None:
        """Let ``engine`` sleep, whose memory ``runners`` have, that of a draft model's among them.

        ``caches`` say what is in it.
        """
        self._engine, self._runners, self._caches = engine, runners, caches
        self.level = 0

    def begin(self, level: int = 1) -> int:
        """Give memory back, between two steps; return how many bytes the process has less.

        Raises RuntimeError while requests run, and ValueError if there is no such level or the
        backend cannot.
        """
        if level not in LEVELS:
            raise ValueError(f"level is {level!r}: 1 gives the cache back, 2 weights too")
        self._check_idle()
        before_bytes = memory_of(os.getpid()).resident_bytes
        for runner in self._runners:  # one that cannot says so before anything is forgotten
            runner.give_back(weights=level > 1)
        self.forget()
        if level > 1:
            give_back()
        if not self.level:
            self._engine.listeners.append(self._on_record)
        self.level = level
        return max(0, before_bytes - memory_of(os.getpid()).resident_bytes)

    def forget(self) -> None:
        """Forget all prefixes that are in memory. Raises RuntimeError while requests run."""
        self._check_idle()
        for cache in self._caches:
            cache.forget()

    def _check_idle(self) -> None:
        if num := len(self._engine.requests):  # also paused ones, of which a draft model has blocks
            raise RuntimeError(f"{num} requests run: what they need cannot be forgotten now")

    def end(self) -> None:
        """Be awake; memory is taken again as it is needed."""
        if self.level:
            self.level = 0
            self._engine.listeners.remove(self._on_record)

    def _on_record(self, record: Record) -> None:
        """Be awake: there was a request."""
        self.end()


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
                vLLM's are taken too: those that mean nothing here are named in a note.

        Raises:
            ValueError: no such model, an option out of range, or not enough memory.
            ModelFileError: the model's files are damaged or not supported (a ValueError too).
            TypeError: there is no such option; the message has the nearest name.
        """
        self._before, in_use = Snapshot.now(), memory_in_use()
        self._counts = None if options.pop("disable_log_stats", True) else Counts()
        name, own, dropped = taken(str(model), options)
        engine_options = Options(**{"enable_contrastive_search": True} | own)
        located = locate(name)
        checkpoint = load_checkpoint(located.path)
        text_bytes = memory_in_use() - in_use
        self.path, self._contents = checkpoint.path, checkpoint.contents
        self.arch = checkpoint.arch
        self.summary = summarise(checkpoint)
        small = find_small_model(engine_options, checkpoint)
        reserved_bytes = small.config.total_bytes if small else 0
        lora = read_adapters(engine_options.adapters, Base.of(checkpoint))
        max_lora_rank, lora_bytes = room_for(
            engine_options, [weights for _, weights in lora.values()]
        )
        self.config = resolve(
            engine_options,
            checkpoint,
            reserved_bytes=reserved_bytes,
            lora_bytes=lora_bytes,
            max_lora_rank=max_lora_rank,
        )
        for line in start_lines(name, checkpoint, self.config):
            say(line)
        for note in (*self.config.notes, *dropped):
            say(f"note: {note}")
        self.trace: TraceWriter | None = None
        if engine_options.trace:
            from ridgeline.foresight.trace import TraceWriter  # here: most engines write none

            self.trace = TraceWriter(Path(engine_options.trace))
        with bytes_bar(f"Loading {self.path.name}") as report:
            self.runner = new_runner(self.config, checkpoint, report)
        limit = (
            parse_bytes(engine_options.lora_memory, "--lora-memory")
            if engine_options.lora_memory
            else None
        )
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
        listeners: list[Callable[[Record], None]] = [self.trace] if self.trace else []
        listeners += [self._counts.on_record] if self._counts else []
        speculation = new_speculation(self.config.speculative_config, small, self._drafting)
        self.engine = new_engine(self.config, checkpoint, self.runner, listeners, speculation)
        self.kv_disk = self._new_tier(engine_options)
        load = self.kv_disk.load if self.kv_disk else None
        self._requests = Requests(self.text, self.engine, self.adapters, load)
        self.sleeping = self._new_sleep(speculation)
        give_back()

    def _new_tier(self, engine_options: Options) -> Tier | None:
        if not engine_options.kv_disk:  # the digest of the model's files takes a while
            return None
        name, facts = self.fingerprint, self.facts
        return new_tier(engine_options, self.config, self.runner, self.engine, name, facts)

    def _new_sleep(self, speculation: Speculation | None) -> Sleep:
        runners, caches = [self.runner], [self.engine.scheduler.queues.kv]
        if self._drafting and speculation and isinstance(speculation.drafter, DraftModel):
            runners.append(self._drafting)
            caches.append(speculation.drafter.kv)
        return Sleep(self.engine, runners, caches)

    def default_params(self, **changes: Any) -> vllm_params.SamplingParams:
        """Return the sampling that the model's files or its card recommend, with ``changes``."""
        return vllm_params.assignable(self.text.default_params(**changes))

    def get_default_sampling_params(self) -> vllm_params.SamplingParams:
        """Return the recommended sampling, as ``default_params`` does; vLLM's name."""
        return self.default_params()

    @property
    def digest(self) -> str:
        """SHA-256 of the model's file, in hex; of several, that of their list by ``sha256sum``.

        It is kept between starts. The first one reads the files beside loading them; a call
        before that has ended waits.
        """
        return self._contents.digest(packed_folder())

    @property
    def fingerprint(self) -> str:
        """Name of all that equal answers to equal requests hang on (``engine.setup.identity``)."""
        return fingerprint(self.facts)

    @property
    def facts(self) -> dict[str, Any]:
        """What it is the name of."""
        return facts(self.digest, self.arch, self.config, self.text)

    @property
    def file_digests(self) -> dict[str, str]:
        """SHA-256 of each of the model's files, by its name in the model."""
        return self._contents.each(packed_folder())

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids, and back."""
        return self.text.tokenizer

    def get_tokenizer(self) -> TokenizerView:
        """Return the tokenizer with the methods that vLLM's users call."""
        return TokenizerView(self.tokenizer, self.text.chat_template, self.engine.eos_ids)

    def memory(self) -> ProcessMemory:
        """Return what takes this process's memory now, line by line. Any thread may call."""
        parts = dict(self.runner.memory())
        if self._drafting:
            own = self._drafting.memory()
            parts |= {f"draft_model.{name}": part for name, part in own.items()}
        grown = {"text": self._text_bytes, "text.tokenizers.tokenizer": self.text.library_bytes}
        return process_memory(parts, grown, self.engine, self._before)

    def get_metrics(self) -> list[Metric]:
        """Return what has been counted so far, and how full the engine is; vLLM's name.

        Raises ValueError unless it counts: ``LLM(..., disable_log_stats=False)``.
        """
        if self._counts is None:
            raise ValueError("nothing was counted: give LLM the option disable_log_stats=False")
        return metrics_of(self._counts, self.engine.gauges())

    # --- answers -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: Params = None,
        *,
        suffix: str | None = None,
        lora_request: AnyLoras = None,
        return_errors: bool = False,
        progress: bool | None = None,
        use_tqdm: UseTqdm = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, and return them in order.

        Args:
            prompts: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or a list
                of messages; or a list of these.
            sampling_params: one for all or one for each; None takes the model's defaults.
            suffix: text that follows the answers: they fill the middle between a prompt and this.
                For models that were trained for it.
            lora_request: the name of an adapter that was loaded (``lora``), or vLLM's
                ``LoRARequest``, which loads it; one for all prompts or one for each.
            return_errors: answer the other prompts where one can never run: its output has one
                answer, with finish_reason "error" and the reason in error.
            progress: show a bar, or lines where there is no terminal; None shows them when there
                are several prompts. ``use_tqdm`` is vLLM's name for it.

        Raises:
            ValueError: a prompt or its parameters can never run; nothing was computed then. It
                says which of several prompts, counted from 0.
        """
        show = wants_progress(progress, use_tqdm)
        pairs = self.generate_as_completed(
            prompts,
            sampling_params,
            suffix=suffix,
            lora_request=lora_request,
            return_errors=return_errors,
            progress=show,
        )
        outputs = dict(pairs)
        return [outputs[i] for i in sorted(outputs)]

    def generate_as_completed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: Params = None,
        *,
        suffix: str | None = None,
        lora_request: AnyLoras = None,
        return_errors: bool = False,
        progress: bool | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield each prompt's place and its output as soon as it is complete.

        All arguments are those of ``generate``, and all is checked before this returns. What was
        yielded is not kept; ``close()`` ends the rest.
        """
        many = as_many(prompts)
        encode = self.text.encode_any
        params = self._requests.params_of_each(sampling_params, len(many))
        if suffix:
            encode = partial(self._encode_infill, suffix=suffix)
            params = [self.text.ending_at_fim(sampling) for sampling in params]
        submission = self._requests.submit(
            many, encode, params, lora_request,
            is_many=many is prompts, return_errors=return_errors,
        )  # fmt: skip
        return self._requests.outputs(submission, [text_of(prompt) for prompt in many], progress)

    def _encode_infill(self, prompt: AnyPrompt, suffix: str) -> list[int]:
        return self.text.encode_infill(prompt, suffix).ids  # type: ignore[arg-type]

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamSearchParams,
        *,
        lora_request: AnyLoras = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the best beams of each prompt, as vLLM does.

        Raises ValueError as ``generate`` does.
        """
        outputs = self.generate(
            prompts, params.sampling(), lora_request=lora_request, use_tqdm=use_tqdm
        )
        return [beams_of(out, self.tokenizer.decode(out.prompt_token_ids)) for out in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        lora_request: AnyLoras = None,
        return_errors: bool = False,
        progress: bool | None = None,
        use_tqdm: UseTqdm = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: as for ``generate``, and so are ``lora_request``, ``return_errors``,
                ``progress`` and ``use_tqdm``.
            chat_template: jinja2 source in place of the model's own.
            chat_template_content_format: "auto", "string" or "openai". It changes nothing: a
                template shows in which form it reads content.
            add_generation_prompt: end with the opening of the assistant's next message.
            continue_final_message: go on with the last message instead.
            tools: what the model may call, as OpenAI's API has them.
            chat_template_kwargs: further values for the template, such as ``enable_thinking``.

        Raises:
            ValueError: as in ``generate``; or the model has no chat template, or it refuses.
        """
        if chat_template_content_format not in get_args(ContentFormat):
            names = ", ".join(get_args(ContentFormat))
            raise ValueError(
                f"chat_template_content_format is {chat_template_content_format!r}, not of {names}"
            )
        one = not is_list(messages) or is_chat(messages)
        many: Sequence[Any] = [messages] if one else messages
        self.text.check_task(SamplingParams())
        variables = dict(chat_template_kwargs or {}) | ({"tools": tools} if tools else {})
        variables.setdefault("add_generation_prompt", add_generation_prompt)
        variables.setdefault("continue_final_message", continue_final_message)
        params = self._requests.params_of_each(sampling_params, len(many))
        with self.text.chat_template.written_as(chat_template) as template:
            submission = self._requests.submit(
                many,
                partial(template.render_ids, **variables),
                params,
                lora_request,
                is_many=not one,
                return_errors=return_errors,
            )
        show = wants_progress(progress, use_tqdm)
        outputs = dict(self._requests.outputs(submission, [None] * len(many), show))
        return [outputs[i] for i in sorted(outputs)]

    def embed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling_params: vllm_params.PoolingParams | None = None,
        progress: bool | None = None,
        use_tqdm: UseTqdm = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of one text or many, in order.

        A text's vector depends on nothing but the text: bit for bit, whatever runs beside it.

        Args:
            prompts: text, token ids, or a list of either.
            dimensions: how many first values to keep; None keeps all.
            normalize: scale vectors to length 1; None does what the model's files say, else true.
            pooling_params: vLLM's form of these two, in their place.
            progress: show a bar; None shows one when there are several texts. ``use_tqdm`` is
                vLLM's name for it.

        Raises:
            ValueError: a text can never run, or has fewer dimensions.
            RuntimeError: the model made no vector of a text; the message says why.
        """
        if pooling_params is not None:
            if dimensions is not None or normalize is not None:
                raise ValueError("leave out dimensions and normalize: pooling_params says both")
            dimensions, normalize = pooling_params.dimensions, pooling_params.use_activation
        if dimensions is not None:
            shaped((0.0,) * self.text.vector_size, dimensions)  # before work begins
        self.text.check_vectors()
        show = wants_progress(progress, use_tqdm)
        requests, vectors = self._vectors(as_many(prompts), self.text.encode_any, show)
        scales = self.text.normalises if normalize is None else normalize
        return [
            EmbeddingRequestOutput(
                request.id,
                list(request.prompt),
                EmbeddingOutput(shaped(vectors[i], dimensions, normalises=scales)),
                request.num_cached_tokens,
            )
            for i, request in requests.items()
        ]

    def encode(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = None,
    ) -> list[PoolingRequestOutput]:
        """Return the vectors of texts as ``embed`` does, in vLLM's other form.

        Raises ValueError and RuntimeError as ``embed`` does, and ValueError for a ``pooling_task``
        that is not "embed".
        """
        if pooling_task not in (None, "embed"):
            raise ValueError(
                f"pooling_task is {pooling_task!r:.80}: a text has one vector: 'embed'"
            )
        return [
            PoolingRequestOutput(
                out.request_id,
                out.prompt_token_ids,
                PoolingOutput(np.array(out.outputs.embedding, np.float32)),
                out.num_cached_tokens,
            )
            for out in self.embed(prompts, use_tqdm=use_tqdm)
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        progress: bool | None = None,
        *,
        use_tqdm: UseTqdm = None,
    ) -> list[ScoringRequestOutput]:
        """Return how near texts are to each other: one to many, or each to the other's.

        A model with a classifier reads each pair together (a cross-encoder), and gives its score;
        of any other model it is the cosine of the texts' vectors.

        Raises:
            ValueError: the numbers of texts do not fit, or a text can never run.
            RuntimeError: the model failed on a text; the message says why.
        """
        ones, others = ([x] if isinstance(x, str) else list(x) for x in (text_1, text_2))
        show = wants_progress(progress, use_tqdm)
        scores = self._scores(paired(ones, others), show)
        return [
            ScoringRequestOutput(str(i), ScoringOutput(score)) for i, score in enumerate(scores)
        ]

    def _scores(self, pairs: Sequence[tuple[str, str]], progress: bool | None) -> list[float]:
        if self.text.has_scores:
            _, scores = self._vectors(pairs, lambda pair: self.text.encode_pair(*pair), progress)
            return [scores[i][0] for i in range(len(pairs))]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        _, rows = self._vectors(texts, self.text.encode_whole, progress)
        vectors = {text: rows[i] for i, text in enumerate(texts)}
        return [cosine(vectors[one], vectors[other]) for one, other in pairs]

    def _vectors(
        self, prompts: Sequence[Any], encode: Callable[[Any], list[int]], progress: bool | None
    ) -> tuple[dict[int, Request], dict[int, tuple[float, ...]]]:
        """Return the requests and the vectors of prompts."""
        params = [SamplingParams(pool=self.text.pooling)] * len(prompts)
        requests = self._requests.submit(prompts, encode, params, None, pools=True).requests
        vectors: dict[int, tuple[float, ...]] = {}
        with (
            closing(self._requests.chunks(requests, Load(is_read=False))) as chunks,
            progress_bar("Embedding", progress, len(prompts)) as report,
        ):
            for chunk in chunks:
                if chunk.vector is None:
                    raise RuntimeError(f"text {chunk.prompt_index}: {chunk.error}")
                vectors[chunk.prompt_index] = chunk.vector
                report(len(vectors), len(prompts))
        return requests, vectors

    def stream(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AnyLora = None,
    ) -> Chunks:
        """Yield the answer to a prompt or a conversation as it grows; ``close()`` stops it."""
        return self.stream_many([prompt], sampling_params, lora_request=lora_request)

    def stream_many(
        self,
        prompts: Sequence[AnyPrompt],
        sampling_params: Params = None,
        *,
        lora_request: AnyLoras = None,
    ) -> Chunks:
        """Yield the answers to several prompts, which run side by side, as they grow.

        Raises:
            ValueError: as in ``generate``; or answers are to be chosen when all are complete.
        """
        params = self._requests.params_of_each(sampling_params, len(prompts))
        submission = self._requests.submit(
            prompts, self.text.encode_any, params, lora_request,
            is_many=len(prompts) > 1, is_stream=True,
        )  # fmt: skip
        return self._requests.chunks(submission.requests, Load())

    if not TYPE_CHECKING:  # for a type checker a name that is not here is an error

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to use in the place of a method of vLLM's that is not here."""
            instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise AttributeError(f"LLM has no {name!r}{instead}")

    # --- sleeping and ending --------------------------------------------------------------------

    def sleep(self, level: int = 1) -> int:
        """Give memory back until the next prompt; return by how many bytes the process shrank.

        Level 1 gives back what caches take, and forgets prefixes. Level 2 gives back weights too,
        as far as they are mapped from a file: they are read again when they are needed.
        Raises ValueError if the backend cannot, and RuntimeError while prompts run.
        """
        return self._requests.alone(partial(self.sleeping.begin, level))

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes in memory; return True, as vLLM does.

        Raises RuntimeError while prompts run.
        """
        self._requests.alone(self.sleeping.forget)
        return True

    def wake_up(self, tags: object = None) -> None:
        """Be awake, as after any prompt; vLLM's name, which also knows parts by ``tags``."""
        self._requests.alone(self.sleeping.end)

    def close(self) -> None:
        """Close trace, files of the cache and the chat template's process, where there are such."""
        self.text.close()
        if self.kv_disk:
            self.kv_disk.close()
        if self.trace:
            self.trace.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _small_runner(small: SmallModel) -> BackendRunner:
    with bytes_bar(f"Loading {small.checkpoint.path.name}") as report:
        return new_runner(small.config, small.checkpoint, report)
