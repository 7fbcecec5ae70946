"""Log-probabilities and ranks of tokens, computed on the device: few numbers are read back.

The rule is ``backends.sampler.rule.rank_tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.step.edits import bits
from ridgeline.backends.sampler.rule import log_sum_exp, ranked
from ridgeline.core.step import Candidates, TokenLogprobs

_ROWS = 64  # whose keys are made at once
_ID_BITS = 31
_LAST = (1 << _ID_BITS) - 1


def ranks(
    logits: Tensor, rows: Sequence[int], tokens: Tensor, likely: Sequence[Candidates], ops: Any
) -> list[TokenLogprobs]:
    """Return the log-probability and rank of a token of each of some rows of logits.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        rows: of ``logits``.
        tokens: one of each, int32, on the device; of -1 nothing is known.
        likely: the likeliest tokens to report of each, and their logits.
        ops: kernels, or their twins.
    """
    row_of = torch.tensor(rows, device=logits.device)
    columns = (tokens, *ops.rank(logits, row_of, tokens))
    logprobs = []
    for (token, value, ahead, top, total, is_finite), pairs in zip(
        zip(*(column.tolist() for column in columns), strict=True), likely, strict=True
    ):
        if is_finite:
            logprobs.append(ranked(token, value, ahead, log_sum_exp(top, total), pairs))
        else:
            logprobs.append(TokenLogprobs(token, math.nan, 1, ()))
    return logprobs


def likeliest(
    logits: Tensor, rows: Sequence[int], counts: Sequence[int], masks: Sequence[bytes]
) -> list[Candidates]:
    """Return the likeliest tokens of rows of logits, then by id, each with its logit.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        rows: of ``logits``.
        counts: how many of each.
        masks: of each, a bit for each id that may be among them; none allows all.
    """
    candidates: list[Candidates] = []
    for low in range(0, len(rows), _ROWS):
        part = slice(low, low + _ROWS)
        candidates += _likeliest(logits, rows[part], counts[part], masks[part])
    return candidates


def _likeliest(
    logits: Tensor, rows: Sequence[int], counts: Sequence[int], masks: Sequence[bytes]
) -> list[Candidates]:
    vocabulary = logits.shape[1]
    most = min(max(counts), vocabulary)
    if not most:
        return [()] * len(rows)
    x = logits[list(rows)]
    keys = keys_of(x)
    if any(masks):
        every = [mask or b"\xff" * vocabulary for mask in masks]
        of_rows = torch.from_numpy(bits(every, vocabulary)).to(x.device)
        ids = torch.arange(vocabulary, device=x.device)
        is_there = (of_rows[:, ids >> 3] >> (ids & 7)) & 1
        keys = torch.where(is_there == 1, keys, -1)
    top = keys.topk(most, dim=1).values
    picked = _LAST - (top & _LAST)
    values = x.gather(1, picked.clamp(max=vocabulary - 1))
    lines = zip(top.tolist(), picked.tolist(), values.tolist(), counts, strict=True)
    return [
        tuple(
            (token, value)
            for key, token, value in zip(*(column[:count] for column in line), strict=True)
            if key >= 0
        )
        for *line, count in lines
    ]


def keys_of(x: Tensor) -> Tensor:
    """Return numbers that order tokens by logit, the likeliest last, and equal ones by falling id.

    No two of a row are equal, so that any sort gives one order. -0.0 is 0.0.
    """
    signed = (x + 0.0).view(torch.int32).long()
    order = torch.where(signed < 0, -signed - (1 << 31) - 1, signed) + (1 << 31)
    ids = torch.arange(x.shape[1], device=x.device)
    return (order << _ID_BITS) + (_LAST - ids)
