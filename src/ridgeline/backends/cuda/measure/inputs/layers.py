"""Inputs of what layers have beside attention: experts, matrices of heads, texts with states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.shapes import TINY
from ridgeline.backends.cuda.model.experts import Meetings, meet
from ridgeline.backends.cuda.packed import pack
from ridgeline.backends.cuda.step.cache import States
from ridgeline.backends.cuda.step.plan import StatePlan
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work

_ANY = Sampling(SamplingParams(), 0, ())
SLOTS = 6  # of states


def experts(part: Part, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Meetings]:
    """Return rows, matrices of experts, and which rows go to which: Qwen3-30B-A3B's shapes."""
    num, each, hidden, size = (8, 2, 128, 64) if part.is_tiny else (128, 8, 2048, 768)
    x = part.normal(num_tokens, hidden)
    gate_up = part.normal(num, 2 * size, hidden, scale=hidden**-0.5)
    down = part.normal(num, hidden, 2 * size, scale=size**-0.5)
    wanted = torch.rand(num_tokens, num, device=part.device)
    chosen = wanted.topk(each, 1).indices.sort(1).values
    return x, gate_up, down, meet(chosen, num)


def experts_name(bits: int) -> str:
    """Return what experts of a format are called in findings."""
    return f"int{bits} experts" if bits else "experts"


def pack_experts(weight: Tensor, bits: int) -> Any:
    """Return matrices of experts in a format; 0 bits leave them as they are."""
    return pack(weight.flatten(0, 1), bits) if bits else weight


def states_plan(part: Part, texts: tuple[tuple[int, int, int], ...]) -> StatePlan:
    """Return the plan of texts, each with its start, tokens and slot; two more tokens are padding.

    The first one's state is saved twice on the way, where it has tokens enough.
    """
    work = [
        Work(
            (i, 0), start, (0,) * count, (),
            seeds=(), sampling=_ANY, history=(), targets=(), state=slot,
            save=((2, 4), (5, 5)) if i == 0 and count > 5 else (),
        )
        for i, (start, count, slot) in enumerate(texts)
    ]  # fmt: skip
    states = States(TINY["tiny"].arch(), SLOTS, part.device)
    items, cuts = (torch.from_numpy(array).to(part.device) for array in states.cut(work))
    item_of = [i for i, (_, count, _) in enumerate(texts) for _ in range(count)]

    def there(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=part.device)

    return StatePlan(
        items=items, num_items=there([len(items)]), cuts=cuts, num_cuts=there([len(cuts)]),
        item_of=there([*item_of, -1, -1]), programs=len(texts) + 1,
    )  # fmt: skip


def state_inputs(part: Part, op: str, tokens: int) -> tuple[tuple[Any, ...], Tensor]:
    """Return what ``convolve``, ``scan`` or ``remember`` reads of tokens, and the states.

    Shapes are Qwen3-Next's and Nemotron-H's.
    """

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return part.normal(*shape, scale=scale, dtype=torch.float32)

    def shares(*shape: int) -> Tensor:
        return torch.rand(shape, device=part.device)

    slots, T, tiny = 2 * SLOTS, tokens, part.is_tiny
    if op == "convolve":
        C = 300 if tiny else 8192
        given: tuple[Any, ...] = (normal(T, C), part.normal(C, 4), normal(C))
        return given, normal(slots, 3, C)
    if op == "scan":
        H, P, N, G = (4, 40, 6, 2) if tiny else (128, 64, 128, 8)
        groups, paces = (normal(T, G, N), normal(T, G, N)), (shares(T, H), shares(T, H))
        return (normal(T, H, P), *groups, *paces, normal(H)), normal(slots, H, P, N)
    H, key_heads, K, V = (4, 2, 8, 40) if tiny else (32, 16, 128, 128)
    keys = (normal(T, key_heads, K, scale=K**-0.5), normal(T, key_heads, K, scale=K**-0.5))
    return (*keys, normal(T, H, V), shares(T, H), shares(T, H)), normal(slots, H, K, V)
