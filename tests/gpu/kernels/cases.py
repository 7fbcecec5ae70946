"""Inputs of the bench as tests of twins and kernels want them, and attention stated in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.backends.cuda.measure.cases.attention import MIXED
from ridgeline.backends.cuda.measure.inputs.attention import Texts, texts
from ridgeline.backends.cuda.measure.inputs.draws import draws
from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.sampler.rule import sample
from ridgeline.core.params import SamplingParams


def near(found: Tensor, wanted: Tensor, most: float = 1e-5) -> None:
    """Assert that two arrays differ by a share of their length of at most ``most``."""
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < most, error


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_part(dtype: torch.dtype = torch.float32) -> Part:
    """Return a part of the bench, whose inputs are small, on the CPU, and of a type."""
    part = Part("tests", 60, is_tiny=True)
    part.dtype = dtype
    return part


def attention_case(
    dtype: torch.dtype, shape: tuple[int, int, int], pieces: Any = MIXED, **how: Any
) -> Texts:
    """Return texts of H query heads, K key heads and D channels."""
    return texts(small_part(dtype), shape, pieces, **how)


def stated(case: Texts) -> Tensor:
    """Return attention by its definition, a query and head at a time, in float64."""
    spec, size = case.spec, case.caches[0].shape[3]
    out = np.zeros((*case.q.shape[:2], spec.value_dim))
    q, cache = case.q.double().numpy(), case.caches[0].double().numpy()
    for row, (token, count, start) in enumerate(case.spans):
        for i in range(count):
            at = start + i
            keys = np.arange(max(0, at - spec.window + 1) if spec.window else 0, at + 1)
            blocks, slots = case.tables[row].numpy()[keys // size], keys % size
            for head in range(spec.H):
                place = head // (spec.H // spec.K)
                k = cache[blocks, 0, place, slots]
                v = k[:, spec.value_at :] if spec.value_at else cache[blocks, 1, place, slots]
                scores = k @ q[token + i, head] * spec.scale
                if spec.softcap:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                if case.slopes is not None:
                    scores = scores - float(case.slopes[head]) * (at - keys)
                weights = np.exp(scores)
                total = weights.sum()
                if case.sinks is not None:
                    total += np.exp(float(case.sinks[head]))
                out[token + i, head] = weights @ v / total
    return torch.from_numpy(out)


def draw_case(
    params: list[SamplingParams], vocabulary: int
) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return arguments of ``draw``, and the tokens that the rule draws."""
    given, rows = draws(small_part(), params, vocabulary)
    logits, row_of = (one.numpy() for one in given[:2])
    return given, [-1 if token is None else token for token in sample(logits, row_of, rows)]
