"""Compare with the peers on this machine: install, convert, alternate, and print the result.

    python -m peers [--without vllm] [--repeats 5] [--model smollm2] [--only "vllm int8"]
                          [--shape single_decode] [--quick] [--anyway]

One process at a time; rounds go through all engines and formats in turn, so that a drift of the
machine meets all of them. Each process loads, warms up at every shape and measures it. The last
line on standard output is the result as JSON. docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers import machine, report
from peers.engines import (
    OURS,
    ROOT,
    Crashed,
    Engine,
    Format,
    LeftOut,
    chosen,
    environment,
    install,
    labels,
    last_line,
    log_path,
    prepare,
    without_tiles,
)
from peers.shapes import NAMES, SHAPES, START, Job, Shape, quick_shapes
from ridgeline.system.machine import usable_cpus

_PATIENCE_S = 60.0
_TIMEOUT_S = 1800.0


@dataclass(slots=True)
class Contest:
    """What has been measured, and who still takes part.

    Attributes:
        job: what every process shares; model, seed and shapes are replaced.
        say: called with each message.
        only: the labels that take part; all, if there is none. Ours all do unless one is named.
        running: engine, model file and format per label, in the order of a round.
        samples: per label and shape.
        versions: per engine.
        first_tokens: per label, of the one prompt that is the same for all.
        stolen: per label and round, the share of its time that the machine's host kept.
        tiles: labels whose processes asked for matrix tiles (AMX) and may use them.
        left_out: reasons per engine or label.
        notes: what a reader of the result must know.
    """

    job: Job
    say: Callable[[str], None]
    only: tuple[str, ...] = ()
    running: dict[str, tuple[Engine, Path, Format]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    first_tokens: dict[str, int] = field(default_factory=dict)
    stolen: dict[str, list[float]] = field(default_factory=dict)
    tiles: dict[str, bool] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def enter(self, engine: Engine, source: Path) -> None:
        """Install the engine and convert the weights; what cannot be had is left out."""
        formats = [form for label, form in labels(engine) if label in self.only]
        if not formats:
            if self.only and engine is not OURS:
                return
            formats = list(engine.formats)
        self.say(f"Preparing {engine.name} (once; compiling a peer takes some minutes)")
        try:
            install(engine)
        except LeftOut as error:
            self.leave_out(engine.name, str(error))
            return
        for form in formats:
            self._enter_format(engine, form, source)

    def _enter_format(self, engine: Engine, form: Format, source: Path) -> None:
        label = f"{engine.name} {form.name}"
        try:
            self.running[label] = (engine, prepare(engine, form, source), form)
        except LeftOut as error:
            self.leave_out(label, str(error))

    def leave_out(self, name: str, reason: str) -> None:
        """Go on without an engine or a format; without Ridgeline there is no going on."""
        if name.startswith(OURS.name):
            raise SystemExit(f"{name} failed: {reason}")
        self.say(f"Left out: {name}: {reason}")
        self.left_out[name] = reason
        self.running.pop(name, None)
        self.samples.pop(name, None)

    def round(self, number: int, shapes: tuple[Shape, ...], *, keep: bool) -> None:
        """Run every engine and format: a start and a measurement, each its own process.

        The start that counts follows another one at once: a system may have dropped an engine's
        files from memory during the others' turns.
        """
        for place, label in enumerate(list(self.running), 1):
            phase = f"Round {number}" if keep else "Warm-up of all caches"
            self.say(f"{phase}: {label} ({place} of {len(self.running)})")
            before = machine.read_stat()
            try:
                start_s, started, measured = self._turn(label, shapes)
            except LeftOut as error:
                self.leave_out(label, str(error))
                continue
            self.versions[report.engine_of(label)] = measured["version"]
            self.first_tokens[label] = started["first_token"]
            self.tiles[label] = measured["has_tiles"]
            if keep:
                self.note_stolen(number, label, machine.stolen_share(before, machine.read_stat()))
                samples = self.samples.setdefault(label, {name: [] for name in NAMES})
                samples[START].append(start_s)
                for name, values in measured["samples"].items():
                    samples[name] += values

    def _turn(self, label: str, shapes: tuple[Shape, ...]) -> tuple[float, Any, Any]:
        """Return the seconds of a start, its result, and what was measured.

        An engine that a signal ends is tried compiled without matrix tiles, where that can be.
        """
        try:
            self.process(label, ())
            start_s, started = self.process(label, ())
            return start_s, started, self.process(label, shapes)[1]
        except Crashed as error:
            engine, _, _ = self.running[label]
            other = without_tiles(engine)
            if other is None:
                raise
            self.notes.append(f"{label}: {error}; compiled again without matrix tiles (AMX)")
            self.say(self.notes[-1])
        install(other)
        for known, (engine, model, form) in self.running.items():
            if engine.name == other.name:
                self.running[known] = (other, model, form)
        return self._turn(label, shapes)

    def note_stolen(self, number: int, label: str, share: float) -> None:
        """Keep which share of its time the machine's host took from a label in a round."""
        self.stolen.setdefault(label, []).append(round(share, 3))
        if share > machine.STOLEN_SHARE:
            self.notes.append(f"round {number}, {label}: the host kept {share:.0%} of its time")
            self.say(self.notes[-1])

    def process(self, label: str, shapes: tuple[Shape, ...]) -> tuple[float, dict[str, Any]]:
        """Return the seconds until the result came, and the result.

        Raises:
            LeftOut: the process failed.
        """
        engine, model, form = self.running[label]
        # A fresh seed each time; the tick count of the clock is as good as any.
        seed = time.monotonic_ns()
        job = replace(
            self.job,
            model=str(model),
            seed=seed,
            shapes=shapes,
            dtype=form.dtype,
            drafts=form.drafts,
        )
        driver = f"peers.drivers.{engine.driver}"
        command: list[str | Path] = [engine.python, "-m", driver, json.dumps(job.to_dict())]
        log = log_path(label)
        with log.open("w") as errors:
            start_s = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=errors
            )
            limit = threading.Timer(_TIMEOUT_S, process.kill)
            limit.start()
            try:
                assert process.stdout is not None
                with process.stdout as results:
                    line = results.readline()
                took_s = time.perf_counter() - start_s
                process.wait()
            finally:
                limit.cancel()
                process.kill()
                process.wait()
        if not line:
            if process.returncode < 0:
                name = signal.Signals(-process.returncode).name
                raise Crashed(f"{name} ended its process: {last_line(log)}")
            raise LeftOut(last_line(log))
        result: dict[str, Any] = json.loads(line)
        return took_s, result

    def drop_hopeless(self) -> None:
        """Stop running formats that are behind other peers at every rate by far."""
        for label in sorted(report.hopeless(report.summarise(self.samples), OURS.name)):
            self.running.pop(label)
            self.notes.append(f"{label} ran one round only: far behind other peers at every rate")
            self.say(self.notes[-1])


