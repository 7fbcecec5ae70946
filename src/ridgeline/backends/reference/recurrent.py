"""Mixers that keep a state, in numpy, float32: one token after another.

A recurrence takes rows of one sequence, ``[tokens, channels]``, and its state, which it replaces.
Every operation on a token has the same shape whatever stands beside it. So no bit depends on how a
text was cut. Linear maps, which need no state, take all rows of a step together.

States stand in slots, one array for each part and layer. A step reads them from their slots and
writes them when all of it is computed. So a step that failed can be executed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.reference.parts import linear, rms_norm, scaled, sigmoid, silu
from ridgeline.core.step import Work
from ridgeline.model.shape.model import ModelArch
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm

Floats = NDArray[np.float32]
State = dict[str, Floats]  # of one sequence in one layer: arch.recurrent names the parts
Recurrence = Callable[[Floats, State], Floats]
Through = Callable[[Floats, Recurrence], Floats]  # takes a step's rows through their states


def mix(x: Floats, weights: dict[str, Floats], mixer: Recurrent, eps: float, go: Through) -> Floats:
    """Return what a recurrent mixer adds to normed rows, ``[tokens, hidden]``.

    Args:
        x: rows of a step.
        weights: of the mixer, by canonical name.
        mixer: its facts.
        eps: of the norm behind its gate.
        go: takes rows of the same step through a recurrence, each sequence with its own state.
    """
    match mixer:
        case Conv():
            return _short_convolution(x, weights, go)
        case Delta():
            return _delta_net(x, weights, mixer, eps, go)
        case Ssm():
            return _state_space(x, weights, mixer, eps, go)


def _short_convolution(x: Floats, weights: dict[str, Floats], go: Through) -> Floats:
    before, behind, rows = np.split(linear(x, weights["in"], weights.get("in_bias")), 3, axis=1)
    output = go(before * rows, partial(_convolved, weights=weights))
    return linear(behind * output, weights["out"], weights.get("out_bias"))


def _delta_net(
    x: Floats, weights: dict[str, Floats], mixer: Delta, eps: float, go: Through
) -> Floats:
    names = ("qkv", "beta", "decay")
    rows = np.concatenate([linear(x, weights[name], None) for name in names], axis=1)
    output = go(rows, partial(_remembered, weights=weights, mixer=mixer))
    heads = output.reshape(len(x), mixer.num_value_heads, mixer.value_dim)
    heads = rms_norm(heads, weights["gated_scale"], eps)
    gate = silu(linear(x, weights["z"], None))
    return linear(heads.reshape(len(x), -1) * gate, weights["out"], None)


def _state_space(
    x: Floats, weights: dict[str, Floats], mixer: Ssm, eps: float, go: Through
) -> Floats:
    projected = linear(scaled(x, mixer.in_scale), weights["in"], weights.get("in_bias"))
    inner, shared = mixer.inner_size, mixer.num_groups * mixer.state_dim
    if any(scale != 1.0 for scale in mixer.part_scales):
        sizes = (inner, inner, shared, shared, mixer.num_heads)
        projected = projected * np.repeat(np.array(mixer.part_scales, np.float32), sizes)
    gate, rows = silu(projected[:, :inner]), projected[:, inner:]
    output = go(rows, partial(_scanned, weights=weights, mixer=mixer))
    if not mixer.norm_first:
        output = output * gate
    if mixer.gated_norm:
        groups = (mixer.num_groups, inner // mixer.num_groups)
        scale = weights["gated_scale"].reshape(groups)
        output = rms_norm(output.reshape(len(x), *groups), scale, eps).reshape(len(x), -1)
    if mixer.norm_first:
        output = output * gate
    return scaled(linear(output, weights["out"], weights.get("out_bias")), mixer.out_scale)


def _convolved(rows: Floats, state: State, weights: dict[str, Floats]) -> Floats:
    """Return each channel's weighted sum over its last tokens, the present one included."""
    kernel, bias = weights["conv"], weights.get("conv_bias")
    inputs = np.concatenate([state["window"], rows])
    state["window"] = inputs[len(rows) :]
    out = np.zeros_like(rows)
    for i in range(kernel.shape[1]):
        out += inputs[i : i + len(rows)] * kernel[:, i]
    return out if bias is None else out + bias


