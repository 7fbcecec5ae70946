"""Does a row keep its bits in any batch, and a text however it is cut?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.measure.inputs import texts
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.measure.shapes import Shape, models
from ridgeline.backends.cuda.packed import pack
from ridgeline.backends.cuda.step.graphs import SIZES

_CUTS = ((1299, 1300), (1290, 1300), (600, 1300), (37, 1101), (0, 3))


def measure(part: Part) -> None:
    """Compare rows alone with the same rows in batches of all sizes, at three places."""
    part.run(_cases(part), need_s=5)


def _cases(part: Part) -> Iterator[Case]:
    shapes = models(part)
    for name, shape in shapes.items():
        yield f"{name} attention", partial(_attention, part, name, shape)
    for name, shape in shapes.items():
        for matrix, size in shape.matrices().items():
            yield f"{name} {matrix}", partial(_matrix, part, f"{name} {matrix}", size)


def _matrix(part: Part, name: str, size: tuple[int, int]) -> None:
    N, K = size
    weight = part.normal(N, K, scale=K**-0.5)
    sizes = (1, 2, 40) if part.is_tiny else SIZES
    rows = part.normal(max(sizes), K)
    for who, call in (("ours", part.ops.product), ("torch", torch.nn.functional.linear)):
        bad = _differing(partial(_of, call, weight), rows, sizes)
        if who == "ours":
            part.same_bits(f"{name}, {who}", not bad, sizes=len(sizes), bad=bad[:6])
        else:  # what a library would do: nothing depends on it
            part.say(f"{name}, {who}", same_bits=not bad)
    for bits in (8, 4):
        bad = _differing(partial(_of, part.ops.packed_product, pack(weight, bits)), rows, sizes)
        part.same_bits(f"{name}, int{bits}", not bad, sizes=len(sizes), bad=bad[:6])


def _of(call: Any, weight: Any, x: Tensor) -> Tensor:
    out: Tensor = call(x, weight, None)
    return out


def _differing(call: Any, rows: Tensor, sizes: Any) -> list[tuple[int, int]]:
    """Return sizes and places at which the first row has other bits than alone."""
    alone, bad = call(rows[:1])[0], []
    for size in sizes:
        for place in sorted({0, size // 2, size - 1}):
            batch = rows[:size].clone()
            batch[[0, place]] = batch[[place, 0]]
            if not torch.equal(call(batch)[place], alone):
                bad.append((size, place))
    return bad


def _attention(part: Part, name: str, shape: Shape) -> None:
    whole = texts(part, shape.of_heads, [(0, 1300)])
    wanted = part.ops.attend(*whole.given())
    for start, end in _CUTS:
        cut = whole.piece(start, end)
        found = part.ops.attend(*cut.given())
        is_same = torch.equal(found, wanted[start:end])
        part.same_bits(f"{name} attention, tokens {start} to {end} alone", is_same)
