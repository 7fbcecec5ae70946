"""What penalties, bias and rules change in rows of logits, as arrays: numpy alone.

The rule is ``backends.sampler.rule.adjust``; the operation ``adjust`` does it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.sampler.rule import Row

SCALE, PENALTY, REPEAT, BIAS = range(4)  # columns of ``amounts``


class Edits(NamedTuple):
    """Arguments of ``adjust`` behind the rows: masks, and changes of single logits."""

    masks: NDArray[np.uint8]
    mask_of: NDArray[np.int64]
    edit_rows: NDArray[np.int64]
    edit_ids: NDArray[np.int64]
    amounts: NDArray[np.float64]


def changes(row: Row) -> bool:
    """Whether the logits of a draw are changed, or some tokens cannot be chosen."""
    params = row.sampling.params
    is_penalised = bool(row.history) and params.penalises
    rules = row.mask or row.banned or row.repeats or params.logit_bias
    return bool(is_penalised or rules or row.suppresses)


def edits(rows: Sequence[Row], vocabulary: int) -> Edits:
    """Return what changes in a row of logits for each of ``rows``."""
    masks = {mask: i for i, mask in enumerate(dict.fromkeys(row.mask for row in rows if row.mask))}
    by_row = [_edits(row) for row in rows]
    return Edits(
        bits(list(masks), vocabulary),
        np.array([masks.get(row.mask, -1) for row in rows], np.int64),
        np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in by_row]),
        np.concatenate([ids for ids, _ in by_row]),
        np.concatenate([amounts for _, amounts in by_row]),
    )


def bits(masks: Sequence[bytes], vocabulary: int) -> NDArray[np.uint8]:
    """Return masks as one array, each as long as all ids need; at least one row."""
    size = -(-vocabulary // 8)
    whole = b"".join(mask[:size].ljust(size, b"\0") for mask in masks)
    return np.frombuffer(whole or bytes(size), np.uint8).reshape(-1, size).copy()


def _edits(row: Row) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ids in rising order, and how the logit of each changes, ``[ids, 4]``."""
    params, prompt_len = row.sampling.params, row.sampling.prompt_len
    parts: list[tuple[int, Any, Any]] = []
    if row.history and params.penalises:
        parts.append((SCALE, np.unique(row.history), params.repetition_penalty))
        answer, count = np.unique(row.history[prompt_len:], return_counts=True)
        penalty = params.frequency_penalty * count + params.presence_penalty
        parts.append((PENALTY, answer, penalty))
    if row.repeats:
        tokens, amounts_of = zip(*row.repeats, strict=True)
        parts.append((REPEAT, tokens, amounts_of))
    if params.logit_bias:
        parts.append((BIAS, list(params.logit_bias), list(params.logit_bias.values())))
    parts.append((BIAS, row.sampling.suppressed if row.suppresses else (), -np.inf))
    parts.append((BIAS, row.banned, -np.inf))
    by_part = [np.array(ids, np.int64) for _, ids, _ in parts]
    all_ids = np.unique(np.concatenate(by_part))
    amounts = np.zeros((len(all_ids), 4))
    amounts[:, SCALE] = 1.0
    for (column, _, values), ids in zip(parts, by_part, strict=True):
        amounts[np.searchsorted(all_ids, ids), column] = values
    return all_ids, amounts
