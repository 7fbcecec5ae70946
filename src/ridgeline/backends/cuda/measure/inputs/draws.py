"""Inputs of draws: rows of logits, what is asked of each, and arguments of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.step.edits import edits
from ridgeline.backends.sampler.rule import Row, rule
from ridgeline.backends.sampler.step_output import LogitsRequest
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenRules

# Each filter alone and all together, flat and steep, greedy, and all but one dropped.
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.01},
    {"temperature": 3.0, "top_k": 1400, "top_p": 0.999},
    {"temperature": 1e-300},
)
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


def signed(value: int) -> int:
    """Return an unsigned number of 64 bits as the signed one with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def draws(
    part: Part, params: Sequence[SamplingParams], vocabulary: int
) -> tuple[tuple[Tensor, ...], list[Row]]:
    """Return arguments of ``draw`` for a row each, and the rows as the rule knows them.

    Some logits are equal; of a small vocabulary many.
    """
    random, count = np.random.default_rng(4), len(params)
    logits = part.normal(count, vocabulary, scale=3.0, dtype=torch.float32)
    logits = torch.round(logits * 8) / 8 if vocabulary < 5000 else logits
    logits[:, vocabulary // 3] = logits[:, vocabulary // 5]
    seeds = [int(seed) for seed in random.integers(0, 1 << 63, count)]
    seeds[0] |= 1 << 63
    positions = [int(position) for position in random.integers(0, 1 << 20, count)]
    rules = [rule(one) for one in params]

    def longs(values: Sequence[int]) -> Tensor:
        return torch.tensor([signed(value) for value in values], device=part.device)

    given = (
        logits,
        longs(random.permutation(count).tolist()),
        torch.tensor([how.factor for how in rules], dtype=torch.float64, device=part.device),
        longs([how.top_k for how in rules]),
        longs([how.share for how in rules]),
        longs([how.least for how in rules]),
        longs(seeds),
        longs(positions),
    )
    rows = [
        Row(Sampling(one, 0, ()), seed, at, ())
        for one, seed, at in zip(params, seeds, positions, strict=True)
    ]
    return given, rows


def changes(part: Part, count: int, vocabulary: int) -> tuple[Tensor, ...]:
    """Return arguments of ``adjust``: penalties, bias and masks of ``count`` rows of logits.

    One row holds a number that is not finite.
    """
    random = np.random.default_rng(2)
    asks = [ask for ask in asks_of(random, 2 * count, vocabulary) if ask.draws][:count]
    logits = logits_of(random, count, vocabulary)
    logits[count // 2, 17] = np.inf
    row_of = random.permutation(count)[: len(asks)]
    of_rows = edits([ask.draws[0] for ask in asks], vocabulary)
    arrays = (torch.from_numpy(array) for array in (logits, row_of, *of_rows))
    return tuple(array.to(part.device) for array in arrays)


def bits(random: np.random.Generator, vocabulary: int, share: float) -> bytes:
    """Return a mask that has a share of all ids."""
    return np.packbits(random.random(vocabulary) < share, bitorder="little").tobytes()


def logits_of(random: np.random.Generator, rows: int, vocabulary: int) -> NDArray[np.float32]:
    """Return rows of which many logits are equal, one of them -0.0."""
    logits = (random.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    logits = np.round(logits * 4) / np.float32(4)
    logits[:, 5] = -0.0
    return logits


def asks_of(random: np.random.Generator, rows: int, vocabulary: int) -> list[LogitsRequest]:
    """Return an ask for each row: draws with and without masks and ranks, and targets."""
    asks = []
    for token in range(rows):
        if random.random() < 0.2:  # a prompt's token, or the likeliest that a mask allows
            mask = bits(random, vocabulary, 0.02) if random.random() < 0.5 else b""
            target, top = int(random.integers(vocabulary)), int(random.choice([0, 3, vocabulary]))
            asks.append(LogitsRequest(token, (), target, top, mask))
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
        answers = tuple(row._replace(seed=seed) for seed in seeds)
        top = random.choice([-1, 0, 4])
        asks.append(LogitsRequest(token, answers, -1, None if top < 0 else int(top)))
    return asks
