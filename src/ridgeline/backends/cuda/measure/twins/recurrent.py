"""Twins of the kernels of recurrent layers: one token after another.

``plan`` says of a step's sequences where their tokens and states are (``step.plan.StatePlan``). A
state is read in one slot and written to others: behind the tokens of each cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def convolve(
    rows: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, plan: Any
) -> Tensor:
    """Return each channel's weighted sum over its last tokens, ``[T, C]`` float32.

    Args:
        rows: ``[T, C]`` float32.
        weight: ``[C, kernel]``, the present token's last.
        bias: ``[C]`` float32, or None.
        windows: the last inputs of each sequence, ``[slots, kernel - 1, C]``; they are changed.
        plan: of the step.
    """
    kernel = weight.shape[1]

    def go(first: int, end: int, window: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([window, rows[first:end]])
        sums = sum(inputs[i : i + end - first] * weight[:, i].float() for i in range(kernel))
        assert isinstance(sums, Tensor)
        return sums if bias is None else sums + bias, inputs[len(inputs) - kernel + 1 :]

    return _through(torch.zeros_like(rows), windows, plan, go)


def scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    pace: Tensor,
    decay: Tensor,
    skip: Tensor,
    memory: Tensor,
    plan: Any,
) -> Tensor:
    """Return a state-space scan (Dao and Gu, 2024): memories decay and add B times x; C reads.

    Args:
        x: ``[T, H, P]`` float32.
        b: ``[T, G, N]``, of groups of heads.
        c: the same.
        pace: ``[T, H]``, what x is multiplied by.
        decay: ``[T, H]``, what memories are multiplied by.
        skip: ``[H]``, what x is multiplied by beside memories.
        memory: ``[slots, H, P, N]``; it is changed.
        plan: of the step.
    """
    b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (b, c))

    def go(first: int, end: int, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(first, end):
            taken = (x[t] * pace[t, :, None])[:, :, None] * b[t, :, None]
            state = state * decay[t, :, None, None] + taken
            outputs.append((state * c[t, :, None]).sum(2) + x[t] * skip[:, None])
        return torch.stack(outputs), state

    return _through(torch.zeros_like(x), memory, plan, go)


def remember(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    decay: Tensor,
    memory: Tensor,
    by_turns: bool,
    plan: Any,
) -> Tensor:
    """Return the gated delta rule (Yang et al., 2024): keys and values correct what queries read.

    Args:
        q: ``[T, key heads, K]`` float32.
        k: the same.
        v: ``[T, H, V]``.
        strength: ``[T, H]``, of a correction.
        decay: ``[T, H]``, what memories are multiplied by.
        memory: ``[slots, H, K, V]``; it is changed.
        by_turns: key heads serve value heads by turns; else each serves those of a run.
        plan: of the step.
    """
    heads, key_heads = v.shape[1], q.shape[1]
    served = torch.arange(heads, device=v.device)
    served = served % key_heads if by_turns else served * key_heads // heads
    q, k = q[:, served], k[:, served]

    def go(first: int, end: int, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(first, end):
            state = state * decay[t, :, None, None]
            error = v[t] - (state * k[t, :, :, None]).sum(1)
            state = state + k[t, :, :, None] * (error * strength[t, :, None])[:, None]
            outputs.append((state * q[t, :, :, None]).sum(1))
        return torch.stack(outputs), state

    return _through(torch.zeros_like(v), memory, plan, go)


def _through(
    out: Tensor,
    states: Tensor,
    plan: Any,
    go: Callable[[int, int, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Take each sequence's tokens through its state; write it behind each cut."""
    cuts = plan.cuts.tolist()
    for first, _, source, cut, num_cuts in plan.items[: int(plan.num_items)].tolist():
        state = states[source].clone() if source >= 0 else torch.zeros_like(states[0])
        begin = first
        for _, count, _, target in cuts[cut : cut + num_cuts]:
            if first + count > begin:
                out[begin : first + count], state = go(begin, first + count, state)
            states[target] = state
            begin = first + count
    return out
