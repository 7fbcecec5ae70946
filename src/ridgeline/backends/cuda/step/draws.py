"""Draws on the device: what of ``backends.sampler.rule`` its kernel knows, and for whom.

It knows temperature, top-k, top-p, min-p and the draw. Who asks for more, such as penalties or
a grammar, is answered by the rule itself, of logits that are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.backends.cuda.step.ahead import is_plain
from ridgeline.backends.cuda.step.staging import Part, Staging
from ridgeline.backends.sampler.rule import rule
from ridgeline.backends.sampler.step_output import LogitsRequest, Sampled, answered
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work

_BY_RULE = ("top_k", "shares", "least")
_BY_DRAW = ("seeds", "positions", "row_of")


class Draws:
    """How the sequences of a step draw, by the rows of their tables, and the arrays of draws."""

    def __init__(self, num_rows: int, most: int, ops: Any, device: torch.device) -> None:
        """Make room for ``most`` draws of a step, and for the sequences of ``num_rows`` rows."""
        longs = {name: Part((most,), torch.int64) for name in (*_BY_RULE, *_BY_DRAW)}
        self.staging = Staging({**longs, "factors": Part((most,), torch.float64)}, device)
        self._ops = ops
        self._rules = np.zeros((num_rows, len(_BY_RULE)), np.int64)
        self._factors = np.zeros(num_rows)
        self._are_plain = np.zeros(num_rows, bool)

    def note(self, work: Sequence[Work], fresh: Sequence[tuple[int, int]]) -> None:
        """Keep how items draw whose rows are new to them."""
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
        of_kernel = [i for i, ask in enumerate(asks) if _knows(ask)]
        drawn = self._drawn(logits, asks, of_kernel) if of_kernel else None
        of_host = [i for i, ask in enumerate(asks) if not _knows(ask)]
        rows = logits[of_host].numpy(force=True) if of_host else np.zeros((0, 0), np.float32)
        found: dict[int, Sampled] = {}
        with np.errstate(all="ignore"):  # a damaged row is found by its values, and fails alone
            for i, row in zip(of_host, rows, strict=True):
                found[i] = answered(row, asks[i])
        if drawn is not None:
            tokens, finite = (iter(array.tolist()) for array in drawn)
            for i in of_kernel:
                picks = [(next(tokens), next(finite)) for _ in asks[i].draws]
                is_finite = all(good for _, good in picks)
                found[i] = Sampled([(None if t < 0 else t, None) for t, _ in picks], is_finite)
        return [found[i] for i in range(len(asks))]

    def _drawn(
        self, logits: torch.Tensor, asks: Sequence[LogitsRequest], chosen: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        host, n = self.staging.host, 0
        for i in chosen:
            how = rule(asks[i].draws[0].sampling.params)
            for row in asks[i].draws:
                host["top_k"][n], host["least"][n] = how.top_k, how.least
                host["shares"][n], host["factors"][n] = _signed(how.share), how.factor
                host["seeds"][n], host["positions"][n] = _signed(row.seed), row.position
                host["row_of"][n] = i
                n += 1
        return self._send(logits, n)

    def _send(self, logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = self.staging.host
        has_filters = bool(host["shares"][:n].any() or (host["top_k"][:n] > 1).any())
        self.staging.send()
        there = self.staging.device
        names = ("row_of", "factors", "top_k", "shares", "least", "seeds", "positions")
        given = (there[name][:n] for name in names)
        picked, finite = self._ops.draw(logits, *given, has_filters=has_filters)
        return picked, finite


def _knows(ask: LogitsRequest) -> bool:
    """Whether the kernel knows all that the draws of an ask need."""
    if not ask.draws or ask.num_top is not None or ask.is_plain:
        return False
    row, params = ask.draws[0], ask.draws[0].sampling.params
    if row.mask or row.banned or row.repeats or row.suppresses:
        return False
    return not (row.history and params.penalises) and _is_rule_known(params)


def _is_all_known(sampling: Sampling) -> bool:
    """Whether the kernel knows all that any draw of a sequence will need, and none is ranked."""
    params, rules = sampling.params, sampling.tokens
    if params.logprobs is not None or params.num_answers > params.n or params.min_tokens:
        return False
    if params.penalises or params.uses_dry or params.bad_words or params.penalty_alpha:
        return False
    return not (rules.allowed or rules.banned or rules.texts) and _is_rule_known(params)


def _is_rule_known(params: SamplingParams) -> bool:
    how = rule(params)
    return not (how.typical or how.sigmas or how.chance or params.logit_bias)


def _signed(bits: int) -> int:
    """Return 64 bits as the signed number that has them."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits
