"""Asks of every kind for the logits behind tokens, as a step has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.backends.sampler.rule import Row, uniform_bits
from ridgeline.backends.sampler.step_output import LogitsRequest
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenRules

PROMPT = 6  # tokens of a history that are the prompt's
# Parameters, each alone and together; then what rows have beside them.
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 0.9, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.7, "presence_penalty": -0.6},
    {"temperature": 1.0, "repetition_penalty": 0.6, "frequency_penalty": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 8: -2.5, 11: 100.0}, "top_k": 3},
    {"temperature": 1.3, "min_tokens": 30, "max_tokens": 99, "logit_bias": {0: 50.0}},
    {"temperature": 0.7, "xtc_probability": 0.5, "top_k": 40},
    {"temperature": 0.9, "typical_p": 0.9, "presence_penalty": 0.4},
    {"temperature": 0.9, "top_n_sigma": 1.5},
)


def bits(random: np.random.Generator, vocabulary: int, share: float) -> bytes:
    """Return a mask that has a share of all ids."""
    return np.packbits(random.random(vocabulary) < share, bitorder="little").tobytes()


def logits_of(random: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray[Any, Any]:
    """Return rows of which many logits are equal, one of them -0.0."""
    logits = (random.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    logits = np.round(logits * 4) / np.float32(4)
    logits[:, 5] = -0.0
    return logits


def asks_of(random: np.random.Generator, rows: int, vocabulary: int) -> list[LogitsRequest]:
    """Return an ask for each row: draws with and without masks and ranks, and known tokens."""
    found = []
    for token in range(rows):
        if random.random() < 0.2:  # a prompt's token, or the likeliest that a mask allows
            mask = bits(random, vocabulary, 0.02) if random.random() < 0.5 else b""
            known, top = int(random.integers(vocabulary)), int(random.choice([0, 3, vocabulary]))
            found.append(LogitsRequest(token, (), known, top, mask))
            continue
        params = SamplingParams(seed=1, **PARAMS[token % len(PARAMS)])
        texts = tuple(b"%d" % i for i in range(vocabulary)) if random.random() < 0.05 else ()
        rules = TokenRules(texts=texts, ends=(1,) if texts else ())
        history = tuple(random.integers(0, 40, 25).tolist())
        share = float(random.choice([1.0, 0.3, 0.0]))
        banned = tuple(random.integers(0, vocabulary, int(random.integers(3))).tolist())
        repeats = ((int(random.integers(20)), 2.6),) if random.random() < 0.3 else ()
        row = Row(
            Sampling(params, PROMPT, (0, 7, 2), rules), 0, len(history), history,
            b"" if share == 1.0 else bits(random, vocabulary, share),
            tuple(dict.fromkeys(banned)), repeats,
        )  # fmt: skip
        seeds = [int(seed) for seed in random.integers(0, 1 << 63, int(random.integers(1, 4)))]
        draws = tuple(row._replace(seed=seed) for seed in seeds)
        top = random.choice([-1, 0, 4])
        found.append(LogitsRequest(token, draws, -1, None if top < 0 else int(top)))
    return found


def needs_the_rule(ask: LogitsRequest) -> bool:
    """Whether only the rule itself can answer an ask, of a whole row of logits."""
    if not ask.draws:
        return False
    params, rules = ask.draws[0].sampling.params, ask.draws[0].sampling.tokens
    acts = [
        uniform_bits(row.seed, row.position, stream=1) < params.xtc_probability * 2.0**53
        for row in ask.draws
    ]
    return bool(params.typical_p < 1 or params.top_n_sigma > 0 or rules.texts or any(acts))
