"""Inputs that tests of twins, kernels and devices share, and attention stated plainly in numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.sampler.rule import Row, rule, sample
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling

BLOCK_SIZE = 16
# A prompt, a long text's next token, a piece of a prompt, and tokens at borders of blocks.
PIECES = [(0, 70), (300, 301), (40, 75), (5, 6), (127, 129), (0, 1)]


def near(found: Tensor, wanted: Tensor, most: float = 1e-5) -> None:
    """Assert that two arrays differ by a share of their length of at most ``most``."""
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < most, error


@dataclass
class AttentionCase:
    """Queries of pieces (start, end) of texts, whose keys and values lie in a cache."""

    q: Tensor
    cache: Tensor
    tables: Tensor
    pieces: list[tuple[int, int]]
    spec: HeadSpec
    slopes: Tensor | None
    sinks: Tensor | None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cache.shape[3]

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Of each piece its first token in ``q``, number of tokens, first position."""
        counts = [end - start for start, end in self.pieces]
        firsts = np.cumsum([0, *counts]).tolist()
        starts = [start for start, _ in self.pieces]
        return list(zip(firsts, counts, starts, strict=False))

    def stated(self) -> Tensor:
        """Return attention by its definition, a query and head at a time, in float64."""
        spec, out = self.spec, np.zeros((*self.q.shape[:2], self.spec.value_dim))
        q, cache = self.q.double().numpy(), self.cache.double().numpy()
        for row, (token, count, start) in enumerate(self.spans):
            for i in range(count):
                at = start + i
                keys = np.arange(max(0, at - spec.window + 1) if spec.window else 0, at + 1)
                blocks, slots = (
                    self.tables[row].numpy()[keys // self.block_size],
                    keys % self.block_size,
                )
                for head in range(spec.H):
                    place = head // (spec.H // spec.K)
                    k = cache[blocks, 0, place, slots]
                    v = k[:, spec.value_at :] if spec.value_at else cache[blocks, 1, place, slots]
                    scores = k @ q[token + i, head] * spec.scale
                    if spec.softcap:
                        scores = spec.softcap * np.tanh(scores / spec.softcap)
                    if self.slopes is not None:
                        scores = scores - float(self.slopes[head]) * (at - keys)
                    weights = np.exp(scores)
                    total = weights.sum()
                    if self.sinks is not None:
                        total += np.exp(float(self.sinks[head]))
                    out[token + i, head] = weights @ v / total
        return torch.from_numpy(out)

    def piece(self, start: int, end: int) -> AttentionCase:
        """Return some tokens of the first text alone; those before them are in the cache."""
        begin = self.pieces[0][0]
        return replace(self, q=self.q[start - begin : end - begin].clone(), pieces=[(start, end)])

    def given(self, rows: int, *, shares: bool = True) -> tuple[Any, ...]:
        """Return the arguments of ``attend``; ``shares`` cuts single queries' contexts."""
        plan = work_list(self, rows, shares=shares)
        return self.q, self.cache, self.tables, plan, self.slopes, self.sinks, self.spec


def work_list(case: AttentionCase, rows: int, *, shares: bool) -> SimpleNamespace:
    """Return the work for programs of ``rows`` rows; room for partial results is not a number."""
    spec, items, folds, slots = case.spec, [], [], 0
    most = rows // spec.shared
    for row, (token, count, start) in enumerate(case.spans):
        for low in range(0, count, most):
            queries, at = min(most, count - low), start + low
            first = max(0, at - spec.window + 1) // tiles.SPLIT if spec.window else 0
            splits = range(first, (at + queries - 1) // tiles.SPLIT + 1)
            item = [row, token + low, queries, at]
            if queries > 1 or len(splits) == 1 or not shares:
                items.append([*item, 0, -1])
                continue
            folds.append([token + low, slots, len(splits)])
            items += [[*item, split, slots + i] for i, split in enumerate(splits)]
            slots += len(splits)
    room = (slots + 1) * spec.H
    device = case.q.device
    nothing = float("nan")
    return SimpleNamespace(
        items=torch.tensor(items, dtype=torch.int32, device=device),
        num_items=torch.tensor([len(items)], dtype=torch.int32, device=device),
        folds=torch.tensor(folds or [[0, 0, 0]], dtype=torch.int32, device=device),
        num_folds=torch.tensor([len(folds)], dtype=torch.int32, device=device),
        part_a=torch.full((room * spec.value_dim,), nothing, device=device),
        part_ml=torch.full((room * 2,), nothing, device=device),
        programs=3,
        folds_at_most=len(folds),
        rows=rows,
        spans=case.spans,
        row_of=list(range(len(case.pieces))),
    )


def attention_case(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    pieces: list[tuple[int, int]] | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    has_slopes: bool = False,
    block_size: int = BLOCK_SIZE,
    value_at: int = 0,
) -> AttentionCase:
    """Return a case of H query heads, K key heads and D channels; blocks in a random order.

    ``value_at`` makes values a part of keys.
    """
    pieces = PIECES if pieces is None else pieces
    H, K, D = shape
    generator = torch.Generator().manual_seed(7)
    need = [-(-end // block_size) for _, end in pieces]
    order = np.random.default_rng(7).permutation(sum(need)).astype(np.int32)
    tables = np.full((len(pieces), max(need)), -1, np.int32)
    for row, ids in enumerate(np.split(order, np.cumsum(need)[:-1])):
        tables[row, : len(ids)] = ids
    kinds = 1 if value_at else 2
    cache = torch.randn((sum(need), kinds, K, block_size, D), generator=generator).to(dtype)
    q = torch.randn((sum(end - start for start, end in pieces), H, D), generator=generator)
    by_head = torch.rand(H, generator=generator)
    spec = HeadSpec(H, K, D, D // 2, D**-0.5, window=window, softcap=softcap, value_at=value_at)
    slopes = by_head * 0.1 if has_slopes else None
    sinks = by_head * 4 - 1 if has_sinks else None
    return AttentionCase(q.to(dtype), cache, torch.from_numpy(tables), pieces, spec, slopes, sinks)


def heads_case(dtype: torch.dtype, spec: HeadSpec) -> dict[str, Any]:
    """Return the arguments of ``rope_and_cache``: token 2 is poisoned, token 6 is padding."""
    T, (H, K, D) = 7, (spec.H, spec.K, spec.D)
    generator = torch.Generator().manual_seed(3)
    kinds = 1 if spec.value_at else 2
    num_own = (1 if spec.v_is_k else kinds) * K if spec.own else 0
    qkv = torch.randn((T, (H + num_own) * D), generator=generator)
    if spec.own:
        qkv[2, H * D + 3] = float("inf")
    angles = torch.randn((32, spec.half), generator=generator)
    q_norm, k_norm = (torch.randn((2, D), generator=generator) + 1).unbind()
    return {
        "qkv": qkv.to(dtype),
        "cache": torch.zeros((9, kinds, K, BLOCK_SIZE, D), dtype=dtype),
        "tables": torch.tensor([[3, 4], [8, 1]], dtype=torch.int32),
        "positions": torch.tensor([0, 1, 17, 31, 5, 6, 0], dtype=torch.int32),
        "table_rows": torch.tensor([0, 0, 0, 1, 1, 1, -1], dtype=torch.int32),
        "cos": torch.cos(angles) if spec.half else None,
        "sin": torch.sin(angles) if spec.half else None,
        "q_norm": q_norm if spec.qk_norm else None,
        "k_norm": k_norm if spec.qk_norm and spec.own else None,
        "poison": torch.zeros(T, dtype=torch.int32),
        "spec": spec,
    }


def signed(value: int) -> int:
    """Return an unsigned number of 64 bits as the signed one with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def draw_case(
    params: list[SamplingParams], vocabulary: int, seed: int = 4
) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return arguments of ``draw``, and the tokens that the rule draws; many logits are equal."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((len(params), vocabulary)) * 3).astype(np.float32)
    logits = np.round(logits * 8) / np.float32(8) if vocabulary < 5000 else logits
    logits[:, vocabulary // 3] = logits[:, vocabulary // 5]
    seeds = [int(value) for value in random.integers(0, 1 << 63, len(params))]
    seeds[0] |= 1 << 63
    positions = [int(value) for value in random.integers(0, 1 << 20, len(params))]
    rows = [
        Row(Sampling(one, 0, ()), seed, at, ())
        for one, seed, at in zip(params, seeds, positions, strict=True)
    ]
    row_of = random.permutation(len(params))
    wanted = sample(logits, row_of, rows)
    rules = [rule(one) for one in params]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor([signed(value) for value in values])

    given = (
        torch.from_numpy(logits),
        torch.from_numpy(row_of),
        torch.tensor([r.factor for r in rules], dtype=torch.float64),
        integers([r.top_k for r in rules]),
        integers([r.share for r in rules]),
        integers([r.least for r in rules]),
        integers(seeds),
        integers(positions),
    )
    return given, [-1 if token is None else token for token in wanted]


# Each filter alone and all together, flat and steep, greedy, and all but one dropped.
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.01},
    {"temperature": 3.0, "top_k": 1400, "top_p": 0.999},
    {"temperature": 1e-300},
]
