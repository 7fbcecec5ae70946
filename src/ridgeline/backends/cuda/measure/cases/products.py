"""Products: plain, packed, of experts, of heads that have a matrix each, and of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.adapters import adapters, plan_of
from ridgeline.backends.cuda.measure.inputs.layers import experts, experts_name, pack_experts
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.model.experts import meet, meet_heads
from ridgeline.backends.cuda.packed import pack

F32 = torch.float32


def plain(part: Part) -> Iterator[Case]:
    """Yield a product of each tile."""
    for rows in (1, 40, 70, 130, 300, 600) if part.is_tiny else (1, 7, 16, 64, 100, 256, 300, 2048):
        for N in (70,) if part.is_tiny else (2048, 28672):
            yield f"product {rows} x {N}", partial(_plain, part, rows, N)


def _plain(part: Part, rows: int, N: int) -> None:
    K, what = 136 if part.is_tiny else 4096, f"product {rows} x {N}"
    weight, x = part.normal(N, K, scale=K**-0.5), part.normal(rows, K)
    bias = part.normal(N, dtype=F32)
    exact = x.double() @ weight.double().T
    part.near(what, part.ops.product(x, weight, None), exact)
    wide = part.ops.product(x, weight, bias, F32)
    part.near(f"{what}, bias, float32", wide, exact + bias.double())
    odd, narrow = x[:, 1:100], weight[:, 1:100]  # the copy engine takes neither
    exact = odd.double() @ narrow.double().T
    part.near(f"{what}, odd places", part.ops.product(odd, narrow, None), exact)


def packed(part: Part) -> Iterator[Case]:
    """Yield products with 8 and 4 bits, their inputs in one part and in several."""
    for bits in (8, 4):
        for rows in (1, 70) if part.is_tiny else (1, 7, 16, 64, 100, 300, 2048):
            for N, K in ((70, 1216), (70, 192)) if part.is_tiny else ((4096, 4096), (28672, 4096)):
                what = f"int{bits} product {rows} x {N} x {K}"
                yield what, partial(_packed, part, what, (rows, N, K), bits)


def _packed(part: Part, what: str, shape: tuple[int, int, int], bits: int) -> None:
    rows, N, K = shape
    matrix = pack(part.normal(N, K, scale=K**-0.5), bits)
    x, bias = part.normal(rows, K), part.normal(N, dtype=F32)
    exact = x.double() @ matrix.wide().to(part.dtype).double().T
    part.near(what, part.ops.packed_product(x, matrix, bias), exact + bias.double())
    wide = part.ops.packed_product(x, matrix, None, F32)
    part.near(f"{what}, float32", wide, exact)


def grouped(part: Part) -> Iterator[Case]:
    """Yield products of experts in all formats, and of latents' heads."""
    for tokens in (3, 40) if part.is_tiny else (1, 64, 700):
        for bits in (0, 8, 4):
            yield f"{experts_name(bits)} {tokens}", partial(_experts, part, tokens, bits)
        yield f"matrices of heads {tokens}", partial(_heads, part, tokens)


def _experts(part: Part, num_tokens: int, bits: int) -> None:
    x, gate_up, down, met = experts(part, num_tokens)
    bias, what = part.normal(*gate_up.shape[:2], dtype=F32), f"{experts_name(bits)} {num_tokens}"
    for matrix, first in ((gate_up, True), (down, False)):
        given = pack_experts(matrix, bits)
        actual = part.ops.grouped_product(x, given, bias if first else None, met, first)
        exact = given.wide().to(part.dtype).reshape(matrix.shape) if bits else matrix
        of_rows = (x.double(), exact.double(), bias if first else None)
        wanted = twins.grouped_product(*of_rows, met, first)
        part.near(f"{what}, {'first' if first else 'second'}", actual, wanted)
        x = actual


def _heads(part: Part, num_tokens: int) -> None:
    heads, outputs, inputs = (6, 20, 12) if part.is_tiny else (128, 512, 128)
    x, weight = part.normal(num_tokens * heads, inputs), part.normal(heads, outputs, inputs)
    met = meet_heads(num_tokens, heads, part.device)
    actual = part.ops.grouped_product(x, weight, None, met, False)
    wanted = twins.grouped_product(x.double(), weight.double(), None, met, False)
    part.near(f"matrices of heads {num_tokens}", actual, wanted)


def low_rank(part: Part) -> Iterator[Case]:
    """Yield what adapters add, for few rows and for many."""
    for rows in (1, 5, 90) if part.is_tiny else (1, 64, 700):
        yield f"adapters {rows}", partial(_adapters, part, rows)


def _adapters(part: Part, rows: int) -> None:
    loaded, sizes, inputs = adapters(part)
    slots = (torch.arange(rows, device=part.device) + 1) % (len(loaded) + 1)
    plan, met = plan_of(part, loaded, slots), meet(slots[:, None], len(loaded))
    x, out = part.normal(rows, inputs), part.normal(rows, sum(sizes))
    wanted = out.double()
    exact = {
        number: replace(one, parts={n: (a.double(), b.double()) for n, (a, b) in one.parts.items()})
        for number, one in loaded.items()
    }
    twins.add_low_rank(wanted, x.double(), met, replace(plan, loaded=exact), 0, sizes)
    has_none = slots == len(loaded)
    plain = out[has_none].clone()
    part.ops.add_low_rank(out, x, met, plan, 0, sizes)
    part.near(f"adapters {rows}", out, wanted)
    part.equal(f"adapters {rows}, rows without", out[has_none], plain)


CASES = {
    "product": plain,
    "packed_product": packed,
    "grouped_product": grouped,
    "add_low_rank": low_rank,
}
