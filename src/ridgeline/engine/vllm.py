"""vLLM's Python API by its own names, made of ours: arguments, parameters, metrics, tokenizer."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypedDict, get_type_hints

from ridgeline.core.params import SamplingParams as FrozenParams
from ridgeline.engine.outputs import RequestOutput
from ridgeline.engine.setup.options import Options
from ridgeline.foresight.counts import Counts
from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import Tokenizer


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse with dashes in the names of flags."""
        if args is None:
            args = sys.argv[1:]
        return super().parse_known_args([_with_dashes(one) for one in args], namespace)


class EngineArgs:
    """The options of ``LLM`` as flags."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add ``--model`` and a flag for each option; of those, only what is given is set.

        ``LLM(**vars(parser.parse_args()))`` is how they are used.
        """
        parser.add_argument("--model", default="smollm2")
        hints = get_type_hints(Options)
        for field in fields(Options):
            _add(parser, field.name, hints[field.name], field.metadata["help"])
        for name in vllm_options():
            _add(parser, name, None, argparse.SUPPRESS)
        return parser


def _add(parser: argparse.ArgumentParser, name: str, kind: Any, help: str) -> None:
    more: dict[str, Any] = {}
    if kind is bool:
        more["action"] = argparse.BooleanOptionalAction
    elif kind in (int, int | None):
        more["type"] = int
    elif kind is None:
        more |= {"nargs": "?", "const": True}
    flag = f"--{name.replace('_', '-')}"
    parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=help, **more)


def _with_dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


# Its names of formats. Weights in 16-bit floats stay as their file has them, so no bit is lost.
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "auto",
    "half": "auto",
    "float32": "f32",
    "float": "f32",
}
_RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
# Nothing here hangs on these, whatever their value.
_DROPPED = frozenset(
    {
        "async_scheduling", "attention_backend", "code_revision", "compilation_config",
        "config_format", "convert", "cpu_offload_gb", "cudagraph_capture_sizes",
        "disable_async_output_proc", "disable_custom_all_reduce", "disable_sliding_window",
        "download_dir", "enable_chunked_prefill", "enable_sleep_mode", "enforce_eager",
        "gpu_memory_utilization", "guided_decoding_backend", "hf_token",
        "limit_mm_per_prompt", "load_format", "max_loras", "max_logprobs",
        "max_seq_len_to_capture", "media_io_kwargs", "mm_encoder_tp_mode", "mm_processor_kwargs",
        "model_loader_extra_config", "profiler_config", "quantization", "runner",
        "served_model_name", "structured_outputs_config", "swap_space", "task", "tokenizer_mode",
        "tokenizer_revision", "trust_remote_code", "use_tqdm_on_load", "worker_cls",
    }
)  # fmt: skip
# These would change what is computed: a value that changes nothing passes.
_ONE_VALUE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": ((1,), "a model runs in one process"),
    "data_parallel_size": ((1,), "a model runs in one process"),
    "distributed_executor_backend": ((None, "uni", "mp"), "a model runs in one process"),
    "device": (("auto", "cpu"), "see backend"),
    "hf_overrides": (({},), "a model is what its files say"),
    "generation_config": (("auto",), "give SamplingParams to ignore what a model recommends"),
    "skip_tokenizer_init": ((False,), "prompts may be token ids all the same"),
}

_TRACED = "LLM(..., trace=FILE) records every step, and `ridgeline explain FILE` reads that"
_ONE_PROCESS = "a model runs in one process, with the weights that its files have"
INSTEAD = {  # methods of vLLM's LLM that are not here
    "apply_model": _ONE_PROCESS,
    "classify": "no model that sorts texts runs here; a text model answers with one of several "
    "words by StructuredOutputsParams(choice=[...])",
    "collective_rpc": _ONE_PROCESS,
    "llm_engine": _ONE_PROCESS,
    "load_weights": _ONE_PROCESS,
    "start_profile": _TRACED,
    "stop_profile": _TRACED,
}


