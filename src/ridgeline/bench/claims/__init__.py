"""``ridgeline bench claims``: what the field's techniques bring here, beside what papers claim.

The table, and its picture: a bar for each technique, and the paper's figure as a mark on it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.bench.claims.harness import LLAMA_2_13B, Harness, LoadSizes, RealStage, VirtualStage
from ridgeline.bench.claims.techniques import (
    BatchSize,
    Comparison,
    Technique,
    batch_sizes,
    techniques,
)
from ridgeline.bench.out_file import check_out, write_out
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.planner import PlanFlags
from ridgeline.system import svg
from ridgeline.system.machine import write_text
from ridgeline.system.report import Table
from ridgeline.system.terminal import console, drawn

ENDINGS = (".svg", ".json", ".csv", ".md")
_MODEL_HERE = "smollm2"
_CACHE = "256MiB"  # where it is not to be scarce
_BATCHES_SHARE = 0.2  # of the time, for the table of batch sizes
_OF_GPUS = LoadSizes(
    num_requests=200, prompts=(256, 768), mean_new=192, most_new=1536, one=(512, 128),
    cache_tokens=None, shared=(1920, 128), batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    long_prompt=2048, long_load=(80, 2600, 60), weights=("bf16", "int8", "int4"),
    caches=("bf16", "int8"),
)  # fmt: skip
_OF_PROCESSORS = LoadSizes(
    num_requests=48, prompts=(16, 96), mean_new=24, most_new=256, one=(128, 32),
    cache_tokens=1536, shared=(192, 16), batches=(1, 4, 16, 64, 256), long_prompt=512,
    long_load=(16, 256, 24),
    weights=("bf16", "int8", "int4"), caches=("f16", "int8"),
)  # fmt: skip
# Of the picture.
_LEFT, _RIGHT, _TOP, _ROW = 260, 560, 92, 30
_BAR, _MARK = svg.COLOURS[0], svg.COLOURS[2]
_WIDTH = 900


@dataclass(frozen=True)
class ClaimResults:
    """All that was compared.

    Attributes:
        machine, model: where, and of what.
        comparisons: techniques that ran.
        batches: the table of batch sizes.
        left_out: techniques for which there was no time.
        seconds: how long it took.
    """

    machine: str
    model: str
    comparisons: Sequence[Comparison]
    batches: Sequence[BatchSize]
    left_out: Sequence[str]
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each technique, as documents have them."""
        return [
            {
                "technique": one.technique.name,
                "off": one.technique.off.name,
                "on": one.technique.on.name,
                "off_flags": one.technique.off.flags,
                "on_flags": one.technique.on.flags,
                "claim": one.technique.claim.text if one.technique.claim else None,
                "paper": one.technique.claim.paper if one.technique.claim else None,
                "factor": round(one.factor, 3),
                "least": round(min(one.factors), 3),
                "most": round(max(one.factors), 3),
                "unit": one.technique.unit,
                "off_value": round(one.technique.value(one.off[-1]), 3),
                "on_value": round(one.technique.value(one.on[-1]), 3),
                "why": one.why,
            }
            for one in self.comparisons
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "machine": self.machine,
            "model": self.model,
            "techniques": self.rows(),
            "batch_sizes": [one._asdict() for one in self.batches],
            "left_out": list(self.left_out),
            "seconds": round(self.seconds, 1),
        }


