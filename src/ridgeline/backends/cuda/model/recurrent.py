"""Mixers that keep a state, as calls of operations: ``model.shape.recurrent``.

Linear maps and whatever concerns single tokens are done for all rows of a step; convolutions and
recurrences go through states (``step.cache``), which every rank has whole. Sums over channels are
our own operations, whose order does not change with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.cuda.step.plan import StatePlan
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm

_UNIT_EPS = 1e-6  # added to the square of a head's length
F32 = torch.float32


@dataclass(frozen=True, slots=True)
class MixerContext:
    """What a mixer works with: its weights and states, the step's plan, and operations.

    ``product`` multiplies by a matrix of any format; ``eps`` is that of the model's norms.
    ``sizes`` are how many rows matrices have on all ranks together.
    """

    weights: Mapping[str, Any]
    states: Mapping[str, Tensor]
    plan: StatePlan
    ops: Any
    product: Callable[..., Tensor]
    eps: float
    ranks: Ranks
    sizes: Mapping[str, int]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return a linear map of rows, float32."""
        out = self.product(x, self.weights[name], self.weights.get(f"{name}_bias"), F32)
        return out if out.shape[1] == self.sizes[name] else self.ranks.gather(out)

    def convolved(self, rows: Tensor) -> Tensor:
        """Return each channel's weighted sum over its last tokens, the present one included."""
        w, windows = self.weights, self.states["window"]
        out: Tensor = self.ops.convolve(rows, w["conv"], w.get("conv_bias"), windows, self.plan)
        return out


def mix(x: Tensor, mixer: Recurrent, given: MixerContext) -> Tensor:
    """Return what a recurrent mixer adds to normed rows ``[T, hidden]``, float32."""
    match mixer:
        case Conv():
            return _short_convolution(x, given)
        case Delta():
            return _delta_net(x, mixer, given)
        case Ssm():
            return _state_space(x, mixer, given)


def _short_convolution(x: Tensor, given: MixerContext) -> Tensor:
    before, behind, rows = given.linear(x, "in").chunk(3, 1)
    output = behind * given.convolved(before * rows)
    return given.linear(output.to(x.dtype), "out")


def _delta_net(x: Tensor, mixer: Delta, given: MixerContext) -> Tensor:
    w, heads = given.weights, mixer.num_value_heads
    sizes = [mixer.key_size, mixer.key_size, mixer.value_size]
    q, k, v = silu(given.convolved(given.linear(x, "qkv"))).split(sizes, 1)
    length = mixer.key_dim**-0.5
    q, k = (_unit(part, mixer, given, scale) for part, scale in ((q, length), (k, 1.0)))
    pace = torch.logaddexp(given.linear(x, "decay") + w["dt_bias"], x.new_zeros(1, dtype=F32))
    output = given.ops.remember(
        q, k, v.reshape(len(x), heads, -1).contiguous(), torch.sigmoid(given.linear(x, "beta")),
        torch.exp(-torch.exp(w["a_log"]) * pace), given.states["memory"], mixer.by_turns,
        given.plan,
    )  # fmt: skip
    output = given.ops.norm(output, w["gated_scale"], None, given.eps, "rms", F32)
    output = output.reshape(len(x), -1) * silu(given.linear(x, "z"))
    return given.linear(output.to(x.dtype), "out")


def _unit(part: Tensor, mixer: Delta, given: MixerContext, scale: float) -> Tensor:
    """Return heads of length ``scale``, as a norm of another factor."""
    heads = part.reshape(len(part), -1, mixer.key_dim)
    factor = heads.new_full((mixer.key_dim,), scale * mixer.key_dim**-0.5)
    out: Tensor = given.ops.norm(heads, factor, None, _UNIT_EPS / mixer.key_dim, "rms", F32)
    return out


def _state_space(x: Tensor, mixer: Ssm, given: MixerContext) -> Tensor:
    w, inner, shared = given.weights, mixer.inner_size, mixer.num_groups * mixer.state_dim
    projected = given.linear(x if mixer.in_scale == 1.0 else x * mixer.in_scale, "in")
    sizes = (inner, inner, shared, shared, mixer.num_heads)
    if any(scale != 1.0 for scale in mixer.part_scales):
        parts = zip(projected.split(sizes, 1), mixer.part_scales, strict=True)
        projected = torch.cat([part * scale for part, scale in parts], 1)
    gate, rows, pace = projected.split([inner, mixer.conv_size, mixer.num_heads], 1)
    gate = silu(gate)
    parts = silu(given.convolved(rows)).split([inner, shared, shared], 1)
    heads, b, c = (
        part.reshape(len(x), count, -1).contiguous()
        for part, count in zip(parts, (mixer.num_heads, *2 * (mixer.num_groups,)), strict=True)
    )
    pace = torch.logaddexp(pace + w["dt_bias"], pace.new_zeros(1))
    decay = torch.exp(-torch.exp(w["a_log"]) * pace)
    memory = given.states["memory"]
    output = given.ops.scan(heads, b, c, pace.contiguous(), decay, w["skip"], memory, given.plan)
    output = output.reshape(len(x), -1)
    if not mixer.norm_first:
        output = output * gate
    if mixer.gated_norm:
        groups = output.reshape(len(x), mixer.num_groups, -1)
        normed = given.ops.norm(groups, None, None, given.eps, "rms", F32)
        output = normed.reshape(len(x), -1) * w["gated_scale"]
    if mixer.norm_first:
        output = output * gate
    out = given.linear(output.to(x.dtype), "out")
    return out if mixer.out_scale == 1.0 else out * mixer.out_scale
