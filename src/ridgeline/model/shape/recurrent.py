"""Mixers that keep a state of fixed size instead of keys and values, as structural facts.

A state has named parts, all float32. Each is a state of one sequence in one layer; ``window`` holds
the last inputs of a causal convolution, oldest first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Conv:
    """A short convolution between two gates (LFM2; Liquid AI, 2025).

    Attributes:
        kernel: how many last tokens it sees, the present one included.
        bias: both projections and the convolution have a bias.
    """

    kernel: int
    bias: bool = False

    def shapes(self, hidden_size: int) -> Shapes:
        """Return canonical name and shape ``(out, in)`` of each of its tensors."""
        shapes: Shapes = {
            "in": (3 * hidden_size, hidden_size),
            "conv": (hidden_size, self.kernel),
            "out": (hidden_size, hidden_size),
        }
        if self.bias:
            shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
        return shapes

    def state_shapes(self, hidden_size: int) -> Shapes:
        """Return name and shape of each part of a sequence's state."""
        return {"window": (self.kernel - 1, hidden_size)}


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated linear attention with the delta rule (Yang et al., "Gated Delta Networks", 2024).

    Queries, keys and values pass a causal convolution. A value head has a state of ``key_dim`` by
    ``value_dim``; each key head serves ``num_value_heads // num_key_heads`` of them.

    Attributes:
        num_key_heads: heads of queries and of keys.
        num_value_heads: heads of values.
        key_dim: channels of a query or key head.
        value_dim: channels of a value head.
        kernel: how many last tokens the convolution sees.
        by_turns: key heads serve value heads by turns; else each serves those of a run.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    by_turns: bool = False

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_dim

    def shapes(self, hidden_size: int) -> Shapes:
        """Return canonical name and shape ``(out, in)`` of each of its tensors."""
        channels = 2 * self.key_size + self.value_size
        return {
            "qkv": (channels, hidden_size),
            "z": (self.value_size, hidden_size),
            "beta": (self.num_value_heads, hidden_size),
            "decay": (self.num_value_heads, hidden_size),
            "conv": (channels, self.kernel),
            "dt_bias": (self.num_value_heads,),
            "a_log": (self.num_value_heads,),
            "gated_scale": (self.value_dim,),
            "out": (hidden_size, self.value_size),
        }

    def state_shapes(self, hidden_size: int) -> Shapes:
        """Return name and shape of each part of a sequence's state."""
        return {
            "window": (self.kernel - 1, 2 * self.key_size + self.value_size),
            "memory": (self.num_value_heads, self.key_dim, self.value_dim),
        }


@dataclass(frozen=True, slots=True)
class Ssm:
    """A state space model with one decay a head (Mamba-2; Dao and Gu, 2024).

    Attributes:
        num_heads: heads.
        head_dim: channels of a head.
        state_dim: values that are kept of each channel.
        num_groups: of heads that share B and C.
        kernel: how many last tokens the convolution sees.
        conv_bias: the convolution has a bias.
        bias: both projections have one.
        gated_norm: the output is normed, in groups, behind its gate.
        norm_first: it is normed before its gate instead.
        in_scale: multiplies the input.
        out_scale: multiplies the output.
        part_scales: multiply what is projected: the gate, x, B, C, and the pace of forgetting.
        step_rank: channels that the pace of forgetting is made of where it, B and C are projected
            behind the convolution, and each channel is a head (the first Mamba; Gu and Dao, 2023).
            No backend computes it. 0: they stand beside x and the gate.
        part_norms: these three are normed (Jamba).
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    gated_norm: bool = True
    norm_first: bool = False
    in_scale: float = 1.0
    out_scale: float = 1.0
    part_scales: tuple[float, ...] = (1.0,) * 5
    step_rank: int = 0
    part_norms: bool = False

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels that pass the convolution: those of the heads, of B and of C."""
        beside = 0 if self.step_rank else 2 * self.num_groups * self.state_dim
        return self.inner_size + beside

    def shapes(self, hidden_size: int) -> Shapes:
        """Return canonical name and shape ``(out, in)`` of each of its tensors."""
        shapes: Shapes = {
            "in": (self.inner_size + self.conv_size + self.num_heads, hidden_size),
            "conv": (self.conv_size, self.kernel),
            "dt_bias": (self.num_heads,),
            "a_log": (self.num_heads,),
            "skip": (self.num_heads,),
            "out": (hidden_size, self.inner_size),
        }
        if self.conv_bias:
            shapes["conv_bias"] = (self.conv_size,)
        if self.bias:
            shapes |= {"in_bias": shapes["in"][:1], "out_bias": (hidden_size,)}
        if self.gated_norm:
            shapes["gated_scale"] = (self.inner_size,)
        return shapes

    def state_shapes(self, hidden_size: int) -> Shapes:
        """Return name and shape of each part of a sequence's state."""
        return {
            "window": (self.kernel - 1, self.conv_size),
            "memory": (self.num_heads, self.head_dim, self.state_dim),
        }


Recurrent = Conv | Delta | Ssm


def num_matrix_weights(mixer: Recurrent, hidden_size: int) -> int:
    """Return how many weights of linear maps a token meets."""
    shapes = mixer.shapes(hidden_size)
    return sum(math.prod(shape) for name, shape in shapes.items() if shape[1:] and name != "conv")


def num_state_values(mixer: Recurrent, hidden_size: int) -> int:
    """Return how many values a sequence's state has."""
    return sum(math.prod(shape) for shape in mixer.state_shapes(hidden_size).values())
