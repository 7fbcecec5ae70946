"""What ``ridgeline bench foresight`` says: errors by load, and whether they are within their bars.

Pure: numbers in, markdown out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from ridgeline.bench.simulate.predicted import CROWDED

COLUMNS = {  # what is compared, and where it stands in a summary
    "tok/s": ("output_tokens_per_s", ""),
    "TTFT mean": ("ttft_from_send", "mean_ms"),
    "TTFT p50": ("ttft_from_send", "p50_ms"),
    "TTFT p95": ("ttft_from_send", "p95_ms"),
    "TPOT mean": ("tpot_excl_first", "mean_ms"),
    "TPOT p95": ("tpot_excl_first", "p95_ms"),
    "E2E mean": ("e2e", "mean_ms"),
    "E2E p95": ("e2e", "p95_ms"),
}
KINDS = {
    "foreseen": "predicted from the calibration alone",
    "own speed": "predicted, times the run's own speed: what is left is the method's error",
    "once more": "the same load run once more: what a measurement says of the next",
}
SUM_S = 1.0
SUM_KINDS = {
    "foreseen": "predicted from the calibration alone",
    "followed": "predicted, times the speed of the last two seconds, as a server does",
    "own speed": "predicted, times the speed of the whole run",
    "once more": "predicted, times the speed of the other run of the same load",
}
SUMS = f"sums of {SUM_S:g} s"
BARS = {"tok/s": 5.0, "TPOT mean": 5.0, "E2E mean": 5.0, "TTFT mean": 10.0, SUMS: 5.0}  # percent
REPEATS = 1.5  # times what a repetition is off is met, too: the machine is no better
_UNSTEADY = 25.0  # percent that a repetition is off, from which it excuses nothing
Errors = Mapping[str, float]


class StepErrors(NamedTuple):
    """Seconds that a step took, that were predicted for it, and the same at the recent speed."""

    actual_s: float
    predicted_s: float
    followed_s: float


class ErrorVerdict(NamedTuple):
    """Errors of one quantity in percent, without signs: the prediction's, and a repetition's."""

    error: float
    repeat: float
    bar: float

    @property
    def is_met(self) -> bool:
        """Whether the error is within the bar, or what the machine itself allows."""
        is_steady = self.repeat <= _UNSTEADY
        return self.error <= max(self.bar, REPEATS * self.repeat if is_steady else 0.0)

    def __str__(self) -> str:
        said = f"{self.error:.1f} %, bar {self.bar:g} %, a repetition {self.repeat:.1f} %: "
        if not self.is_met:
            is_steady = self.repeat <= _UNSTEADY
            return said + ("missed" if is_steady else "the machine is too unsteady to say")
        return said + ("met" if self.error <= self.bar else f"within {REPEATS:g} repetitions")


def sum_errors(steps: Sequence[StepErrors], speed: float, other_speed: float) -> dict[str, float]:
    """Return how far sums of steps over one busy second are off, in percent, by ``SUM_KINDS``.

    Means without signs; nothing if the steps do not fill a second. What is left at the end counts
    nowhere.

    Args:
        steps: of one run, in order.
        speed: actual over predicted seconds of all these steps.
        other_speed: the same of another run of this load.
    """
    errors: dict[str, list[float]] = {kind: [] for kind in SUM_KINDS}
    actual_s = predicted_s = followed_s = 0.0
    for step in steps:
        actual_s += step.actual_s
        predicted_s += step.predicted_s
        followed_s += step.followed_s
        if actual_s >= SUM_S:
            sums = (predicted_s, followed_s, predicted_s * speed, predicted_s * other_speed)
            for of_kind, sum_s in zip(errors.values(), sums, strict=True):
                of_kind.append(100 * abs(sum_s / actual_s - 1))
            actual_s = predicted_s = followed_s = 0.0
    return {kind: round(fmean(found), 2) for kind, found in errors.items() if found}


def verdicts(
    errors: Mapping[str, Sequence[Errors]], sums: Sequence[Errors]
) -> dict[str, list[ErrorVerdict | None]]:
    """Return a verdict of each load for each quantity that has a bar, and of their median at last.

    None where a load says nothing: it was too short for sums.

    Args:
        errors: by kind, then two of each load: its runs.
        sums: errors of sums by their kinds, two of each load; some may be empty.
    """
    found: dict[str, list[ErrorVerdict | None]] = {}
    for name, bar in BARS.items():
        both = zip(errors["foreseen"], errors["once more"], strict=True)
        sides = [(run.get(name), other.get(name)) for run, other in both]
        if name == SUMS:
            sides = [(run.get("followed"), run.get("once more")) for run in sums]
        of_loads = [_verdict(sides[i : i + 2], bar) for i in range(0, len(sides), 2)]
        known = [one for one in of_loads if one]
        middle = None
        if known:
            middle = ErrorVerdict(
                median(o.error for o in known), median(o.repeat for o in known), bar
            )
        found[name] = [*of_loads, middle]
    return found


def _verdict(runs: Sequence[tuple[float | None, float | None]], bar: float) -> ErrorVerdict | None:
    errors = [abs(error) for error, _ in runs if error is not None]
    repeats = [abs(repeat) for _, repeat in runs if repeat is not None]
    return ErrorVerdict(fmean(errors), fmean(repeats), bar) if errors and repeats else None


def table_of_runs(names: Sequence[str], errors: Mapping[str, Sequence[Errors]]) -> Iterator[str]:
    """Yield a line for each run, and for the means and medians of all kinds, in markdown.

    Args:
        names: of the loads; each has two runs.
        errors: in percent by kind, of each run; kinds without any are left out.
    """
    yield f"| foreseen / measured - 1, % | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for i, row in enumerate(errors["foreseen"]):
        cells = " | ".join(f"{row[column]:+.1f}" for column in COLUMNS)
        yield f"| {names[i // 2]}, run {i % 2 + 1} | {cells} |"
    for label, average in (("mean", fmean), ("median", median)):
        for kind, rows in errors.items():
            if rows:
                cells = " | ".join(f"{average(abs(row[c]) for row in rows):.1f}" for c in COLUMNS)
                yield f"| **{label} of {kind}**, without signs | {cells} |"
    yield ""
    yield from (f"{kind}: {text}" for kind, text in KINDS.items() if errors[kind])


def table_of_loads(
    names: Sequence[str],
    utilisations: Sequence[float | None],
    found: Mapping[str, Sequence[ErrorVerdict | None]],
) -> Iterator[str]:
    """Yield a line for each load and for their median, in markdown, and then the verdicts.

    Args:
        names: of the loads.
        utilisations: each load as a share of what could be served.
        found: what ``verdicts`` returned.
    """
    yield f"| error (of a repetition), % | of what can be served | {' | '.join(found)} |"
    yield "|---" * (len(found) + 2) + "|"
    shares = ["-" if one is None else f"{one:.0%}" for one in utilisations]
    for i, (name, share) in enumerate(zip([*names, "**median**"], [*shares, ""], strict=True)):
        cells = (_cell(column[i]) for column in found.values())
        yield f"| {name} | {share} | {' | '.join(cells)} |"
    yield ""
    yield f"!: more than its bar, and than {REPEATS:g} times a repetition's error."
    crowded = [n for n, u in zip(names, utilisations, strict=True) if u is not None and u > CROWDED]
    if crowded:
        yield f"Nobody can foresee waiting above {CROWDED:.0%}, as in: {', '.join(crowded)}."
    for name, column in found.items():
        if middle := column[-1]:
            yield f"{name}: median {middle}"


def _cell(verdict: ErrorVerdict | None) -> str:
    if verdict is None:
        return "-"
    return f"{verdict.error:.1f} ({verdict.repeat:.1f}){'' if verdict.is_met else ' !'}"


def table_of_sums(names: Sequence[str], sums: Sequence[Errors]) -> Iterator[str]:
    """Yield a line for each run: how far sums of its steps are off; nothing if there are none."""
    if not any(sums):
        return
    yield f"| {SUMS}, without signs, % | {' | '.join(SUM_KINDS)} |"
    yield "|---" * (len(SUM_KINDS) + 1) + "|"
    for i, row in enumerate(sums):
        if row:
            cells = " | ".join(f"{row[kind]:.1f}" for kind in SUM_KINDS)
            yield f"| {names[i // 2]}, run {i % 2 + 1} | {cells} |"
    cells = " | ".join(f"{median(row[kind] for row in sums if row):.1f}" for kind in SUM_KINDS)
    yield f"| **median** | {cells} |"
    yield ""
    yield from (f"{kind}: {text}" for kind, text in SUM_KINDS.items())