def _remembered(rows: Floats, state: State, weights: dict[str, Floats], mixer: Delta) -> Floats:
    """Return what queries read from memories that keys and values correct: the delta rule."""
    num_tokens, heads = len(rows), mixer.num_value_heads
    channels = 2 * mixer.key_size + mixer.value_size
    qkv, strength, decay = np.split(rows, [channels, channels + heads], axis=1)
    q, k, v = np.split(
        silu(_convolved(qkv, state, weights)), [mixer.key_size, 2 * mixer.key_size], axis=1
    )
    of_value_heads = np.arange(heads) * mixer.num_key_heads // heads
    if mixer.by_turns:
        of_value_heads = np.arange(heads) % mixer.num_key_heads
    q, k = (
        _unit(part.reshape(num_tokens, -1, mixer.key_dim))[:, of_value_heads] for part in (q, k)
    )
    q *= np.float32(mixer.key_dim**-0.5)
    v = v.reshape(num_tokens, heads, mixer.value_dim)
    strength = sigmoid(strength)
    decay = np.exp(-np.exp(weights["a_log"]) * _softplus(decay + weights["dt_bias"]))
    memory, out = state["memory"], np.empty_like(v)
    for t in range(num_tokens):
        memory = memory * decay[t, :, None, None]
        error = v[t] - (memory * k[t, :, :, None]).sum(axis=1)
        memory = memory + k[t, :, :, None] * (error * strength[t, :, None])[:, None]
        out[t] = (memory * q[t, :, :, None]).sum(axis=1)
    state["memory"] = memory
    return out.reshape(num_tokens, -1)


def _scanned(rows: Floats, state: State, weights: dict[str, Floats], mixer: Ssm) -> Floats:
    """Return what C reads from memories that forget at their own pace and take in B times x."""
    num_tokens, heads = len(rows), mixer.num_heads
    conv, pace = rows[:, : mixer.conv_size], rows[:, mixer.conv_size :]
    shared = mixer.num_groups * mixer.state_dim
    x, b, c = np.split(
        silu(_convolved(conv, state, weights)),
        [mixer.inner_size, mixer.inner_size + shared],
        axis=1,
    )
    x = x.reshape(num_tokens, heads, mixer.head_dim)
    b, c = (
        part.reshape(num_tokens, mixer.num_groups, -1).repeat(heads // mixer.num_groups, axis=1)
        for part in (b, c)
    )
    pace = _softplus(pace + weights["dt_bias"])
    decay = np.exp(-np.exp(weights["a_log"]) * pace)
    memory, out = state["memory"], np.empty_like(x)
    for t in range(num_tokens):
        taken = (x[t] * pace[t, :, None])[:, :, None] * b[t, :, None]
        memory = memory * decay[t, :, None, None] + taken
        out[t] = (memory * c[t, :, None]).sum(axis=2) + x[t] * weights["skip"][:, None]
    state["memory"] = memory
    return out.reshape(num_tokens, -1)


def _unit(heads: Floats) -> Floats:
    """Return heads of length 1, as their authors' kernels make them."""
    out: Floats = heads / np.sqrt((heads * heads).sum(axis=-1, keepdims=True) + np.float32(1e-6))
    return out


def _softplus(x: Floats) -> Floats:
    out: Floats = np.logaddexp(x, np.float32(0))
    return out


class RecurrentStates:
    """Slots of states; none is kept of a model without recurrent layers."""

    def __init__(self, arch: ModelArch, num_slots: int) -> None:
        """Allocate ``num_slots`` slots, at least one: for texts that no engine reads."""
        num_slots = max(num_slots, 1)
        self._by_layer: dict[int, State] = {}
        for index, layer in enumerate(arch.layers):
            if layer.recurrent is not None:
                parts = layer.recurrent.state_shapes(arch.hidden_size)
                self._by_layer[index] = {
                    name: np.zeros((num_slots, *shape), np.float32) for name, shape in parts.items()
                }
        self._new: list[tuple[Floats, int, Floats]] = []  # array, slot, what to write there

    def arrays(self) -> Iterator[Floats]:
        """Yield all arrays, ``[slots, ...]``."""
        for parts in self._by_layer.values():
            yield from parts.values()

    def begin(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy slots; all are read before one is written. Forget what a failed step computed."""
        self._new.clear()
        if copies:
            old, new = map(list, zip(*copies, strict=True))
            for array in self.arrays():
                array[new] = array[old]

    def go(
        self, layer: int, items: tuple[Work, ...], rows: Floats, recurrence: Recurrence
    ) -> Floats:
        """Take a step's rows, ``[tokens, channels]``, through a layer's recurrence.

        Each item continues its own state, zeros at its beginning. Where a state is to be saved the
        rows are cut.
        """
        outputs: list[Floats] = []
        first = 0
        for work in items:
            state = {
                name: array[work.state] if work.start else np.zeros_like(array[work.state])
                for name, array in self._by_layer[layer].items()
            }
            begin = 0
            for end, slot in (*work.save, (len(work.tokens), work.state)):
                if end > begin:
                    outputs.append(recurrence(rows[first + begin : first + end], state))
                for name, array in self._by_layer[layer].items():
                    self._new.append((array, slot, state[name]))
                begin = end
            first += begin
        return np.concatenate(outputs)

    def end(self) -> None:
        """Write what a step computed."""
        for array, slot, values in self._new:
            array[slot] = values
        self._new.clear()
