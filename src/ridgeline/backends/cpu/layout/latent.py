"""Padded parts of latent attention (``model.shape.latent``), and where a row keeps them.

All query heads meet one key. To the kernels of attention they stand in groups, each with a key head
of its own, all of which lie in the same records: so several threads can share a row's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.pack import Index, padded, to_lanes
from ridgeline.model.shape.model import Attention

_MOST_TOGETHER = 4  # query heads that stand in a group
Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """What code for latent attention depends on, beside the shape of heads.

    Attributes:
        turning: padded channels of a head that turn.
        nope: padded channels of a query head that do not turn.
        rank: padded channels of a latent.
        value: padded channels of a head's value.
        num_channels: of a latent, before padding.
        q_rank: padded channels that a row is compressed to; 0 where it is not.
        num_q_channels: of them, before padding.
        eps: of both norms.
        is_wide: "k_b" and "v_b" are f32, else f16.
    """

    turning: int
    nope: int
    rank: int
    value: int
    num_channels: int
    q_rank: int
    num_q_channels: int
    eps: float
    is_wide: bool

    @property
    def q_head(self) -> int:
        """Channels of a query head before it is absorbed."""
        return self.turning + self.nope

    @property
    def weight_type(self) -> type[np.floating]:
        """Of the weights of "k_b" and "v_b"."""
        return np.float32 if self.is_wide else np.float16

    def columns(self, num_heads: int) -> dict[str, int]:
        """Return where in a row results of matrices begin, in floats, and where all end ("")."""
        key_at = padded(num_heads * self.q_head)
        q_at = key_at + padded(self.turning + self.rank)
        return {"q": 0, "q_b": 0, "kv_a": key_at, "q_a": q_at, "": q_at + self.q_rank}


def latent_heads(mixer: Attention, dtype: str) -> LatentHeads | None:
    """Return the padded parts of a layer's attention; None if it has no latent."""
    latent = mixer.latent
    if latent is None:
        return None
    return LatentHeads(
        turning=2 * to_lanes(mixer.rope_dim // 2),
        nope=to_lanes(latent.nope_dim),
        rank=to_lanes(latent.kv_rank),
        value=padded(latent.v_dim),  # all heads together are what o reads
        num_channels=latent.kv_rank,
        q_rank=padded(latent.q_rank),
        num_q_channels=latent.q_rank,
        eps=latent.norm_eps,
        is_wide=dtype in ("f32", "bf16"),
    )


def num_groups(num_heads: int) -> int:
    """Return in how many groups query heads stand: as few as go."""
    return num_heads // max(n for n in range(1, _MOST_TOGETHER + 1) if num_heads % n == 0)


def latent_places(
    mixer: Attention, heads: LatentHeads
) -> tuple[dict[str, Index], dict[str, Index]]:
    """Return where outputs of a layer's matrices come from, and inputs of o; -1 is padding."""
    assert mixer.latent is not None
    query = _parts(mixer, heads, mixer.latent.nope_dim, heads.nope)
    key = _parts(mixer, heads, mixer.latent.kv_rank, heads.rank)
    value = np.full(heads.value, -1)
    value[: mixer.latent.v_dim] = np.arange(mixer.latent.v_dim)
    queries = _of_heads(query, mixer.num_heads, mixer.head_dim)
    rows = {"q": queries, "q_b": queries, "kv_a": key}
    return rows, {"o": _of_heads(value, mixer.num_heads, mixer.latent.v_dim)}


def per_head(
    tensor: Callable[[str], NDArray[np.float32]], num_heads: int, heads: LatentHeads
) -> dict[str, Floats]:
    """Return "k_b" as ``[heads, nope, rank]`` and "v_b" as ``[heads, rank, value]``, padded.

    ``tensor`` returns a layer's tensor by its canonical name.
    """
    arrays: dict[str, Floats] = {}
    for name in ("k_b", "v_b"):
        by_head = tensor(name).reshape(num_heads, -1, heads.num_channels)
        if name == "v_b":
            by_head = by_head.swapaxes(1, 2)
        arrays[name] = np.zeros((num_heads, *head_shape(name, heads)), heads.weight_type)
        arrays[name][:, : by_head.shape[1], : by_head.shape[2]] = by_head
    return arrays


def head_shape(name: str, heads: LatentHeads) -> tuple[int, int]:
    """Return the inputs and outputs of a head's part of "k_b" or "v_b"."""
    return (heads.nope, heads.rank) if name == "k_b" else (heads.rank, heads.value)


def _parts(mixer: Attention, heads: LatentHeads, rest: int, room: int) -> Index:
    """Return where a head's channels come from: both halves that turn, and the rest."""
    pairs, half = mixer.rope_dim // 2, heads.turning // 2
    out = np.full(heads.turning + room, -1)
    out[:pairs] = np.arange(pairs)
    out[half : half + pairs] = np.arange(pairs, 2 * pairs)
    out[heads.turning : heads.turning + rest] = np.arange(2 * pairs, 2 * pairs + rest)
    return out


def _of_heads(channels: Index, count: int, num_channels: int) -> Index:
    first = np.arange(count)[:, None] * num_channels
    return np.where(channels < 0, -1, channels + first).reshape(-1)
