"""Inputs of attention over a paged cache, and of what fills it, made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.shapes import BLOCK_SIZE
from ridgeline.backends.cuda.step.batch import Cut, Kind, Span, cut_items
from ridgeline.backends.cuda.step.plan import AttentionPlan


@dataclass(frozen=True)
class Texts:
    """Queries of pieces of texts, whose keys and values lie in the caches of some layers.

    Attributes:
        q: ``[tokens, H, channels of a key]``.
        caches: of each layer.
        tables: of each text; -1 behind its end.
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

    @property
    def spans(self) -> list[Span]:
        """For each piece: its first token in ``q``, its number of tokens, its first position."""
        counts = [end - start for start, end in self.pieces]
        firsts = np.cumsum([0, *counts]).tolist()
        starts = [start for start, _ in self.pieces]
        return list(zip(firsts, counts, starts, strict=False))

    def piece(self, start: int, end: int) -> Texts:
        """Return some tokens of the only text alone; those before them are in the cache."""
        begin = self.pieces[0][0]
        return replace(self, q=self.q[start - begin : end - begin].clone(), pieces=[(start, end)])

    def alone(self, row: int) -> Texts:
        """Return one of the texts."""
        first, count, _ = self.spans[row]
        q, tables = self.q[first : first + count], self.tables[row : row + 1]
        return replace(self, q=q, tables=tables, pieces=[self.pieces[row]])

    def given(self, rows: int = 0, *, shares: bool = True, layer: int = 0) -> tuple[Any, ...]:
        """Return the arguments of ``attend``, its work cut as a step's.

        Args:
            rows: of queries in a program; 0 for as many as a step of these pieces has.
            shares: contexts of single queries are shared out among programs.
            layer: whose cache is read.
        """
        plan = self.plan(rows, shares=shares)
        return self.q, self.caches[layer], self.tables, plan, self.slopes, self.sinks, self.spec

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

    def plan(self, rows: int = 0, *, shares: bool = True) -> AttentionPlan:
        """Return the work list of a step; where partial results lie is nothing yet."""
        spec, device, spans = self.spec, self.part.device, self.spans
        singles = all(count == 1 for _, count, _ in spans)
        rows = rows or tiles.rows_of(spec.shared, singles=singles or spec.is_wide)
        row_of = list(range(len(spans)))
        cut = Cut(rows, tiles.SPLIT) if shares else Cut(rows, tiles.SPLIT, most_slots=0)
        items, folds = cut_items(spans, row_of, Kind(0, spec.shared, spec.window), cut)
        num_slots = max(int(folds[:, 2].sum()), 1)

        def there(array: Any) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32)).to(device)

        return AttentionPlan(
            items=there(items),
            num_items=there([len(items)]),
            folds=there(folds) if len(folds) else there([[0, 0, 0]]),
            num_folds=there([len(folds)]),
            part_a=torch.full((num_slots * spec.H * spec.value_dim,), float("nan"), device=device),
            part_ml=torch.full((num_slots * spec.H * 2,), float("nan"), device=device),
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
    block_size: int = BLOCK_SIZE,
    value_at: int = 0,
) -> Texts:
    """Return random texts of H query heads, K key heads and D channels, blocks in random order.

    ``value_at`` makes values a part of keys, as of latents.
    """
    H, K, D = heads
    need = [-(-end // block_size) for _, end in pieces]
    order = np.random.default_rng(7).permutation(sum(need)).astype(np.int32)
    tables = np.full((len(pieces), max(need)), -1, np.int32)
    for row, ids in enumerate(np.split(order, np.cumsum(need)[:-1])):
        tables[row, : len(ids)] = ids
    by_head = torch.rand(H, device=part.device)
    kinds = 1 if value_at else 2
    return Texts(
        part=part,
        q=part.normal(sum(end - start for start, end in pieces), H, D),
        caches=[part.normal(sum(need), kinds, K, block_size, D) for _ in range(layers)],
        tables=torch.from_numpy(tables).to(part.device),
        pieces=pieces,
        spec=HeadSpec(
            H=H,
            K=K,
            D=D,
            half=D // 2,
            scale=D**-0.5,
            window=window,
            softcap=softcap,
            value_at=value_at,
        ),
        slopes=by_head * 0.1 if has_slopes else None,
        sinks=by_head * 4 - 1 if has_sinks else None,
    )


def heads_inputs(part: Part, spec: HeadSpec) -> dict[str, Any]:
    """Return arguments of ``rope_and_cache``: token 2 is not finite, token 6 is padding."""
    T, (H, K, D) = 7, (spec.H, spec.K, spec.D)
    kinds = 1 if spec.value_at else 2
    num_own = (1 if spec.v_is_k else kinds) * K if spec.own else 0
    qkv = part.normal(T, (H + num_own) * D)
    if spec.own:
        qkv[2, H * D + 3] = float("inf")
    angles = part.normal(32, spec.half, dtype=torch.float32)
    q_norm, k_norm = (part.normal(D, dtype=torch.float32) + 1 for _ in range(2))

    def integers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=part.device)

    return {
        "qkv": qkv,
        "cache": torch.zeros((9, kinds, K, BLOCK_SIZE, D), dtype=part.dtype, device=part.device),
        "tables": integers([[3, 4], [8, 1]]),
        "positions": integers([0, 1, 17, 31, 5, 6, 0]),
        "table_rows": integers([0, 0, 0, 1, 1, 1, -1]),
        "cos": torch.cos(angles) if spec.half else None,
        "sin": torch.sin(angles) if spec.half else None,
        "q_norm": q_norm if spec.qk_norm else None,
        "k_norm": k_norm if spec.qk_norm and spec.own else None,
        "poison": torch.zeros(T, dtype=torch.int32, device=part.device),
        "spec": spec,
    }