def vllm_options() -> list[str]:
    """Return vLLM's names of options that are not the same here."""
    return sorted({*_DROPPED, *_ONE_VALUE, *_RENAMED, "disable_log_stats", "revision", "tokenizer"})


def taken(model: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the model and our own options that vLLM's stand for, and what is to be said.

    Raises ValueError for a value that would change what is computed, and TypeError, with the
    nearest name, for an option that neither knows.
    """
    options, dropped = dict[str, Any](), list[str]()
    names = [field.name for field in fields(Options)]
    for name, value in given.items():
        if name == "dtype":
            plain = str(value).removeprefix("torch.")
            options[name] = _DTYPES.get(plain, plain)
        elif name in names:
            options[name] = value
        elif name in _RENAMED:
            options[_RENAMED[name]] = value
        elif name == "revision":
            model = model if value is None else f"{model}@{value}"
        elif name == "tokenizer":
            if value not in (None, model):
                raise ValueError(f"tokenizer is {value!r}: a model has its own, leave it out")
        elif name in _ONE_VALUE:
            neutral, instead = _ONE_VALUE[name]
            if value is not None and value not in neutral:
                raise ValueError(f"{name} is {value!r:.80}: {instead}; leave it out")
        elif name in _DROPPED:
            dropped += [name] if value is not None else []
        else:
            raise TypeError(f"LLM has no option {name!r}{_nearest(name, names)}")
    notes = [f"nothing here depends on {', '.join(dropped)}"] if dropped else []
    return model, options, notes


UseTqdm = bool | Callable[..., Any] | None


def wants_progress(progress: bool | None, use_tqdm: UseTqdm) -> bool | None:
    """Return whether a bar is shown: vLLM's name for it counts where ours says nothing."""
    return bool(use_tqdm) if progress is None and use_tqdm is not None else progress


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, [*names, *_RENAMED, *_ONE_VALUE, *_DROPPED], n=1)
    return f": did you mean {near[0]!r}?" if near else ""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


_NAMES = tuple(field.name for field in fields(FrozenParams))


class SamplingParams(FrozenParams):
    """Sampling and stopping rules of one request, which can be assigned to.

    A value is checked when it is assigned, and all of them together when a prompt is asked: a
    request takes a copy, which later changes do not reach.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set one value. Raises ValueError if it is out of range, AttributeError for no name."""
        if name not in _NAMES:
            raise AttributeError(f"SamplingParams has no {name!r}")
        checked = FrozenParams(**{"max_tokens": None, name: value})  # so min_tokens may come first
        object.__setattr__(self, name, getattr(checked, name))

    def __eq__(self, other: object) -> bool:
        """Whether the values are the same, also those of a request."""
        if not isinstance(other, FrozenParams):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _NAMES)

    __hash__ = None  # type: ignore[assignment]  # its values change

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return parameters, of which those that are None have their defaults."""
        return cls(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class PoolingParams:
    """How ``LLM.embed`` shapes vectors, by vLLM's names.

    Attributes:
        dimensions: how many first values to keep; None keeps all.
        use_activation: scale vectors to length 1; None does what the model's files say, else true.
    """

    dimensions: int | None = None
    use_activation: bool | None = None


def frozen(params: FrozenParams) -> FrozenParams:
    """Return a copy that cannot be assigned to. Raises ValueError for a contradiction in it."""
    return FrozenParams(**_values(params)) if isinstance(params, SamplingParams) else params


def assignable(params: FrozenParams) -> SamplingParams:
    """Return a copy that can be assigned to."""
    return SamplingParams(**_values(params))


def _values(params: FrozenParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in _NAMES}


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A beam search, by vLLM's names.

    Attributes:
        beam_width: beams that are kept, all of which are returned.
        max_tokens: most tokens of an answer.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        temperature: 0; beams are not drawn.
        length_penalty: above 1 favours long answers: a beam's score is divided by its length to
            this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def sampling(self) -> FrozenParams:
        """Return the parameters of the same search. Raises ValueError if there is none."""
        return FrozenParams(
            use_beam_search=True,
            n=self.beam_width,
            best_of=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A beam: ``tokens`` are those of the prompt and of the answer, and ``text`` is all of it."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beams_of(output: RequestOutput, prompt: str) -> BeamSearchOutput:
    """Return the answers to a prompt of this text as beams."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *one.token_ids],
                prompt + one.text,
                one.cumulative_logprob or 0.0,
                one.finish_reason,
                one.stop_reason,
            )
            for one in output.outputs
        ]
    )