def bench_claims(
    model: str | None, plan_flags: PlanFlags, seconds: float, out: Path | None, *, as_json: bool,
    only: Sequence[str] = (), options: dict[str, Any] | None = None, sizes: LoadSizes | None = None,
) -> ClaimResults:  # fmt: skip
    """Compare techniques, print a table or the document, and write a file.

    Args:
        model: as people type it; None takes a small one here, and the papers' own on a device.
        plan_flags: the device, as ``ridgeline plan`` takes it; without one it computes here.
        seconds: about how long; techniques for which no time is left are named.
        out: gets the picture, the document or the rows.
        as_json: print the document.
        only: names of techniques; empty compares all, and batch sizes.
        options: of the engine here.
        sizes: of loads.

    Raises ValueError if model, device or technique is none, or nothing can be compared in the time.
    """
    check_out(out, ENDINGS)
    begin_s = time.monotonic()
    if not plan_flags.names_device:
        usual = {"kv_cache_memory": _CACHE}
        real = RealStage(model or _MODEL_HERE, usual | (options or {}), sizes or _OF_PROCESSORS)
        try:
            results = _compare(real, only, seconds, begin_s)
        finally:
            real.close()
    else:
        virtual = VirtualStage(model or LLAMA_2_13B, plan_flags, sizes or _OF_GPUS)
        for note in virtual.notes:
            say(note)
        results = _compare(virtual, only, seconds, begin_s)
    if not results.comparisons:
        raise ValueError(f"--seconds {seconds:g} is too little to compare anything")
    if as_json:
        print(json.dumps(results.as_dict(), allow_nan=False))
    else:
        _print(results)
    if out is not None:
        sys.stdout.flush()
        if out.suffix == ".json":
            write_text(out, json.dumps(results.as_dict(), indent=1) + "\n")
        else:
            write_out(out, results.rows(), claims_svg(_title(results), results.comparisons))
    return results


def _compare(harness: Harness, only: Sequence[str], seconds: float, begin_s: float) -> ClaimResults:
    """Run both sides of each technique in turn, as long as there is time."""
    todo = list(_chosen(harness, only))
    comparisons, left_out = list[Comparison](), list[str]()
    end_s = begin_s + (1 if only else 1 - _BATCHES_SHARE) * seconds
    with count_bar("Comparing", note="techniques") as report:
        for number, technique in enumerate(todo):
            report(number, len(todo))
            left_s = end_s - time.monotonic()
            if left_s <= 0 and not only:  # what is asked for by name runs once at least
                left_out.append(technique.name)
                continue
            comparisons.append(_rounds(technique, harness.rounds, left_s / (len(todo) - number)))
    batches = [] if only else list(_within(batch_sizes(harness), begin_s + seconds))
    took_s = time.monotonic() - begin_s
    return ClaimResults(harness.name, harness.model, comparisons, batches, left_out, took_s)


def _chosen(harness: Harness, only: Sequence[str]) -> Iterator[Technique]:
    """Yield the techniques of these names, or all. Raises ValueError for a name of none."""
    by_name = {one.name: one for one in techniques(harness)}
    for name in only:
        if name not in by_name:
            names = ", ".join(by_name)
            raise ValueError(f"--only {name!r} is not a technique: use one of {names}")
    yield from (one for name, one in by_name.items() if not only or name in only)


def _rounds(technique: Technique, rounds: int, seconds: float) -> Comparison:
    """Run off and on in turn, once at least, and again only if that fits the seconds."""
    off, on, begin_s = [], [], time.monotonic()
    for number in range(rounds):
        if number and 2 * (time.monotonic() - begin_s) > seconds:
            break
        off.append(technique.off.run())
        on.append(technique.on.run())
    return Comparison(technique, off, on)


def _within(sizes: Iterator[BatchSize], end_s: float) -> Iterator[BatchSize]:
    """Yield batch sizes until the time is over; a larger one takes longer than all before."""
    begin_s = time.monotonic()
    for size in sizes:
        yield size
        if 2 * time.monotonic() - begin_s > end_s:
            return


def _title(results: ClaimResults) -> str:
    return f"What techniques bring: {results.model} on {results.machine}"


