"""Recurrent layers: convolutions and memories, of texts that go on, begin, and are padded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ridgeline.backends.cuda import twins
from ridgeline.backends.cuda.measure.inputs.layers import state_inputs, states_plan
from ridgeline.backends.cuda.measure.part import Case, Part

# Start, tokens and slot of each text: one goes on and is saved twice, one begins, one has a token.
TEXTS = ((9, 7, 2), (0, 3, 0), (4, 1, 1))
_ERROR = 1e-4  # of sums in float32 over all tokens of a text


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
    found = getattr(part.ops, op)(*given, ours, *behind, plan)
    wanted = getattr(twins, op)(*(one.double() for one in given), exact, *behind, plan)
    part.near(what, found, wanted, _ERROR)
    part.near(f"{what}, states", ours, exact, _ERROR)
    written = plan.cuts[:, 3].tolist()
    rest = [slot for slot in range(len(states)) if slot not in written]
    part.equal(f"{what}, other states", ours[rest], states[rest])
    part.say(f"{what}, padding", ok=not bool(found[tokens:].any()))


CASES = {"convolve": convolutions, "scan": scans, "remember": corrections}
