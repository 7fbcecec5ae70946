"""The order of rows in tensors that hold several parts, sorted by head first in some families."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.families.family import Family
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import Experts, ModelArch
from ridgeline.model.shape.recurrent import Delta

Order = NDArray[np.intp]


def row_order(arch: ModelArch, family: Family, parts: list[str]) -> Order | None:
    """Return which row of a file's tensor comes where, if its ``parts`` are not one by one there.

    ``parts`` are canonical names of the tensors that it holds, in order.
    """
    if parts[0].startswith("layers.") and (order := _of_latent(arch, family, parts)) is not None:
        return order
    index, names = parts[0].split(".")[1:2], tuple(part.rpartition(".")[2] for part in parts)
    if family.heads_inside and len(parts) == 3:  # of each key head: its queries, itself, its values
        one = arch.attentions[0]
        served = one.num_heads // one.num_kv_heads
        return _by_part((served * one.head_dim, one.head_dim, one.head_dim), one.num_kv_heads)
    if names in (("gate", "up"), ("gate_bias", "up_bias")):
        ffn = arch.layers[int(index[0])].ffn
        if not isinstance(ffn, Experts):
            return None
        run = 1 if family.gates_by_turns else ffn.size
        return _by_part((run, run), ffn.num * ffn.size // run)
    if names == ("q", "q_gate"):
        attention = arch.layers[int(index[0])].known_attention
        return _by_part((attention.head_dim,) * 2, attention.num_heads)
    if names in (("qkv", "z"), ("beta", "decay")):
        mixer = arch.layers[int(index[0])].mixer
        assert isinstance(mixer, Delta)
        served = mixer.num_value_heads // mixer.num_key_heads
        values = served * mixer.value_dim
        sizes = (
            (mixer.key_dim, mixer.key_dim, values, values) if names[0] == "qkv" else (served,) * 2
        )
        return _by_part(sizes, mixer.num_key_heads)
    return None


def _of_latent(arch: ModelArch, family: Family, parts: list[str]) -> Order | None:
    """Return the order of rows of latent attention: of a query head what turns comes first.

    Files have it last, as behind the latent in "kv_a".
    """
    index, names = int(parts[0].split(".")[1]), [part.rpartition(".")[2] for part in parts]
    mixer = arch.layers[index].attention
    if mixer is None or mixer.latent is None:
        return None
    latent, turning = mixer.latent, np.arange(mixer.rope_dim)
    if family.interleaved:
        turning = turning.reshape(-1, 2).T.reshape(-1)
    if names == ["k_b", "v_b"]:
        return _by_part((latent.nope_dim, latent.v_dim), mixer.num_heads)
    if names not in (["q"], ["q_b"], ["kv_a"]):
        return None
    before, count = (latent.kv_rank, 1) if names == ["kv_a"] else (latent.nope_dim, mixer.num_heads)
    of_head = np.concatenate([before + turning, np.arange(before)])
    begins = np.arange(count) * len(of_head)
    return np.asarray((begins[:, None] + of_head).reshape(-1))


def expert_halves(
    arch: ModelArch, family: Family, parts: list[str], tensor: Tensor
) -> list[Tensor] | None:
    """Return gates and inner values of all experts, of a tensor that has each expert's in turn.

    Each is a stack of rows that stay in the file: in order they would be copied, all of them. None
    for other tensors.
    """
    names = tuple(part.rpartition(".")[2] for part in parts)
    if names != ("gate", "up") or family.gates_by_turns or tensor.make is not None:
        return None
    ffn = arch.layers[int(parts[0].split(".")[1])].ffn
    if not isinstance(ffn, Experts):
        return None
    halves: list[Tensor] = []
    for half in range(2):
        if tensor.parts:  # each of an expert
            own = slice(half * ffn.size, (half + 1) * ffn.size)
            rows = [part.rows(own) for part in tensor.parts]
            halves.append(Tensor.stacked(f"{tensor.name}/{parts[half]}", rows))
            continue
        begins = ((2 * e + half) * ffn.size for e in range(ffn.num))
        rows = [tensor.rows(slice(begin, begin + ffn.size)) for begin in begins]
        halves.append(Tensor.stacked(f"{tensor.name}/{parts[half]}", rows))
    return halves


def _by_part(sizes: tuple[int, ...], num_heads: int) -> Order:
    """Return the order that takes rows sorted by head to rows sorted by part.

    ``sizes`` are the rows of each part in a head.
    """
    rows = np.arange(num_heads * sum(sizes)).reshape(num_heads, -1)
    ends = np.cumsum(sizes)[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(rows, ends, axis=1)])
