"""Rows and states of recurrent layers in memory: which column is what, and how weights are placed.

A row has all that a layer projects of a token. Heads are padded with zeros to whole vectors of 16
floats, and what belongs together to whole tiles of 32; padding stays zero through everything. What
a recurrence makes of a row replaces columns of it.

A state lies in its slot layer by layer: the ``window`` of the convolution, ``[tokens, channels]``,
oldest first, then the ``memory``, ``[heads, columns / 16, rows, 16]``: with its rows a head turns a
key, or the B of a state space, into the 16 values that are read and written together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.pack import Index, padded, to_lanes
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm

Floats = NDArray[np.float32]
RATES = 4  # floats that a head has beside its matrices: see ``vectors``
# What is no matrix, and the vector that it is in; ``rates`` stand for all that is in them.
TENSORS = {
    "conv": "conv", "conv_bias": "conv_bias", "in_bias": "in_bias", "out_bias": "o_bias",
    "gated_scale": "gated_scale", "a_log": "rates", "dt_bias": "", "skip": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The shape of a recurrent mixer for kernels; counts are of floats.

    Attributes:
        mixer: its facts.
        hidden_size: width of the residual stream, before padding.
        columns: where each projection begins in a row, by the name of its matrix.
        width: of a row.
        conv_at: the column where what passes the convolution begins.
        channels: of the convolution.
        output_at: the column where what the recurrence makes of a row begins.
        output_width: how many columns that has.
        num_heads: heads with a memory; 0 for none.
        rows: of a head's memory.
        head_width: columns of a head's memory.
    """

    mixer: Recurrent
    hidden_size: int
    columns: tuple[tuple[str, int], ...]
    width: int
    conv_at: int
    channels: int
    output_at: int
    output_width: int
    num_heads: int = 0
    rows: int = 0
    head_width: int = 0

    @property
    def gate_at(self) -> int:
        """The column where the gate of what memories give begins."""
        return dict(self.columns).get("z", 0)

    @property
    def stride(self) -> int:
        """Bytes from row to row; off the multiples of a page."""
        return (self.width + 48) * 4

    @property
    def window(self) -> int:
        """Floats of the convolution's window."""
        return (self.mixer.kernel - 1) * self.channels

    @property
    def memory(self) -> int:
        """Floats of the memory of all heads."""
        return self.num_heads * self.rows * self.head_width

    @property
    def state(self) -> int:
        """Floats of a sequence's state in a layer."""
        return self.window + self.memory


def recurrence(mixer: Recurrent, hidden_size: int) -> Recurrence:
    """Return how rows and states of a mixer lie in memory."""
    match mixer:
        case Conv():
            size = padded(hidden_size)
            return Recurrence(
                mixer, hidden_size, (("in", 0),), 3 * size, conv_at=0, channels=size, output_at=0,
                output_width=size,
            )  # fmt: skip
        case Delta():
            keys = len(_heads(mixer.num_key_heads, mixer.key_dim))
            values = len(_heads(mixer.num_value_heads, mixer.value_dim))
            beta, gates = 2 * keys + 2 * values, padded(mixer.num_value_heads)
            columns = {"qkv": 0, "z": 2 * keys + values, "beta": beta, "decay": beta + gates}
            return Recurrence(
                mixer, hidden_size, tuple(columns.items()), beta + 2 * gates, conv_at=0,
                channels=2 * keys + values, output_at=2 * keys, output_width=values,
                num_heads=mixer.num_value_heads, rows=to_lanes(mixer.key_dim),
                head_width=to_lanes(mixer.value_dim),
            )  # fmt: skip
        case Ssm():
            inner = len(_heads(mixer.num_heads, mixer.head_dim))
            shared = len(_heads(mixer.num_groups, mixer.state_dim))
            return Recurrence(
                mixer, hidden_size, (("in", 0),),
                2 * inner + 2 * shared + 2 * padded(mixer.num_heads), conv_at=inner,
                channels=inner + 2 * shared, output_at=inner, output_width=inner,
                num_heads=mixer.num_heads, rows=to_lanes(mixer.state_dim),
                head_width=to_lanes(mixer.head_dim),
            )  # fmt: skip


def places(shape: Recurrence) -> dict[str, tuple[Index | None, Index | None]]:
    """Return where outputs and inputs of each matrix come from, by name; -1 is padding.

    None where a matrix need only be padded at its end: then blocks of a file stay whole.
    """
    mixer, channels, hidden = shape.mixer, _channels(shape), shape.hidden_size
    match mixer:
        case Conv():
            parts = [np.where(channels < 0, -1, channels + i * hidden) for i in range(3)]
            return {"in": (_moved(np.concatenate(parts)), None)}
        case Delta():
            values = _moved(_heads(mixer.num_value_heads, mixer.value_dim))
            return {"qkv": (_moved(channels), None), "z": (values, None), "out": (None, values)}
        case Ssm():
            inner = _heads(mixer.num_heads, mixer.head_dim)
            conv = np.where(channels < 0, -1, channels + mixer.inner_size)
            pace = np.arange(mixer.num_heads) + mixer.inner_size + mixer.conv_size
            whole = np.concatenate([inner, conv, pace])
            return {"in": (_moved(whole), None), "out": (None, _moved(inner))}


