"""Draws, changes of logits and ranks: equal to the bit, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.draws import DRAWS, changes, draws
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.core.params import SamplingParams

_SEVERAL = {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01}


def picks(part: Part) -> Iterator[Case]:
    """Yield draws of all kinds together, and on a GPU of each kind by many rows."""
    for vocabulary in (900, 2500) if part.is_tiny else (1000, 128256):  # one piece, and more
        for how in () if part.is_tiny else (*DRAWS, _SEVERAL):
            named = " ".join(f"{name} {value}" for name, value in how.items())
            what = f"draw of {vocabulary}, {named}"
            yield what, partial(_draw, part, what, [how] * 32, vocabulary)
        what = f"draw of {vocabulary}, all kinds"
        yield what, partial(_draw, part, what, [*DRAWS, _SEVERAL], vocabulary)
        what = f"draw of {vocabulary} adjusted"
        yield what, partial(_draw_adjusted, part, what, vocabulary)


def _draw(part: Part, what: str, hows: list[dict[str, Any]], vocabulary: int) -> None:
    given, _ = draws(part, [SamplingParams(**how) for how in hows], vocabulary)
    has_filters = any(how.get("top_k") or how.get("top_p") for how in hows)
    call = partial(part.ops.draw, *given, has_filters=has_filters)
    part.equal(what, call(), twins.draw(*given))
    _time(part, what, vocabulary, call)


def _time(part: Part, what: str, vocabulary: int, call: Callable[[], Any]) -> None:
    if vocabulary > 100_000 or (part.is_tiny and vocabulary < 1000):
        part.say(f"{what}, speed", us=1e6 * part.seconds(call, repeats=3))


def _draw_adjusted(part: Part, what: str, vocabulary: int) -> None:
    params = [SamplingParams(**how) for how in DRAWS]
    given, _ = draws(part, params, vocabulary)
    given[0][:, ::3] = float("-inf")  # cannot be chosen
    given[0][1] = float("-inf")
    given[0][2, 7] = float("nan")
    actual = part.ops.draw(*given, is_adjusted=True)
    part.equal(what, actual, twins.draw(*given, is_adjusted=True))


def adjustments(part: Part) -> Iterator[Case]:
    """Yield penalties, bias and masks."""
    for vocabulary in (1500,) if part.is_tiny else (1000, 128256):
        what = f"adjust {vocabulary}"
        yield what, partial(_adjust, part, what, vocabulary)


def _adjust(part: Part, what: str, vocabulary: int) -> None:
    given = changes(part, 14 if part.is_tiny else 64, vocabulary)
    call = partial(part.ops.adjust, *given)
    part.equal(what, call(), twins.adjust(*given))
    _time(part, what, vocabulary, call)


def rankings(part: Part) -> Iterator[Case]:
    """Yield what log-probabilities and ranks are made of."""
    for vocabulary in (1500,) if part.is_tiny else (1000, 128256):
        what = f"rank {vocabulary}"
        yield what, partial(_rank, part, what, vocabulary)


def _rank(part: Part, what: str, vocabulary: int) -> None:
    given, _ = draws(part, [SamplingParams()] * 8, vocabulary)
    given[0][3, 5] = float("nan")
    tokens = torch.arange(8, dtype=torch.int32, device=part.device) * 11
    of_row = (given[0], given[1], tokens)
    actual, wanted = part.ops.rank(*of_row), twins.rank(*of_row)
    sound = wanted[-1] == 1  # of the others nothing is known
    part.equal(what, [one[sound] for one in actual], [one[sound] for one in wanted])
    part.equal(f"{what}, finite", actual[-1], wanted[-1])
    call = partial(part.ops.rank, *of_row)
    _time(part, what, vocabulary, call)


CASES = {"draw": picks, "adjust": adjustments, "rank": rankings}