def _print(results: ClaimResults) -> None:
    terminal = console(160)
    lines = []
    for row in results.rows():
        spread = row["most"] - row["least"]
        here = f"{row['factor']:.2f}x"
        here += f" ({row['least']:.2f}-{row['most']:.2f})" if spread > 0.005 else ""
        sides = f"{row['off']} -> {row['on']}"
        claim, paper = row["claim"] or "-", row["paper"] or ""
        lines.append((row["technique"], sides, claim, paper, here, row["why"]))
    terminal.print(f"{_title(results)}\n")
    heads = ("technique", "off -> on", "claim", "paper", "here", "why")
    terminal.print(drawn(Table(heads, lines, "llllrl")))
    if results.batches:
        terminal.print()
        terminal.print(drawn(_table_of_batches(results.batches)))
    if results.left_out:
        terminal.print(f"left out, --seconds is too small: {', '.join(results.left_out)}")


def _table_of_batches(batches: Sequence[BatchSize]) -> Table:
    heads = ("streams at once", "tokens/s", "of the most", "ms per token", "cost")
    most = max(one.tokens_per_s for one in batches)
    cost: Callable[[BatchSize], str] = _cost(batches[0])
    rows = [
        (
            str(one.num_streams),
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s / most:.0%}",
            f"{1e3 * one.token_s:.1f}",
            cost(one),
        )
        for one in batches
    ]
    return Table(heads, rows)


def _cost(alone: BatchSize) -> Callable[[BatchSize], str]:
    """Return how a cost is written: in USD, or as a part of what one stream costs."""

    def of(one: BatchSize) -> str:
        if one.usd_per_million is not None:
            return f"${one.usd_per_million:,.2f} per million"
        return f"{alone.tokens_per_s / one.tokens_per_s:.0%} of one stream's"

    return of


def claims_svg(title: str, comparisons: Sequence[Comparison]) -> str:
    """Return the picture: factors on a logarithmic axis, with what was measured and claimed."""
    claims = [one.technique.claim for one in comparisons]
    ends = [one.factor for one in comparisons] + [c.high for c in claims if c] + [1.0]
    axis = svg.Axis("times as good as without", min(0.5, *ends), max(ends) * 1.1, tick="{:g}x")
    height = _TOP + _ROW * len(comparisons) + 64
    bottom = _TOP + _ROW * len(comparisons)

    def at(value: float) -> float:
        return _LEFT + axis.share(value) * (_RIGHT - _LEFT)

    parts = svg.heading(title, {"here": _BAR, "the paper's claim": _MARK})
    for mark, label in axis.labels():
        parts.append(svg.line(at(mark), _TOP - 6, at(mark), bottom, svg.GRID, 1))
        parts.append(svg.text(at(mark), bottom + 18, label, size=svg.SMALL, anchor="middle"))
    parts.append(svg.line(at(1), _TOP - 6, at(1), bottom, svg.FAINT, 1))
    middle = (_LEFT + _RIGHT) / 2
    parts.append(svg.text(middle, bottom + 42, axis.name, size=svg.SMALL, anchor="middle"))
    for i, one in enumerate(comparisons):
        parts += _row(one, _TOP + i * _ROW, at)
    return svg.picture(_WIDTH, height, parts)


def _row(one: Comparison, y: float, at: Callable[[float], float]) -> list[str]:
    """Return a bar, its mark, and what is written beside them."""
    technique, claim = one.technique, one.technique.claim
    left, right = sorted((at(1), at(one.factor)))
    label = f"{technique.name}: {technique.off.name} to {technique.on.name}"
    said = f"{one.factor:.2g}x" + (f", claimed {claim.text}: {claim.paper}" if claim else "")
    parts = [
        svg.text(_LEFT - 10, y + 18, technique.name, anchor="end"),
        svg.box(left, y + 6, max(right - left, 1.5), 16, _BAR, f"{label}: {said}. {one.why}"),
    ]
    if claim:
        low, high = at(claim.low), at(claim.high)
        parts += [
            svg.line(low, y + 14, high, y + 14, _MARK, 2),
            *(svg.line(x, y + 5, x, y + 23, _MARK, 3) for x in {low, high}),
        ]
    parts.append(svg.text(_RIGHT + 14, y + 18, said, size=svg.SMALL, fill=svg.FAINT))
    return parts
