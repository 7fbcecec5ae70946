"""Which rows of which tensor one of several ranks has. It imports no torch.

Every matrix is divided by its outputs. So a sum over inputs is whole on one rank, and has the same
order as on a single GPU. Query heads are divided evenly, and key heads as far as there are enough:
where there are fewer than ranks, each is on several. What the layers' sums read whole (norms,
routers, what makes latents) is on every rank, and so are states, and the matrices beside them whose
outputs cannot be divided evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.cost.shapes import check_ranks
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, ModelArch

_OF_HEADS = ("q", "q_gate", "sinks", "q_b", "k_b", "v_b")
_OF_KV_HEADS = ("k", "v")


class Units(NamedTuple):
    """How a tensor's rows are divided: in ``runs`` of equal length, one for each expert, and each
    of these in ``units`` that stay together; if it must be ``is_even``, only if each rank gets
    equally many.
    """

    runs: int
    units: int
    is_even: bool = False


@dataclass(frozen=True)
class Shard:
    """What rank ``rank`` of ``count`` has of a model."""

    whole: ModelArch
    rank: int = 0
    count: int = 1

    @cached_property
    def arch(self) -> ModelArch:
        """The model with as many heads and inner channels as this rank has."""
        if self.count == 1:
            return self.whole
        shares = {layer: self._layer(layer) for layer in set(self.whole.layers)}
        return replace(self.whole, layers=tuple(shares[layer] for layer in self.whole.layers))

    def num_rows(self, name: str, num_rows: int) -> int:
        """Return how many of a tensor's rows this rank has."""
        index = self.rows(name, num_rows)
        if isinstance(index, slice):
            return len(range(*index.indices(num_rows)))
        return len(index)

    def rows(self, name: str, num_rows: int) -> slice | NDArray[np.intp]:
        """Return which of the rows of a tensor this rank has, by its canonical name."""
        divided = None if self.count == 1 else _units(self.whole, name)
        if divided is None or (divided.is_even and divided.units % self.count):
            return slice(None)
        length = num_rows // divided.runs
        part = self._part(divided.units)
        of_unit = length // divided.units
        low, high = part.start * of_unit, part.stop * of_unit
        if divided.runs == 1:
            return slice(low, high)
        starts = np.arange(0, num_rows, length)
        return (starts[:, None] + np.arange(low, high)).reshape(-1)

    def _part(self, units: int) -> range:
        """Return which of some units this rank has; of the vocabulary the last rank has fewest."""
        if units < self.count:
            unit = self.rank * units // self.count
            return range(unit, unit + 1)
        each = -(-units // self.count)
        return range(min(self.rank * each, units), min((self.rank + 1) * each, units))

    def _layer(self, layer: Layer) -> Layer:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            heads = self._part(mixer.num_heads)
            mixer = replace(
                mixer,
                num_heads=len(heads),
                num_kv_heads=len(self._part(mixer.num_kv_heads)),
                slopes=mixer.slopes[heads.start : heads.stop],
            )
        return replace(layer, mixer=mixer, ffn=self._network(layer.ffn))

    def _network(self, ffn: Mlp | Experts) -> Mlp | Experts:
        if not isinstance(ffn, Experts):
            return self._dense(ffn)
        shared, beside = (one and self._dense(one) for one in (ffn.shared, ffn.beside))
        return replace(ffn, size=ffn.size // self.count, shared=shared, beside=beside)

    def _dense(self, network: Mlp) -> Mlp:
        return replace(network, size=network.size // self.count)


def _units(arch: ModelArch, name: str) -> Units | None:
    """Return how a tensor's rows are divided; None for one that every rank has."""
    if name in ("embed", "head", "head_bias"):
        return Units(1, arch.vocab_size)
    place, _, last = name.rpartition(".")
    if not place:
        return None
    layer, last = arch.layers[int(place.rpartition(".")[2])], last.removesuffix("_bias")
    mixer, ffn = layer.attention, layer.ffn
    if mixer is not None and last in _OF_HEADS:
        return Units(1, mixer.num_heads)
    if mixer is not None and last in _OF_KV_HEADS:
        return Units(1, mixer.num_kv_heads)
    beside_states = {} if layer.recurrent is None else layer.recurrent.shapes(arch.hidden_size)
    if len(beside_states.get(last, ())) == 2 and last != "conv":  # which is for states
        return Units(1, beside_states[last][0], is_even=True)
    if last == "o":
        return Units(1, arch.hidden_size)
    runs = ffn.num if isinstance(ffn, Experts) else 1
    networks = {"": (runs, ffn.size)}
    for prefix, network in _dense(ffn):
        networks[f"{prefix}_"] = 1, network.size
    for prefix, (count, size) in networks.items():
        if last in (f"{prefix}gate", f"{prefix}up"):
            return Units(count, size)
        if last == f"{prefix}down":
            return Units(count, arch.hidden_size)
    return None


def _dense(ffn: Mlp | Experts) -> Iterator[tuple[str, Mlp]]:
    """Yield the dense networks beside experts."""
    if isinstance(ffn, Experts):
        networks = (("shared", ffn.shared), ("beside", ffn.beside))
        yield from ((name, network) for name, network in networks if network is not None)


def check(arch: ModelArch, count: int) -> None:
    """Raise ValueError, with the way out, unless a model can be divided among ``count`` ranks."""
    if count == 1:
        return
    check_ranks(shape_of_arch(arch, ""), count)
    flag = f"--tensor-parallel-size {count}"
    for layer in arch.layers:
        sizes = {"inner channels": layer.ffn.size}
        sizes |= {f"channels of the {name} network": one.size for name, one in _dense(layer.ffn)}
        for what, size in ({"channels": arch.hidden_size} | sizes).items():
            if size % count:
                raise ValueError(f"{flag} does not divide {size} {what}")