def wait_until_quiet(contest: Contest, when: str) -> None:
    """Give a neighbour time to finish; note it where it does not."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while machine.refusal(busy := machine.sample_busy_cores()):
        if time.monotonic() > deadline_s:
            contest.notes.append(f"{when}: {busy:.2f} cores were busy with something else")
            contest.say(contest.notes[-1])
            return


def compare(contest: Contest, repeats: int, shapes: tuple[Shape, ...]) -> None:
    """Warm every cache with short answers, then measure round after round."""
    short = tuple(replace(s, new_tokens=min(s.new_tokens, 4), samples=1) for s in shapes)
    contest.round(0, short, keep=False)
    for number in range(1, repeats + 1):
        wait_until_quiet(contest, f"before round {number}")
        contest.round(number, shapes, keep=True)
        if number == 1 and repeats > 1:
            contest.drop_hopeless()


def document(contest: Contest, model: str, rounds: int) -> dict[str, Any]:
    """Return the result."""
    summary = report.summarise(contest.samples)
    return {
        "ratios": report.ratios(summary, OURS.name),
        "best_peer": {name: report.best(summary, name, but=OURS.name) for name in NAMES},
        "results": summary,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "peers", *sys.argv[1:]]),
        "model": model,
        "rounds": rounds,
        "machine": machine.description(),
        "versions": contest.versions,
        "first_tokens": contest.first_tokens,
        "tiles": contest.tiles,
        "stolen": contest.stolen,
        "left_out": contest.left_out,
        "notes": contest.notes,
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--without", action="append", default=[], metavar="PEER")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; at least 5 for a result")
    parser.add_argument("--model", default="smollm2", help="a short name or a .gguf file")
    parser.add_argument("--only", action="append", default=[], metavar='"ENGINE FORMAT"')
    parser.add_argument("--shape", action="append", default=[], choices=NAMES[:-1])
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison.

    Raises:
        SystemExit: the machine is busy, an argument is wrong, or Ridgeline itself fails.
    """
    flags = _arguments(argv)
    try:
        peers = chosen(flags.without)
        _check_labels(flags.only, [OURS, *peers])
        source, vocab_size = model_file(flags.model)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not flags.anyway and (reason := machine.refusal(machine.sample_busy_cores())):
        raise SystemExit(reason)
    only = tuple(flags.only)
    contest = Contest(Job("", flags.threads, vocab_size, 0, ()), printer(), only)
    for engine in (OURS, *peers):
        contest.enter(engine, source)
    shapes = quick_shapes() if flags.quick else SHAPES
    shapes = tuple(s for s in shapes if s.name in (flags.shape or NAMES))
    compare(contest, flags.repeats, shapes)
    result = document(contest, source.name, flags.repeats)
    if flags.quick:
        result["notes"].append("--quick: tiny shapes, these numbers mean nothing")
    print("Median (least-greatest): tokens per second, of start_warm seconds.\n")
    print(report.aligned(report.rows(result)))
    for name, why in result["left_out"].items():
        print(f"\nLeft out: {name}: {why}")
    for note in result["notes"]:
        print(f"\nNote: {note}")
    print(json.dumps(result))


def _check_labels(only: list[str], engines: list[Engine]) -> None:
    """Raise ValueError for a label that no engine has."""
    known = [label for engine in engines for label, _ in labels(engine)]
    for label in only:
        if label not in known:
            raise ValueError(f"--only {label!r}: there are {', '.join(known)}")


def model_file(name: str) -> tuple[Path, int]:
    """Return the GGUF file that ``name`` means, fetched if need be, and its vocabulary's size."""
    from ridgeline.engine.setup.home import locate
    from ridgeline.model.files.checkpoint import load_checkpoint

    path = locate(name).path.resolve()
    if path.suffix != ".gguf":
        raise ValueError(
            f"{name}: the peers are given the weights of a .gguf file, not {path.name}"
        )
    return path, load_checkpoint(path).arch.vocab_size


def printer() -> Callable[[str], None]:
    """Return what shows progress, on standard error: with a clock, and with rich where it is."""
    began_s = time.monotonic()
    try:
        from rich.console import Console

        show: Callable[[str], None] = Console(stderr=True, highlight=False, markup=False).print
    except ImportError:
        show = lambda text: print(text, file=sys.stderr)  # noqa: E731

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
        show(f"{minutes:3d}:{seconds:02d} {text}")

    return say


if __name__ == "__main__":
    main()