@dataclass(frozen=True)
class Metric:
    """What all have; ``labels`` are those by which several of one name differ."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Numbers that only grow, by place: drafts that were right, by their place in a step."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Measurements: how many, their sum, and by upper bounds how many are not above each."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(counts: Counts, gauges: Mapping[str, float]) -> list[Metric]:
    """Return all metrics, of records that were counted and of an engine as it is now."""
    metrics: list[Metric] = [Gauge(_name(name), {}, value) for name, value in gauges.items()]
    metrics += [Counter(_name(name), {}, value) for name, value in counts.counters().items()]
    metrics += [
        Counter(_name("request_success"), {"finished_reason": reason}, value)
        for reason, value in [*counts.finished.items()]
    ]
    places = [counts.accepted[i] for i in range(max(counts.accepted, default=-1) + 1)]
    metrics.append(Vector(_name("spec_decode_num_accepted_tokens_per_pos"), {}, places))
    for name, spread in counts.histograms.items():
        buckets = {bound: int(count) for bound, count in spread.buckets()}
        metrics.append(Histogram(_name(name), {}, buckets["+Inf"], spread.total, buckets))
    return metrics


def _name(name: str) -> str:
    return f"ridgeline:{name}"


class TokenizerView:
    """Text to token ids and back, and conversations to either, by Hugging Face's names.

    Attributes:
        bos_token_id: what begins a text, None where nothing does; ``bos_token`` is its spelling.
        eos_token_id: what ends an answer, None where nothing does; ``eos_token`` is its spelling.
        vocab_size: one more than the highest id.
        chat_template: the template's source, None where the model has none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, eos_ids: Sequence[int]
    ) -> None:
        """Show ``tokenizer`` and ``template``."""
        self._tokenizer, self._template = tokenizer, template
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = eos_ids[0] if eos_ids else None
        self.vocab_size: int = tokenizer.vocab_size
        self.chat_template = template.source or None

    @property
    def bos_token(self) -> str | None:
        """How the token that begins a text is written."""
        return None if self.bos_token_id is None else self._tokenizer.piece(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """How the token that ends an answer is written."""
        return None if self.eos_token_id is None else self._tokenizer.piece(self.eos_token_id)

    @cached_property
    def _ids(self) -> dict[str, int]:
        pieces = ((self._tokenizer.piece(i), i) for i in range(self.vocab_size))
        return {piece: i for piece, i in pieces if piece is not None}

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, by how the vocabulary writes it."""
        return dict(self._ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each, as the vocabulary writes it; None for no token."""
        if isinstance(tokens, str):
            return self._ids.get(tokens)
        return [self._ids.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Return how the vocabulary writes a token, or each; None for an id that is none."""
        if isinstance(ids, int):
            return self._tokenizer.piece(ids)
        return [self._tokenizer.piece(token) for token in ids]

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True
    ) -> dict[str, list[Any]]:
        """Return ``input_ids`` and ``attention_mask`` of a text, or of each.

        Raises ValueError for text that is none.
        """
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self(each, add_special_tokens) for each in text]
        return {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Raises ValueError for text that is none."""
        return self._tokenizer.encode(text, add_bos=None if add_special_tokens else False)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Raises ValueError for an id that is none."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int] | str:
        """Return a conversation as the model's chat template writes it: as ids, or as text.

        Raises ValueError if there is no template, or it refuses the conversation.
        """
        render = self._template.render_ids if tokenize else self._template.render_text
        return render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(variables | ({"tools": tools} if tools else {})),
        )
