"""The output head once more in 5 bits, with bounds on what that loses: a low-precision proxy.

Greedy decoding of a few rows reads the proxy, and of the head itself only tiles that could still
hold the likeliest token (``emit.argmax``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.formats import TILE
from ridgeline.backends.cpu.layout.pack import PackedMatrix, pack_nibbles, unpack_w8
from ridgeline.backends.cpu.layout.quantise import Bytes, nonzero

_TILES_AT_ONCE = 64


def proxy(head: PackedMatrix) -> tuple[PackedMatrix, NDArray[np.float32]] | None:
    """Return a w8 matrix again in 5 bits, and each output's distance from it; None if not finite.

    Outputs have much in common, which would make their steps coarse: it is taken off, and stands
    behind them as the first output of one more tile. However head and proxy are multiplied by
    activations x, a result differs from its own plus the common one by at most the distance times
    the length of x: the distance (Euclidean) holds what all three may lose by rounding.
    """
    parts = range(0, len(head.data), _TILES_AT_ONCE)
    total = sum(_weights_of(head, low)[0].sum(axis=0) for low in parts)
    mean = np.zeros((TILE, len(total)), np.float32)
    mean[0] = total / (len(head.data) * TILE)
    with np.errstate(over="ignore", invalid="ignore"):  # checked at the end
        centre = _to_five_bits(mean)
        common = _of_five_bits(*centre)[0]
        tiles, distances = [], []
        for low in parts:
            weights, scale = _weights_of(head, low)
            own = _to_five_bits(weights - common)
            lost = weights - common - _of_five_bits(*own)
            # Bounds on a record's terms, without the sum of 32 activations.
            terms = 384 * scale + 47 * np.abs(own[1]) + 47 * np.abs(centre[1][0])
            rounding = (terms.shape[1] + 16) * 2.0**-24 * TILE**0.5
            lengths = [np.linalg.norm(part, axis=1) for part in (lost, terms)]
            distances.append(1.001 * lengths[0] + rounding * lengths[1])
            tiles.append(pack_nibbles("s5", *own).data)
    tiles.append(pack_nibbles("s5", *centre).data)
    distance = np.concatenate(distances).astype(np.float32)
    return (
        (PackedMatrix("s5", np.concatenate(tiles)), distance)
        if np.isfinite(distance).all()
        else None
    )


def _weights_of(head: PackedMatrix, low: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weights and scales of some tiles of a w8 matrix, from ``low`` on."""
    q, scale = unpack_w8(head.data[low : low + _TILES_AT_ONCE])
    wide = scale.astype(np.float32)
    return q.astype(np.float32) * np.repeat(wide, TILE, axis=1), wide


def _to_five_bits(weights: NDArray[np.float32]) -> tuple[Bytes, NDArray[np.float16]]:
    """Quantise to 5 bits with a scale for each 32: as Q5_0 does, w = d (q - 16)."""
    groups = weights.reshape(len(weights), -1, TILE)
    place = np.abs(groups).argmax(axis=2)
    largest = np.take_along_axis(groups, place[:, :, None], axis=2)[:, :, 0]
    scale = (largest / -16).astype(np.float16)
    q = np.rint(groups / nonzero(scale)[:, :, None]).clip(-16, 15) + 16
    return q.astype(np.uint8).reshape(weights.shape), scale


def _of_five_bits(q: Bytes, scale: NDArray[np.float16]) -> NDArray[np.float32]:
    """Return the weights that ``_to_five_bits`` quantised."""
    return (q.astype(np.float32) - 16) * np.repeat(scale.astype(np.float32), TILE, axis=1)
