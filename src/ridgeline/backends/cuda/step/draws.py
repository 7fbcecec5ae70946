"""Draws on the device: which part of ``backends.sampler.rule`` the kernel knows, and for whom.

It knows penalties, bias, masks, temperature, top-k, top-p, min-p, the draw, and ranks. Requests for
more (typical sampling, top-n-sigma, a draw in which XTC acts, the middle of a text) are answered by
the rule itself, from logits that are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.backends.cuda.step.edits import changes, edits
from ridgeline.backends.cuda.step.lookahead import is_plain
from ridgeline.backends.cuda.step.ranks import likeliest, ranks
from ridgeline.backends.cuda.step.staging import StagedArray, Staging
from ridgeline.backends.sampler.rule import rule, uniform_bits
from ridgeline.backends.sampler.step_output import LogitsRequest, Pick, Sampled, answered
from ridgeline.core.step import Sampling, TokenLogprobs, Work

_BY_RULE = ("top_k", "shares", "least")
_BY_DRAW = ("seeds", "positions", "row_of")


class Draws:
    """How the sequences of a step draw, by the rows of their tables, and the arrays of draws."""

    def __init__(self, num_rows: int, most: int, ops: Any, device: torch.device) -> None:
        """Make room for ``most`` draws of a step, and for the sequences of ``num_rows`` rows."""
        longs = {name: StagedArray((most,), torch.int64) for name in (*_BY_RULE, *_BY_DRAW)}
        self.staging = Staging({**longs, "factors": StagedArray((most,), torch.float64)}, device)
        self._ops = ops
        self._rules = np.zeros((num_rows, len(_BY_RULE)), np.int64)
        self._factors = np.zeros(num_rows)
        self._are_plain = np.zeros(num_rows, bool)

    def note(self, work: Sequence[Work], fresh: Sequence[tuple[int, int]]) -> None:
        """Keep how those items draw whose rows are new to them."""
        for i, row in fresh:
            sampling = work[i].sampling
            how = rule(sampling.params)
            self._are_plain[row] = _is_all_known(sampling)
            self._factors[row] = how.factor
            self._rules[row] = how.top_k, _signed(how.share), how.least

    def are_plain(self, work: Sequence[Work], rows: Sequence[int]) -> bool:
        """Whether all items draw one token each, if any, in a way that the kernel knows."""
        return bool(self._are_plain[rows].all()) and all(map(is_plain, work))

    def of_items(
        self, logits: torch.Tensor, rows: Any, seeds: Sequence[int], positions: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw for plain items, by the rows of their tables, of a row of ``logits`` each.

        Returns tokens, -1 for none, and which logits are finite: ``[n]`` int32, on the device.
        """
        n, host = len(seeds), self.staging.host
        for place, name in enumerate(_BY_RULE):
            host[name][:n] = self._rules[rows, place]
        host["factors"][:n] = self._factors[rows]
        host["seeds"][:n] = np.array(seeds, np.uint64).view(np.int64)
        host["positions"][:n] = positions
        host["row_of"][:n] = np.arange(n)
        return self._send(logits, n)

    def answers(self, logits: torch.Tensor, asks: Sequence[LogitsRequest]) -> list[Sampled]:
        """Answer asks, each by its own row of ``logits``: on the device where that is possible."""
        sampled: dict[int, Sampled] = {}
        of_host = [i for i, ask in enumerate(asks) if not _knows(ask)]
        if of_host:
            rows = logits[of_host].numpy(force=True)
            with np.errstate(all="ignore"):  # a damaged row is found by its values, and fails alone
                for i, row in zip(of_host, rows, strict=True):
                    sampled[i] = answered(row, asks[i])
        of_device = [i for i in range(len(asks)) if i not in sampled]
        if of_device:
            answers = self._of_device(logits, of_device, [asks[i] for i in of_device])
            sampled |= dict(zip(of_device, answers, strict=True))
        return [sampled[i] for i in range(len(asks))]

    def _of_device(
        self, logits: torch.Tensor, rows: Sequence[int], asks: Sequence[LogitsRequest]
    ) -> list[Sampled]:
        """Answer asks by their ``rows`` of logits."""
        drawing = [i for i, ask in enumerate(asks) if ask.draws]
        if drawing:
            of_asks = [rows[i] for i in drawing]
            picked, finite = self._drawn(logits, of_asks, [asks[i] for i in drawing])
        else:
            picked = finite = torch.zeros(0, dtype=torch.int32, device=logits.device)
        targets = [ask.target for ask in asks if not ask.draws]
        picked = torch.cat([picked, torch.tensor(targets, dtype=torch.int32).to(picked.device)])
        owners = [i for i in drawing for _ in asks[i].draws]  # of each token
        owners += [i for i, ask in enumerate(asks) if not ask.draws]
        by_token = self._ranked(logits, rows, asks, owners, picked)
        picks: list[list[Pick]] = [[] for _ in asks]
        sound = [True] * len(asks)
        for i, is_finite in zip(owners, finite.tolist(), strict=False):
            sound[i] &= bool(is_finite)
        for place, (i, token) in enumerate(zip(owners, picked.tolist(), strict=True)):
            rank = by_token.get(place)
            if token >= 0:
                picks[i].append((token, rank))
            if rank is not None and not asks[i].draws:
                sound[i] = not math.isnan(rank.logprob)
        return [Sampled(*answer) for answer in zip(picks, sound, strict=True)]

    def _ranked(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        asks: Sequence[LogitsRequest],
        owners: Sequence[int],
        tokens: torch.Tensor,
    ) -> dict[int, TokenLogprobs]:
        """Return ranks of tokens by their places, where the ask that owns the token wants one."""
        counts = {i: ask.num_top for i, ask in enumerate(asks) if ask.num_top is not None}
        places = [place for place, i in enumerate(owners) if i in counts]
        if not places:
            return {}
        tops = likeliest(
            logits, [rows[i] for i in counts], list(counts.values()), [asks[i].mask for i in counts]
        )
        by_ask = dict(zip(counts, tops, strict=True))
        of_places = [owners[place] for place in places]
        of_tokens = ranks(
            logits, [rows[i] for i in of_places], tokens[places],
            [by_ask[i] for i in of_places], self._ops,
        )  # fmt: skip
        return dict(zip(places, of_tokens, strict=True))

    def _drawn(
        self, logits: torch.Tensor, rows: Sequence[int], asks: Sequence[LogitsRequest]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw for asks, by their own rows of logits, changed where their requests say so."""
        is_adjusted = any(changes(ask.draws[0]) for ask in asks)
        if is_adjusted:
            of_asks = edits([ask.draws[0] for ask in asks], logits.shape[1])
            given = (torch.from_numpy(array).to(logits.device) for array in of_asks)
            logits = self._ops.adjust(logits, torch.tensor(rows, device=logits.device), *given)
            rows = range(len(asks))
        host, n = self.staging.host, 0
        for of_ask, ask in zip(rows, asks, strict=True):
            how = rule(ask.draws[0].sampling.params)
            for row in ask.draws:
                host["top_k"][n], host["least"][n] = how.top_k, how.least
                host["shares"][n], host["factors"][n] = _signed(how.share), how.factor
                host["seeds"][n], host["positions"][n] = _signed(row.seed), row.position
                host["row_of"][n] = of_ask
                n += 1
        return self._send(logits, n, is_adjusted=is_adjusted)

    def _send(
        self, logits: torch.Tensor, n: int, *, is_adjusted: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        host = self.staging.host
        has_filters = bool(host["shares"][:n].any() or (host["top_k"][:n] > 1).any())
        self.staging.send()
        there = self.staging.device
        names = ("row_of", "factors", "top_k", "shares", "least", "seeds", "positions")
        given = (there[name][:n] for name in names)
        picked, finite = self._ops.draw(
            logits, *given, has_filters=has_filters, is_adjusted=is_adjusted
        )
        return picked, finite


def _knows(ask: LogitsRequest) -> bool:
    """Whether the device knows all that an ask needs."""
    if not ask.draws:
        return True
    how = rule(ask.draws[0].sampling.params)
    if how.typical or how.sigmas or ask.is_plain:
        return False
    draws = ask.draws if how.chance else ()
    return all(uniform_bits(row.seed, row.position, stream=1) >= how.chance for row in draws)


def _is_all_known(sampling: Sampling) -> bool:
    """Whether the kernel knows all that any draw of a sequence will need, and none is ranked."""
    params, rules = sampling.params, sampling.tokens
    if params.logprobs is not None or params.num_answers > params.n or params.min_tokens:
        return False
    if params.penalises or params.uses_dry or params.bad_words or params.penalty_alpha:
        return False
    how = rule(params)
    if how.typical or how.sigmas or how.chance or params.logit_bias:
        return False
    return not (rules.allowed or rules.banned or rules.texts)


def _signed(bits: int) -> int:
    """Return 64 bits as the signed number that has them."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits
