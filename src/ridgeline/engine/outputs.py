"""What ``LLM`` returns: plain values with the names that vLLM's users know.

Vectors of texts are cut, scaled to length 1 and compared outside of the engine. Sums are exact
before they are rounded (``math.fsum``), so a value depends on its vectors alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.decoding.text import HeldEntries, TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request
from ridgeline.core.step import Event, SeqId

_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability (natural logarithm), and its rank (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the request's ``n`` answers; with ``best_of`` or beam search, best first.
        text: without special tokens, cut before a stop string.
        token_ids: all generated tokens, the stopping one included.
        cumulative_logprob: sum over the tokens; None unless logprobs were asked for, or needed to
            choose among answers.
        logprobs: per token, by token id; None unless asked for.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended it, if one did.
        error: what went wrong, where finish_reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its answers.

    Attributes:
        request_id: counts up from 0 in each ``LLM``; -1 of a prompt that can never run.
        prompt: the text, None where token ids were given.
        prompt_token_ids: what was computed.
        prompt_logprobs: per prompt token, None for the first; None unless asked for.
        outputs: the answers, by index.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        num_draft_tokens: tokens that were guessed, and verified beside one that was not.
        num_accepted_tokens: of these, the right ones.
        finished: True; answers that grow are ``LLM.stream``'s.
        metrics: None; ``--trace`` records where a request's time went.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    finished: bool = True
    metrics: None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text: float32 values, of length 1 unless the model leaves it as it is."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text with its vector.

    Attributes:
        request_id: counts up from 0 in each ``LLM``.
        prompt_token_ids: what was computed.
        outputs: the vector.
        num_cached_tokens: tokens that were found in the prefix cache.
    """

    request_id: int
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The vector of a text, or the score of a pair: ``data`` has float32 values."""

    data: np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A text with what ``LLM.encode`` makes of it, by vLLM's names."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How near two texts are to each other."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts with its score, by vLLM's names.

    Attributes:
        request_id: the place of the pair, from "0".
        outputs: the score.
        finished: True.
    """

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of one answer while it is being generated.

    Attributes:
        prompt_index: which of the prompts, as they were given.
        index: which of its answers.
        text: what became final; the chunks of an answer add up to its text.
        token_id: the token, None when the answer ended without one, or when more of its text is
            still held back: then it comes with the rest.
        logprobs: of that token, by token id; None unless asked for.
        finish_reason: set on the last chunk of an answer.
        stop_reason: the stop string or stop token id that ended it, if one did.
        error: what went wrong, where finish_reason is "error".
        vector: of a text that becomes one, in place of an answer.
    """

    prompt_index: int
    index: int
    text: str
    token_id: int | None
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None
    stop_reason: str | int | None
    error: str | None
    vector: tuple[float, ...] | None = None


def likeliest(mean_logprobs: Sequence[float], count: int) -> list[int]:
    """Return the places of the ``count`` answers that are likeliest per token, best first."""
    return sorted(range(len(mean_logprobs)), key=lambda i: -mean_logprobs[i])[:count]


def completions(params: SamplingParams, answers: list[list[Chunk]]) -> list[CompletionOutput]:
    """Return the answers; of more than ``n`` the likeliest."""
    outputs = [_completion(i, chunks, params.logprobs) for i, chunks in enumerate(answers)]
    if params.num_answers > params.n:
        means = [
            (out.cumulative_logprob or 0.0) / len(out.token_ids) if out.token_ids else -math.inf
            for out in outputs
        ]
        best = [outputs[place] for place in likeliest(means, params.n)]
        outputs = [replace(out, index=i) for i, out in enumerate(best)]
    return outputs


def refused(prompt: str | None, error: str) -> RequestOutput:
    """Return the output of a prompt that can never run, and why."""
    answer = CompletionOutput(0, "", (), None, None, "error", error=error)
    return RequestOutput(-1, prompt, [], None, [answer], 0, 0, 0)


def _completion(index: int, chunks: list[Chunk], num_top: int | None) -> CompletionOutput:
    last = chunks[-1]
    tokens = tuple(chunk.token_id for chunk in chunks if chunk.token_id is not None)
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    total = sum(entry[token].logprob for entry, token in zip(logprobs, tokens, strict=False))
    return CompletionOutput(
        index,
        "".join(chunk.text for chunk in chunks),
        tokens,
        total if logprobs else None,
        logprobs if logprobs and num_top is not None else None,
        last.finish_reason or "abort",
        last.stop_reason,
        last.error,
    )


class TokensBehindText:
    """The events of streamed answers, none with a token whose text is still held back."""

    def __init__(self, new_text: Callable[[Request], TextStream]) -> None:
        """Decode with ``new_text``, which has no stop strings, once more."""
        self._new_text = new_text
        self._answers: dict[SeqId, HeldEntries[Event]] = {}

    def take(self, request: Request, event: Event) -> list[Event]:
        """Return what may be told now: the event's text, with the tokens that waited for it."""
        if event.seq_id not in self._answers:
            self._answers[event.seq_id] = HeldEntries(self._new_text(request))
        entries = self._answers[event.seq_id]
        if event.token is not None:
            entries.feed(event.token, event)
        ready = entries.take(len(event.text), is_over=event.finish_reason is not None)
        if ready == [event]:
            return ready
        if not ready:
            is_news = event.text or event.finish_reason
            return [event._replace(token=None, logprobs=None)] if is_news else []
        events = [Event(one.seq_id, one.token, "", one.logprobs, None, None, None) for one in ready]
        events[0] = events[0]._replace(text=event.text)
        events[-1] = event._replace(
            token=ready[-1].token, text=events[-1].text, logprobs=ready[-1].logprobs
        )
        return events


def shaped(
    vector: Sequence[float], dimensions: int | None = None, *, normalises: bool = True
) -> list[float]:
    """Return the first ``dimensions`` values of a vector, all if None, as float32.

    If it ``normalises``, they are scaled to length 1 after the cut (Kusupati et al., "Matryoshka
    Representation Learning", 2022). Raises ValueError if the vector has fewer.
    """
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise ValueError(
            f"dimensions is {dimensions}: this model's vectors have {len(vector)}, take 1 to that"
        )
    cut = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in cut)) if normalises else 1.0
    out: list[float] = np.array([value / (length or 1.0) for value in cut], np.float32).tolist()
    return out


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors of equal size; 0 where one is zero."""
    lengths = [math.sqrt(math.fsum(value * value for value in vector)) for vector in (one, other)]
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / (lengths[0] * lengths[1] or 1.0)


def paired(ones: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of one text with many, or of many with as many.

    Raises ValueError if their numbers do not fit.
    """
    if len(ones) not in (1, len(others)) or not others:
        raise ValueError(
            f"text_1 has {len(ones)} texts: give one, or as many as text_2 ({len(others)})"
        )
    return list(zip(list(ones) * (len(others) // len(ones)), others, strict=True))


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first values of a vector, and how many it has, as vLLM's examples do."""
    shown = ", ".join(map(repr, embeds[:_MOST_SHOWN]))
    more = ", ..." if len(embeds) > _MOST_SHOWN else ""
    print(f"{prefix}: [{shown}{more}] (size={len(embeds)})")
