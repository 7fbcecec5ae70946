"""SamplingParams: how one request wants its tokens chosen, and when to stop.

Values are checked here, whole, before any work begins. This module knows nothing of vocabularies:
ids are checked against the model's by ``validate_ids``, which the edge calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, Literal

from ridgeline.core.structured import StructuredOutputsParams

_RANGES = {  # lowest and highest; whole numbers where these are
    "n": (1, 1024),
    "best_of": (1, 1024),
    "length_penalty": (-10.0, 10.0),
    "temperature": (0.0, 100.0),
    "penalty_alpha": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (1, 1024),
    "dry_penalty_last_n": (-1, 1 << 31),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "logprobs": (-1, 1 << 31),
    "prompt_logprobs": (-1, 1 << 31),
    "truncate_prompt_tokens": (-1, 1 << 31),
}
POOLINGS = ("last", "mean", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request. Names and defaults are those of vLLM.

    Those that vLLM does not know (typical_p, top_n_sigma, xtc_*, dry_*) are llama.cpp's. They apply
    in this order, each on what those before it left: penalties, DRY, logit bias, what cannot be
    chosen (min_tokens, bad_words, structured_outputs, allowed_token_ids), temperature, top-k,
    typical, top-p, min-p, top-n-sigma, XTC. A filter always leaves at least one token.
    Temperature 0 takes the likeliest token that can be chosen, so filters change nothing there.

    Attributes:
        n: how many answers; they share the prompt's computation.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens until their probability reaches this; 0 keeps one.
        min_p: drop tokens less likely than this share of the likeliest.
        typical_p: keep the most typical tokens up to this probability (Meister et al., 2022).
        top_n_sigma: drop tokens whose logits are more than this many standard deviations, of all
            that can be chosen, below the greatest (Tang et al., 2024); 0 and below keep all.
        xtc_probability: how often XTC ("exclude top choices", Weidmann, 2024) drops all but the
            least likely of the tokens that have at least ``xtc_threshold``; 0 is never.
        xtc_threshold: a probability; above 0.5 XTC has nothing to exclude.
        dry_multiplier: DRY ("don't repeat yourself", Weidmann, 2024): what the token loses that
            would go on with a repeat of at least ``dry_allowed_length`` tokens; 0 is off.
        dry_base: the subtraction grows by this factor with each token more that is repeated.
        dry_allowed_length: repeats shorter than this are free. Beyond 1,024 tokens they do not
            grow, and the last 1,024 places count where the last token stood.
        dry_penalty_last_n: how many of the last tokens are looked at; 0 is none, -1 all.
        dry_sequence_breakers: strings that end repeats; a token with one in its text is a breaker.
        repetition_penalty: divides positive, multiplies negative logits of all tokens seen before.
        presence_penalty: subtracted once from logits of tokens seen in the answer.
        frequency_penalty: subtracted for each time a token was seen in the answer.
        logit_bias: token id to a number added to its logit, -100 to 100.
        allowed_token_ids: only these can be chosen; None allows all.
        bad_words: texts that the answer must not have: their last token cannot follow the others.
        seed: all chance depends on it; unset, on the engine's seed and the request's number.
        stop: strings that end the answer; the text is cut before them (or behind: see below).
        stop_token_ids: token ids that end the answer, besides the model's own.
        max_tokens: most tokens to generate; None goes on to the model's context length.
        min_tokens: no stop id can be chosen, and no stop string counts, before this many tokens.
        ignore_eos: do not stop at the model's own end-of-sequence ids.
        logprobs: likeliest tokens to report of each, before any filter; 0: the chosen; -1: all.
        prompt_logprobs: the same for each prompt token but the first.
        post_sampling_probs: logprobs are those of the draw: after temperature and all filters.
        best_of: answers drawn, of which the ``n`` likeliest per token are returned; or beams.
        use_beam_search: return the ``n`` best answers of a beam search (``core.decoding.search``).
        length_penalty: of beams; above 0 favours long answers.
        early_stopping: of beams; True, False or "never", as for Hugging Face's ``generate``.
        penalty_alpha: of contrastive search among ``top_k`` tokens: what a repeat costs; 0: greedy.
        prediction: text that the answer will be like: it comes sooner where that is right.
        structured_outputs: the form that the answer must have.
        pool: return a vector of the prompt's final states: "last", "mean" or "cls", the first.
        include_stop_str_in_output: cut the text behind a stop string.
        skip_special_tokens: leave control tokens out of the text.
        truncate_prompt_tokens: keep the last tokens of a longer prompt; -1 keeps what fits.
        guided_decoding: vLLM's older name of structured_outputs. Of its other names detokenize,
            output_kind, spaces_between_special_tokens and extra_args change nothing here.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    post_sampling_probs: bool = False
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    penalty_alpha: float | None = None
    prediction: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    pool: str = ""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    guided_decoding: InitVar[Any] = None
    detokenize: InitVar[bool] = True
    output_kind: InitVar[Any] = None
    spaces_between_special_tokens: InitVar[bool] = True
    extra_args: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, guided_decoding: Any, *without_effect: Any) -> None:
        if guided_decoding is not None:
            object.__setattr__(self, "structured_outputs", guided_decoding)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            has_default = self.__dataclass_fields__[name].default is not None
            if value is not None or (has_default and name != "max_tokens"):
                _check(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}: over max_tokens {self.max_tokens}")
        for name in (field.name for field in fields(self) if field.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}: it must be at least n ({self.n})")
        if not isinstance(self.prediction, str | None):
            raise ValueError(f"prediction must be text, not {self.prediction!r:.80}")
        if self.penalty_alpha == 0 and self.temperature == 1.0:
            object.__setattr__(self, "temperature", 0.0)
        if self.pool not in ("", *POOLINGS) or (self.pool and (self.best_of or self.n) > 1):
            raise ValueError(f"pool is {self.pool!r}: use last, mean or cls, with n and best_of 1")
        self._check_structured_outputs()
        # Frozen for good: what the caller passed may change under us.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop))
        for name in ("bad_words", "dry_sequence_breakers"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        ids = _token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", ids)
            if not ids:
                raise ValueError("allowed_token_ids is empty: name at least one token")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def _check_structured_outputs(self) -> None:
        structured = self.structured_outputs
        if isinstance(structured, Mapping):
            structured = StructuredOutputsParams(**structured)
            object.__setattr__(self, "structured_outputs", structured)
        if not isinstance(structured, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams, not {structured!r:.80}"
            )
        for name in ("ignore_eos", "min_tokens"):
            if structured and getattr(self, name):
                raise ValueError(f"{name} contradicts structured_outputs, which says when to end")

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return replace(self)

    @property
    def num_seqs(self) -> int:
        """How many answers, or beams, are in the making at the same time."""
        return self.top_k if self.penalty_alpha else self.best_of or self.n

    @property
    def num_answers(self) -> int:
        """How many answers the engine gives; the ``n`` best of them are returned."""
        return self.n if self.searches else self.num_seqs

    @property
    def searches(self) -> bool:
        """Whether tokens are found by a search, not drawn."""
        return self.use_beam_search or bool(self.penalty_alpha)

    @property
    def penalises(self) -> bool:
        """Whether logits of tokens seen before are changed, each for itself."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def uses_dry(self) -> bool:
        """Whether repeats are penalised by their length."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def needs_history(self) -> bool:
        """Whether sampling needs to know the tokens before."""
        return self.penalises or self.uses_dry or bool(self.bad_words)

    def validate_ids(self, vocab_size: int) -> None:
        """Raise ValueError if a token id named here is not in a vocabulary of ``vocab_size``."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name} names token {token}: ids end at {vocab_size - 1}")


def _check(name: str, value: Any, low: float, high: float) -> None:
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not low <= value <= high:  # nor is NaN within
        raise ValueError(f"{name} is {value!r}: it must be from {low} to {high}")


def _strings(name: str, values: Sequence[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ValueError(f"{name} must be a list of strings, not {values!r:.80}")
    strings = _listed(name, values)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be one or more non-empty strings, not {text!r}")
    return strings


def _token_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    tokens = _listed(name, ids)
    for token in tokens:
        _check(name, token, 0, 1 << 31)
    return tokens


def _listed(name: str, values: object) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, not {values!r}")
    return () if values is None else tuple(values)


def _biases(biases: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {biases!r}")
    for token, bias in biases.items():
        _check("logit_bias token id", token, 0, 1 << 31)
        _check(f"logit_bias of token {token}", bias, -100.0, 100.0)
    return dict(biases)
