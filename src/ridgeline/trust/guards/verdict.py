"""How likely each of a few tokens is behind a prompt, by the model's own logits.

The engine ranks exactly these tokens, as candidates of a search that ends with the first one, so
nothing is drawn and one pass over the prompt gives them all. It knows nothing of guards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Event, FinishReason
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import (
    AnswerBounds,
    ClientGone,
    RequestStream,
    StreamCaller,
    StreamError,
    StreamReader,
)

Ids = tuple[int, ...]


class _OneOf:
    """Lets one of some tokens follow."""

    is_over = False

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        bits = sum(1 << token for token in set(tokens))
        self._mask = bits.to_bytes((vocab_size + 7) // 8, "little")

    def masks(self, drafts: Ids) -> tuple[bytes, ...]:
        return (self._mask,) * (len(drafts) + 1)

    def forced(self, most: int) -> Ids:
        return ()

    def num_valid(self, drafts: Ids) -> int:
        return 0

    def accept(self, token: int) -> None:
        pass

    def fork(self) -> _OneOf:
        return self


async def logprobs_of(
    engine: EngineClient,
    text: TextProcessor,
    prompt: Ids,
    tokens: Sequence[int],
    caller: StreamCaller,
) -> dict[int, float]:
    """Return the log-probability (natural) of each token after a prompt.

    Raises StreamError if the engine cannot compute them.
    """
    logprobs: dict[int, float] = {}
    most, distinct = engine.settings.max_num_seqs, tuple(dict.fromkeys(tokens))
    for first in range(0, len(distinct), most):
        logprobs |= await _ranked(engine, text, prompt, distinct[first : first + most], caller)
    return logprobs


async def _ranked(
    engine: EngineClient, text: TextProcessor, prompt: Ids, tokens: Ids, caller: StreamCaller
) -> dict[int, float]:
    params = SamplingParams(n=len(tokens), use_beam_search=True, max_tokens=1, temperature=0)
    stream = RequestStream(
        [prompt],
        params,
        text.new_text,
        caller,
        StreamReader(is_growing=False),
        AnswerBounds(partial(_OneOf, tokens, text.vocab_size)),
    )
    logprobs: dict[int, float] = {}
    engine.submit(stream)
    try:
        while batch := await stream.events():
            for _, event in batch:
                if isinstance(event, Event):
                    if event.finish_reason is FinishReason.ERROR:
                        raise StreamError(event.error or "the model failed")
                    if event.logprobs is not None:
                        logprobs[event.logprobs.token] = event.logprobs.logprob
    finally:
        engine.abandon(stream, ClientGone())
    if logprobs.keys() != set(tokens) or not all(map(math.isfinite, logprobs.values())):
        raise StreamError("the model gave no probabilities")
    return logprobs


def log_sum(values: Sequence[float]) -> float:
    """Return the logarithm of a sum of exponentials."""
    greatest = max(values)
    return greatest + math.log(sum(math.exp(value - greatest) for value in values))
