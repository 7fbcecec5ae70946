"""How fast products are, beside torch's: the matrices of Llama-3-8B, and of experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ridgeline.backends.cuda.measure.inputs.layers import experts, experts_name, pack_experts
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.measure.shapes import models
from ridgeline.backends.cuda.packed import pack

_BEYOND_CACHE_BYTES = 256 << 20  # of copies of a matrix, so that none is still in the L2


def measure(part: Part) -> None:
    """Measure each matrix with all numbers of rows."""
    part.run(_cases(part), need_s=6)


def _cases(part: Part) -> Iterator[Case]:
    for shape in models(part, "llama3-8b").values():
        for name, size in shape.matrices().items():
            yield name, partial(_matrix, part, name, size)
    for tokens in (3,) if part.is_tiny else (1, 16, 64, 256, 2048):
        for bits in (0, 8, 4):
            yield f"{experts_name(bits)} {tokens}", partial(_experts, part, tokens, bits)


def _matrix(part: Part, name: str, size: tuple[int, int]) -> None:
    N, K = size
    copies = 1 if part.is_tiny else max(1, _BEYOND_CACHE_BYTES // (2 * N * K))
    weight = part.normal(N, K, scale=K**-0.5)
    forms: dict[str, tuple[Any, Any]] = {
        "torch": (lambda x, w, _: torch.nn.functional.linear(x, w), lambda: weight.clone()),
        "ours": (part.ops.product, lambda: weight.clone()),
        "int8": (part.ops.packed_product, partial(pack, weight, 8)),
        "int4": (part.ops.packed_product, partial(pack, weight, 4)),
    }
    torch_us: dict[int, float] = {}
    for who, (call, make) in forms.items():
        weights = [make() for _ in range(copies)]
        for rows in (3,) if part.is_tiny else (1, 8, 64, 256, 2048):
            x = part.normal(rows, K)
            took_s = part.seconds(partial(_all, call, x, weights), copies)
            us = torch_us.setdefault(rows, took_s * 1e6)
            part.say(
                f"{name} {N} x {K}, {rows} rows, {who}",
                us=took_s * 1e6,
                tb_per_s=weights[0].nbytes / took_s / 1e12,
                tflops_per_s=2 * rows * N * K / took_s / 1e12,
                speed_of_torch=us / (took_s * 1e6),
                rows=rows,
                who=who,
            )


def _all(call: Any, x: Any, weights: list[Any]) -> None:
    for weight in weights:
        call(x, weight, None)


def _experts(part: Part, num_tokens: int, bits: int) -> None:
    x, gate_up, _, met = experts(part, num_tokens)
    weight = pack_experts(gate_up, bits)
    took_s = part.seconds(lambda: part.ops.grouped_product(x, weight, None, met, True))
    num_met = int((met.offsets[1:] > met.offsets[:-1]).sum())
    part.say(
        f"{experts_name(bits)} of {gate_up.shape[1]} x {gate_up.shape[2]}, {num_tokens} tokens",
        us=took_s * 1e6,
        tb_per_s=num_met / len(gate_up) * weight.nbytes / took_s / 1e12,
        tflops_per_s=2 * len(met.order) * gate_up[0].numel() / took_s / 1e12,
    )
