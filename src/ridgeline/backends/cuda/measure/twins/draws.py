"""Twins of the kernels after the last layer: they call the rule itself, or state it once more."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.sampler import rule

UNSIGNED = 2**64 - 1  # seeds and shares of 64 bits travel as signed numbers


def draw(
    logits: Tensor,
    row_of: Tensor,
    factors: Tensor,
    top_k: Tensor,
    shares: Tensor,
    least: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    has_filters: bool = True,
    is_adjusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw a token for each of R rows by the rule of ``backends.sampler.rule``.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        row_of: the row of ``logits`` of each draw, ``[R]`` int64.
        factors: ``Rule.factor`` of each draw, ``[R]`` float64.
        top_k: ``Rule.top_k``, ``[R]`` int64; 0 keeps all, and 1 is greedy.
        shares: ``Rule.share``, ``[R]`` int64 with the bits of an unsigned number; 0 keeps all.
        least: ``Rule.least``, ``[R]`` int64.
        seeds: ``[R]`` int64, with the bits of an unsigned number.
        positions: ``[R]`` int64.
        has_filters: some draw has a share, or a ``top_k`` above 1. False saves the kernel work.
        is_adjusted: ``adjust`` made the logits: minus infinity is a token that cannot be chosen.

    Returns:
        The tokens ``[R]`` int32, -1 for none; and 1 for each draw whose logits are all finite, else
        0, ``[R]`` int32.
    """
    rows = logits.numpy(force=True)[row_of.numpy(force=True)]
    picked, finite = [], []
    for i, row in enumerate(rows):
        finite.append(bool((row < np.inf).all() if is_adjusted else np.isfinite(row).all()))
        share = int(shares[i]) & UNSIGNED
        wanted = rule.Rule(float(factors[i]), int(top_k[i]), share, int(least[i]))
        ids, weights = rule.keep(row, wanted) if finite[-1] else (np.zeros(0, int),) * 2
        if not len(ids):
            picked.append(-1)
            continue
        reached = np.cumsum(weights)
        bits = rule.uniform_bits(int(seeds[i]) & UNSIGNED, int(positions[i]))
        mark = bits * int(reached[-1]) >> 53
        picked.append(int(ids[np.searchsorted(reached, mark, side="right")]))
    tokens = torch.tensor(picked, dtype=torch.int32, device=logits.device)
    return tokens, torch.tensor(finite, dtype=torch.int32, device=logits.device)


def adjust(
    logits: Tensor,
    row_of: Tensor,
    masks: Tensor,
    mask_of: Tensor,
    edit_rows: Tensor,
    edit_ids: Tensor,
    amounts: Tensor,
) -> Tensor:
    """Return rows of logits after penalties, bias and masks, as ``rule.adjust`` does it.

    Args:
        logits: ``[rows, vocabulary]`` float32; they are not changed.
        row_of: the row of ``logits`` of each of A results, ``[A]`` int64.
        masks: ``[M, bytes]`` uint8, a bit for each id that may be chosen, lowest first.
        mask_of: the mask of each result, -1 for none, ``[A]`` int64.
        edit_rows: of each of E changes, which result is changed, ``[E]`` int64,
        edit_ids: and which token's logit in it, ``[E]`` int64; each one once.
        amounts: ``[E, 4]`` float64: what divides a positive logit and multiplies another one, two
            numbers that are subtracted, one that is added; minus infinity there: it cannot be
            chosen. Each of the four steps is rounded to float32, at most its greatest number.

    Returns:
        ``[A, vocabulary]`` float32: not a number where a logit was not finite, minus infinity for
        what cannot be chosen.
    """
    out = logits[row_of]
    damaged = ~torch.isfinite(out)
    old = out[edit_rows, edit_ids].double()
    scale, *subtracted, added = amounts.unbind(1)
    new = _rounded(torch.where(old > 0, old / scale, old * scale))
    for amount in subtracted:
        new = _rounded(new.double() - amount)
    new = _rounded(new.double() + added)
    out[edit_rows, edit_ids] = torch.where(added > float("-inf"), new, float("-inf"))
    ids = torch.arange(logits.shape[1], device=logits.device)
    for row, mask in enumerate(mask_of.tolist()):
        if mask >= 0:
            out[row, (masks[mask][ids >> 3] >> (ids & 7) & 1) == 0] = float("-inf")
    return out.masked_fill_(damaged, float("nan"))


def _rounded(values: Tensor) -> Tensor:
    return values.clamp(-rule.MAX_LOGIT, rule.MAX_LOGIT).float()


def rank(
    logits: Tensor, row_of: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the log-probability and the rank of a token of each of R rows are made of.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        row_of: the row of ``logits`` of each, ``[R]`` int64.
        tokens: ``[R]`` int32; -1 for none, of which nothing is found.

    Returns:
        Of each ``[R]``: the token's logit, how many tokens are likelier (or as likely and of a
        smaller id) int64, the row's greatest logit, the sum of its weights at temperature 1 int64,
        and 1 if all logits are finite, else 0, int32. Where they are not, the other values mean
        nothing.
    """
    facts = []
    for row, token in zip(logits[row_of].numpy(force=True), tokens.tolist(), strict=True):
        ahead = int((row > row[token]).sum() + (row[: max(token, 0)] == row[token]).sum())
        total = int(rule.weigh(row, rule.LOG2_E).sum())
        facts.append((row[token], ahead, row.max(), total, int(np.isfinite(row).all())))
    columns = zip(*facts, strict=True) if facts else [()] * 5
    dtypes = (torch.float32, torch.int64, torch.float32, torch.int64, torch.int32)
    value, ahead_of, top, total_of, finite = (
        torch.tensor(column, dtype=dtype, device=logits.device)
        for column, dtype in zip(columns, dtypes, strict=True)
    )
    return value, ahead_of, top, total_of, finite
