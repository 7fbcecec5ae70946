"""Inputs of kernels, made on the device: attention over a paged cache, draws, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda import tiles, twins
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.shapes import BLOCK_SIZE
from ridgeline.backends.cuda.model.experts import meet
from ridgeline.backends.cuda.step.batch import Cut, Kind, Span, cut_items
from ridgeline.backends.cuda.step.plan import AttentionPlan
from ridgeline.backends.sampler.rule import rule
from ridgeline.core.params import SamplingParams


@dataclass(frozen=True)
class Texts:
    """Queries of pieces of texts, whose keys and values lie in the caches of some layers.

    Attributes:
        q: ``[tokens, H, D]``.
        caches: of each layer.
        tables: of each text.
        pieces: of each text, the first token that asks and the end.
    """

    part: Part
    q: Tensor
    caches: list[Tensor]
    tables: Tensor
    pieces: Sequence[tuple[int, int]]
    spec: HeadSpec
    slopes: Tensor | None
    sinks: Tensor | None

    def piece(self, start: int, end: int) -> Texts:
        """Return some tokens of the only text alone; those before them are in the cache."""
        begin = self.pieces[0][0]
        return replace(self, q=self.q[start - begin : end - begin].clone(), pieces=[(start, end)])

    def given(self, layer: int = 0, cache: Tensor | None = None) -> tuple[Any, ...]:
        """Return the arguments of ``attend``, its work cut as a step's."""
        cache = self.caches[layer] if cache is None else cache
        return self.q, cache, self.tables, self.plan(), self.slopes, self.sinks, self.spec

    def exact(self) -> Tensor:
        """Return attention in float64, a text at a time."""
        q, cache, *rest = self.given()
        return twins.attend(q.double(), cache.double(), *rest)

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """Return the first layer's keys and values ``[texts, K, length, D]``; lengths are equal."""
        length = self.pieces[0][1]
        picked = self.caches[0][self.tables.long()].transpose(1, 2)
        keys, values = (
            picked[:, kind].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()
            for kind in (0, 1)
        )
        return keys, values

    def plan(self) -> AttentionPlan:
        """Return the work list that a step of these pieces would have."""
        spec, device = self.spec, self.part.device
        counts = [end - start for start, end in self.pieces]
        firsts = np.cumsum([0, *counts]).tolist()
        spans: list[Span] = [
            (first, count, start)
            for first, count, (start, _) in zip(firsts, counts, self.pieces, strict=False)
        ]
        rows = tiles.rows_of(spec.shared, singles=max(counts) == 1)
        row_of = list(range(len(spans)))
        kind = Kind(0, spec.shared, spec.window)
        items, folds = cut_items(spans, row_of, kind, Cut(rows, tiles.SPLIT))
        num_slots = max(int(folds[:, 2].sum()), 1)

        def there(array: Any) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32)).to(device)

        return AttentionPlan(
            items=there(items),
            num_items=there([len(items)]),
            folds=there(folds) if len(folds) else there([[0, 0, 0]]),
            num_folds=there([len(folds)]),
            part_a=torch.zeros(num_slots * spec.H * spec.D, device=device),
            part_ml=torch.zeros(num_slots * spec.H * 2, device=device),
            programs=tiles.PROGRAMS_PER_PROCESSOR[rows] * self.part.processors,
            rows=rows,
            folds_at_most=len(folds),
            spans=spans,
            row_of=row_of,
        )


def texts(
    part: Part,
    heads: tuple[int, int, int],
    pieces: Sequence[tuple[int, int]],
    *,
    layers: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    has_slopes: bool = False,
) -> Texts:
    """Return random texts of H query heads, K key heads and D channels, blocks in random order."""
    H, K, D = heads
    need = [-(-end // BLOCK_SIZE) for _, end in pieces]
    order = np.random.default_rng(7).permutation(sum(need)).astype(np.int32)
    tables = np.zeros((len(pieces), max(need)), np.int32)
    for row, ids in enumerate(np.split(order, np.cumsum(need)[:-1])):
        tables[row, : len(ids)] = ids
    by_head = torch.rand(H, device=part.device)
    return Texts(
        part=part,
        q=part.normal(sum(end - start for start, end in pieces), H, D),
        caches=[part.normal(sum(need), 2, K, BLOCK_SIZE, D) for _ in range(layers)],
        tables=torch.from_numpy(tables).to(part.device),
        pieces=pieces,
        spec=HeadSpec(H=H, K=K, D=D, half=D // 2, scale=D**-0.5, window=window, softcap=softcap),
        slopes=by_head * 0.1 if has_slopes else None,
        sinks=by_head * 4 - 1 if has_sinks else None,
    )


def heads_inputs(part: Part, spec: HeadSpec) -> dict[str, Any]:
    """Return arguments of ``rope_and_cache``: token 2 is not finite, token 6 is padding."""
    T, (H, K, D) = 7, (spec.H, spec.K, spec.D)
    qkv = part.normal(T, (H + 2 * K) * D)
    qkv[2, H * D + 3] = float("inf")
    angles = part.normal(32, spec.half, dtype=torch.float32)
    q_norm, k_norm = (part.normal(D, dtype=torch.float32) + 1 for _ in range(2))

    def integers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=part.device)

    return {
        "qkv": qkv,
        "cache": torch.zeros((9, 2, K, BLOCK_SIZE, D), dtype=part.dtype, device=part.device),
        "tables": integers([[3, 4], [8, 1]]),
        "positions": integers([0, 1, 17, 31, 5, 6, 0]),
        "table_rows": integers([0, 0, 0, 1, 1, 1, -1]),
        "cos": torch.cos(angles),
        "sin": torch.sin(angles),
        "q_norm": q_norm if spec.qk_norm else None,
        "k_norm": k_norm if spec.qk_norm else None,
        "poison": torch.zeros(T, dtype=torch.int32, device=part.device),
        "spec": spec,
    }


def draws(part: Part, params: SamplingParams, count: int, vocabulary: int) -> tuple[Tensor, ...]:
    """Return arguments of ``draw`` for as many rows, all drawn alike; some logits are equal."""
    random, how = np.random.default_rng(4), rule(params)
    logits = part.normal(count, vocabulary, scale=3.0, dtype=torch.float32)
    logits[:, vocabulary // 3] = logits[:, vocabulary // 5]

    def longs(values: Any) -> Tensor:
        return torch.from_numpy(np.array(values, np.uint64).view(np.int64)).to(part.device)

    return (
        logits,
        longs(random.permutation(count)),
        torch.full((count,), how.factor, dtype=torch.float64, device=part.device),
        longs([how.top_k] * count),
        longs([how.share] * count),
        torch.full((count,), how.least, dtype=torch.int64, device=part.device),
        longs(random.integers(0, 1 << 63, count, np.uint64) * 2 + 1),
        longs(random.integers(0, 1 << 20, count)),
    )


def experts(part: Part, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return rows, matrices of experts, and who meets whom: Qwen3-30B-A3B's shapes."""
    num, each, hidden, size = (8, 2, 64, 64) if part.is_tiny else (128, 8, 2048, 768)
    x = part.normal(num_tokens, hidden)
    gate_up = part.normal(num, 2 * size, hidden, scale=hidden**-0.5)
    down = part.normal(num, hidden, 2 * size, scale=size**-0.5)
    wanted = torch.rand(num_tokens, num, device=part.device)
    chosen = wanted.topk(each, 1).indices.sort(1).values
    return x, gate_up, down, meet(chosen, num)