def vectors(shape: Recurrence, tensor: Callable[[str], Floats]) -> dict[str, Floats]:
    """Return what a layer has beside its matrices, by name, for kernels.

    ``tensor`` returns a tensor by its canonical name. ``conv`` is ``[tokens, channels]``; ``rates``
    has for each head -exp(a_log), what is added to its pace, skip and a zero. Scales of a state
    space's parts are in the weights of its convolution, as far as they go through it.
    """
    mixer, channels = shape.mixer, _channels(shape)
    by_name = {"conv": np.stack([_placed(row, channels) for row in tensor("conv").T])}
    if has_conv_bias(mixer):
        by_name["conv_bias"] = _placed(tensor("conv_bias"), channels)
    if isinstance(mixer, Conv):
        if mixer.bias:
            (rows, _) = places(shape)["in"]
            by_name["in_bias"] = _placed(tensor("in_bias"), rows, 3 * shape.channels)
            by_name["o_bias"] = _placed(tensor("out_bias"), None, padded(shape.hidden_size))
        return by_name
    rates = np.zeros((shape.num_heads, RATES), np.float32)
    rates[:, 0] = -np.exp(tensor("a_log"))
    rates[:, 1] = tensor("dt_bias")
    if isinstance(mixer, Ssm):
        rates[:, 2] = tensor("skip")
        by_name["conv"] *= _conv_scales(mixer, shape)
        if mixer.bias:
            (rows, _) = places(shape)["in"]
            size = shape.width - padded(mixer.num_heads)
            by_name["in_bias"] = _placed(tensor("in_bias"), rows, size) / np.float32(mixer.in_scale)
            rates[:, 1] += tensor("in_bias")[-mixer.num_heads :] * np.float32(mixer.part_scales[4])
            bias = tensor("out_bias") * np.float32(mixer.out_scale)
            by_name["o_bias"] = _placed(bias, None, padded(shape.hidden_size))
        if mixer.gated_norm:
            inner = _heads(mixer.num_heads, mixer.head_dim)
            by_name["gated_scale"] = _placed(tensor("gated_scale"), inner)
    else:
        scales = np.tile(tensor("gated_scale"), mixer.num_value_heads)
        values = _heads(mixer.num_value_heads, mixer.value_dim)
        by_name["gated_scale"] = _placed(scales, values)
    return by_name | {"rates": rates}


def vector_sizes(shape: Recurrence) -> dict[str, int]:
    """Return how many floats each of ``vectors`` has."""
    mixer = shape.mixer
    lengths = {"conv": mixer.kernel * shape.channels}
    if has_conv_bias(mixer):
        lengths["conv_bias"] = shape.channels
    if not isinstance(mixer, Delta) and mixer.bias:
        unused = padded(mixer.num_heads) if isinstance(mixer, Ssm) else 0
        lengths |= {"in_bias": shape.width - unused, "o_bias": padded(shape.hidden_size)}
    if isinstance(mixer, Delta) or (isinstance(mixer, Ssm) and mixer.gated_norm):
        lengths["gated_scale"] = shape.output_width
    if shape.num_heads:
        lengths["rates"] = shape.num_heads * RATES
    return lengths


def has_conv_bias(mixer: Recurrent) -> bool:
    """Return whether the convolution has a bias."""
    match mixer:
        case Conv():
            return mixer.bias
        case Ssm():
            return mixer.conv_bias
    return False


def _conv_scales(mixer: Ssm, shape: Recurrence) -> Floats:
    """Return what multiplies each channel before the convolution."""
    inner = len(_heads(mixer.num_heads, mixer.head_dim))
    shared = len(_heads(mixer.num_groups, mixer.state_dim))
    scales = [scale * mixer.in_scale for scale in mixer.part_scales[1:4]]
    return np.repeat(np.array(scales, np.float32), (inner, shared, shared))


def _channels(shape: Recurrence) -> Index:
    """Return which channel of the convolution's tensor stands where; -1 is padding."""
    match mixer := shape.mixer:
        case Conv():
            fill = np.full(shape.channels - shape.hidden_size, -1)
            return np.concatenate([np.arange(shape.hidden_size), fill])
        case Delta():
            keys, first_value = (mixer.num_key_heads, mixer.key_dim), 2 * mixer.key_size
            parts = [_heads(*keys), _heads(*keys, mixer.key_size)]
            parts.append(_heads(mixer.num_value_heads, mixer.value_dim, first_value))
        case Ssm():
            groups, first = (mixer.num_groups, mixer.state_dim), mixer.inner_size
            parts = [_heads(mixer.num_heads, mixer.head_dim), _heads(*groups, first)]
            parts.append(_heads(*groups, first + mixer.num_groups * mixer.state_dim))
    return np.concatenate(parts)


def _heads(count: int, size: int, first: int = 0) -> Index:
    """Return which channel stands where in padded heads of ``size``, the first of them given."""
    channels = np.full((count, to_lanes(size)), -1)
    channels[:, :size] = first + np.arange(count * size).reshape(count, size)
    flat = channels.reshape(-1)
    return np.concatenate([flat, np.full(padded(len(flat)) - len(flat), -1)])


def _moved(index: Index) -> Index | None:
    """Return None for places that are no others than those that padding at the end gives."""
    size = int(index.max()) + 1
    return None if (index[:size] == np.arange(size)).all() else index


def _placed(values: Floats, index: Index | None, size: int = 0) -> Floats:
    """Return values where ``index`` wants them, zeros elsewhere; without one at the beginning."""
    index = np.arange(len(values)) if index is None else index
    out = np.zeros(max(size, len(index)), np.float32)
    out[: len(index)][index >= 0] = values[index[index >= 0]]
    return out
