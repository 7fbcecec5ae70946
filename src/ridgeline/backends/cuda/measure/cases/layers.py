"""Norms, gates, copies of blocks, and recurrent layers.

Convolutions and memories are of texts that go on, begin, and are padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.layers import state_inputs, states_plan
from ridgeline.backends.cuda.measure.part import Case, Part

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")
F32, F64 = torch.float32, torch.float64
# Start, tokens and slot of each text: one goes on and is saved twice, one begins, one has a token.
TEXTS = ((9, 7, 2), (0, 3, 0), (4, 1, 1))
_ERROR = 1e-4  # of sums in float32 over all tokens of a text


def norms(part: Part) -> Iterator[Case]:
    """Yield norms of rows, of parts of rows, and of heads."""
    for kind, has_bias in product(("rms", "layer"), (False, True)):
        what = f"norm {kind}{', bias' if has_bias else ''}"
        yield what, partial(_norm, part, what, kind, has_bias)


def _norm(part: Part, what: str, kind: str, has_bias: bool) -> None:
    rows, width = (3, 40) if part.is_tiny else (300, 4096)
    x = part.normal(rows, width, dtype=F32)
    weight, bias = part.normal(width, dtype=F32), part.normal(width, dtype=F32)
    of_row = (weight, bias if has_bias else None)
    forms: dict[str, tuple[Any, tuple[Any, Any]]] = {
        "rows": (x, of_row),
        "no weight": (x, (None, None)),
        "parts of rows": (x[:, 8:24], (weight[:16], None)),
        "heads": (x.reshape(rows, -1, 8), (None, None)),
    }
    for form, (given, (factor, added)) in forms.items():
        actual = part.ops.norm(given, factor, added, 1e-5, kind, part.dtype)
        wanted = twins.norm(given.double(), factor, added, 1e-5, kind, F64)
        part.near(f"{what}, {form}", actual, wanted)


def sums(part: Part) -> Iterator[Case]:
    """Yield sums in the residual stream, with and without norms."""
    for kind, has_post, has_bias in product(("rms", "layer"), (False, True), (False, True)):
        what = f"add_norm {kind}{', post' if has_post else ''}{', bias' if has_bias else ''}"
        yield what, partial(_sum, part, what, kind, has_post, has_bias)
    yield "add without norm", partial(_sum, part, "add without norm", None, False, False)


def _sum(part: Part, what: str, kind: str | None, has_post: bool, has_bias: bool) -> None:
    rows, width = (3, 40) if part.is_tiny else (300, 4096)
    x, delta = part.normal(rows, width, dtype=F32), part.normal(rows, width)
    weight, bias = part.normal(width, dtype=F32), part.normal(width, dtype=F32)
    some_bias = bias if has_bias else None
    post = (weight + 1, some_bias) if has_post else None
    factor, added = (weight, some_bias) if kind else (None, None)
    how = 1e-5, kind or "rms"
    ours, exact = x.clone(), x.double()
    actual = part.ops.add_norm(ours, delta, 0.5, post, factor, added, *how, part.dtype)
    wanted = twins.add_norm(exact, delta.double(), 0.5, post, factor, added, *how, F64)
    part.near(what, actual, wanted)
    part.near(f"{what}, residual", ours, exact, 1e-5)


def gates(part: Part) -> Iterator[Case]:
    """Yield activations with and without gates."""
    for activation in ACTIVATIONS:
        for gated in (True,) if activation == "swiglu_clamped" else (True, False):
            what = f"gate {activation}{'' if gated else ', no gate'}"
            yield what, partial(_gate, part, what, activation, gated)


def _gate(part: Part, what: str, activation: str, gated: bool) -> None:
    inner = part.normal(*((3, 2060) if part.is_tiny else (300, 28672)), scale=4.0)
    actual = part.ops.gate(inner, activation, gated, 0.7)
    part.near(what, actual, twins.gate(inner.double(), activation, gated, 0.7))


def copies(part: Part) -> Iterator[Case]:
    """Yield copies of blocks, of which one is read and written."""
    for old, new in (([0, 1], [4, 5]), ([3, 5, 8], [5, 0, 1])):
        what = f"copies of blocks {old} to {new}"
        yield what, partial(_copy, part, what, old, new)


def _copy(part: Part, what: str, old: list[int], new: list[int]) -> None:
    blocks = part.normal(9, 4096 + 16)
    wanted = blocks.clone()
    pairs = tuple(torch.tensor(ids, device=part.device) for ids in (old, new))
    twins.copy_blocks(wanted, *pairs)
    part.ops.copy_blocks(blocks, *pairs)
    part.equal(what, blocks, wanted)


def convolutions(part: Part) -> Iterator[Case]:
    """Yield the convolution."""
    yield "convolve", partial(_through, part, "convolve", "convolve", ())


def scans(part: Part) -> Iterator[Case]:
    """Yield state-space scans."""
    yield "scan", partial(_through, part, "scan", "scan", ())


def corrections(part: Part) -> Iterator[Case]:
    """Yield gated delta rules, with key heads in runs and by turns."""
    for by_turns in (False, True):
        what = f"remember{' by turns' if by_turns else ''}"
        yield what, partial(_through, part, what, "remember", (by_turns,))


def _through(part: Part, what: str, op: str, behind: tuple[bool, ...]) -> None:
    texts = TEXTS if part.is_tiny else ((9, 70, 2), *TEXTS[1:])
    plan, tokens = states_plan(part, texts), sum(count for _, count, _ in texts)
    given, states = state_inputs(part, op, tokens + 2)
    ours, exact = states.clone(), states.double()
    actual = getattr(part.ops, op)(*given, ours, *behind, plan)
    wanted = getattr(twins, op)(*(one.double() for one in given), exact, *behind, plan)
    part.near(what, actual, wanted, _ERROR)
    part.near(f"{what}, states", ours, exact, _ERROR)
    written = plan.cuts[:, 3].tolist()
    rest = [slot for slot in range(len(states)) if slot not in written]
    part.equal(f"{what}, other states", ours[rest], states[rest])
    part.say(f"{what}, padding", ok=not bool(actual[tokens:].any()))


CASES = {
    "norm": norms, "add_norm": sums, "gate": gates, "copy_blocks": copies,
    "convolve": convolutions, "scan": scans, "remember": corrections,
}  # fmt: skip
