"""All parts one after another; findings go to a file as they come, and a table to the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.backends import cuda
from ridgeline.bench.out_file import check_place
from ridgeline.engine.setup.home import default_home
from ridgeline.model.cost.hardware import Device
from ridgeline.model.files.tensors import naming
from ridgeline.planner.catalogue import cards_here
from ridgeline.system.report import figure

Finding = Mapping[str, Any]

# Seconds that each may take on a GPU, in the order of what must be known first.
PARTS: Mapping[str, float] = {
    "smoke": 110, "correct": 80, "bits": 65, "engine": 150, "roof": 20, "products": 45,
    "attention": 40, "peer": 60,
}  # fmt: skip
# Processes side by side, where nothing is timed but what decides nothing: they compile together.
_WORKERS: Mapping[str, int] = {"correct": 4, "bits": 4}
_TINY_S = 600.0  # of a part on a CPU, however busy the machine is
_SILENT_S = 60.0  # of a case on a GPU: the first of a part compiles
_REPORT_S = 8.0  # before its deadline a part begins nothing new
_LEAST_S = 12.0  # for a part, or a process of it, to be begun
_TAIL = 4  # lines of what else a part printed, as of an error
_MODULE = "ridgeline.backends.cuda.measure"
NO_DEVICE = 3  # its status where there is nothing to compute on; its last line says why
LOST = 5  # its status where a device failed for good, in a case that it named


class ProcessEnd(NamedTuple):
    """How a process ended.

    Attributes:
        code: its status; None if it was ended.
        tail: the last lines of what was no finding.
        cases: cases that ended.
        lost: the case that it did not end, nor say why; "" for none.
    """

    code: int | None
    tail: list[str]
    cases: list[str]
    lost: str = ""


def measure(
    part: str, *, left_s: float, is_tiny: bool, home: Path, take: Callable[[Finding], None]
) -> None:
    """Run a part within ``left_s``, and hand on its findings; kernels are kept below ``home``."""
    seconds = _TINY_S if is_tiny else min(PARTS[part], left_s)
    kernels = str(home / "kernels" / "triton")
    cache = {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", kernels)}
    count = 1 if is_tiny else _WORKERS.get(part, 1)
    command = [sys.executable, "-m", _MODULE, part, "--workers", f"{count}"]
    if is_tiny:
        command.append("--tiny")
    silent_s = _TINY_S if is_tiny else _SILENT_S
    run(part, command, seconds, os.environ | cache, take, silent_s=silent_s, workers=count)


def run(
    part: str,
    command: Sequence[str],
    seconds: float,
    env: Mapping[str, str],
    take: Callable[[Finding], None],
    *,
    silent_s: float = _SILENT_S,
    workers: int = 1,
) -> None:
    """Run a command in as many processes, and hand on each line of JSON; the last is their end.

    Each is told which worker it is, its seconds, and which cases are known already.

    Args:
        part: what findings of its own are of.
        command: of a process.
        seconds: what still runs then is killed, with all processes that it started.
        env: of the processes.
        take: called with each finding.
        silent_s: how long a case may say nothing.
        workers: processes side by side.
    """
    begin_s, team = time.monotonic(), _Team()

    def take_one(finding: Finding) -> None:
        with team.lock:
            take(finding)

    worker = partial(_work, team, part, command, begin_s + seconds, env, take_one, silent_s)
    with ThreadPoolExecutor(workers) as pool:
        try:
            ends = list(pool.map(worker, range(workers)))
        finally:
            team.stop()
    worst = next((end for end in ends if end.code != 0), ends[0])
    took_s = time.monotonic() - begin_s
    take({"part": part, "what": "end", "code": worst.code, "seconds": took_s, "tail": worst.tail})


class _Team:
    """Processes that are under way, until all are told to stop."""

    def __init__(self) -> None:
        """Begin with none."""
        self.lock = threading.Lock()
        self._is_over, self._processes = False, list[_Process]()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> _Process | None:
        """Start a process; None if it is too late."""
        with self.lock:
            if self._is_over:
                return None
            self._processes.append(_Process(command, env))
            return self._processes[-1]

    def stop(self) -> None:
        """Kill all processes, and start none any more."""
        with self.lock:
            self._is_over = True
        for process in self._processes:
            process.kill()


def _work(
    team: _Team,
    part: str,
    command: Sequence[str],
    end_s: float,
    env: Mapping[str, str],
    take: Callable[[Finding], None],
    silent_s: float,
    worker: int,
) -> ProcessEnd:
    """Run a worker's process, and new ones behind each case in which one is lost."""
    cases: list[str] = []
    while True:
        left_s = end_s - time.monotonic()
        given = ["--worker", f"{worker}", "--seconds", f"{left_s - _REPORT_S:.1f}"]
        process = team.start([*command, *given, "--skip", json.dumps(cases)], env)
        if process is None:
            return ProcessEnd(None, [], cases)
        ended = process.follow(end_s, silent_s, take)
        cases += ended.cases
        if ended.lost:
            cases.append(ended.lost)
            why = _why(ended, is_late=end_s <= time.monotonic())
            take({"part": part, "what": ended.lost, "failed": why, "ok": False})
        goes_on = ended.lost or (ended.cases and ended.code == LOST)
        if not goes_on or end_s - time.monotonic() < _LEAST_S:
            return ended


def _why(ended: ProcessEnd, *, is_late: bool) -> str:
    last = (ended.tail or [""])[-1]
    if ended.code is not None:
        return f"its process ended with {ended.code}: {last}"
    return f"{'no time was left' if is_late else 'silent for too long'}, killed. {last}".rstrip()


class _Process:
    """A process, and the lines that it prints."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it, in a group of its own."""
        self._child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(env) | {"PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read, args=(self._child, self._lines), daemon=True)
        self._reader.start()
        self._under_way: list[str] = []  # cases, of which each may be part of the one before
        self._cases: list[str] = []
        self._tail: list[str] = []

    def follow(self, end_s: float, silent_s: float, take: Callable[[Finding], None]) -> ProcessEnd:
        """Hand on its findings until it ends; kill it at its end, or when it is silent."""
        code: int | None = None
        try:
            with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
                while (line := self._lines.get(timeout=self._left_s(end_s, silent_s))) is not None:
                    self._note(line, take)
                code = self._child.wait(timeout=self._left_s(end_s, silent_s))
        finally:
            self.kill()
            self._reader.join(_REPORT_S)
        lost = self._under_way[-1] if self._under_way and code not in (0, LOST) else ""
        return ProcessEnd(code, self._tail, self._cases, lost)

    def kill(self) -> None:
        """Kill it, and all that it started."""
        _kill(self._child)

    def _left_s(self, end_s: float, silent_s: float) -> float:
        left_s = end_s - time.monotonic()
        return max(0.0, min(left_s, silent_s) if self._under_way else left_s)

    def _note(self, line: str, take: Callable[[Finding], None]) -> None:
        message = _object(line)
        if message is None:
            if line.strip():
                self._tail = [*self._tail[1 - _TAIL :], line.rstrip()]
        elif "begins" in message:
            self._under_way.append(message["begins"])
        elif "ends" in message:
            self._under_way.remove(message["ends"])
            self._cases.append(message["ends"])
        else:
            take(message)


def _read(child: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout as output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _object(line: str) -> Finding | None:
    """Return a line of JSON that is a part's; None of what libraries print."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    is_of_part = isinstance(message, dict) and "part" in message
    return message if is_of_part and message.keys() & {"what", "begins", "ends"} else None


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and those that it started. One that waits for a driver may outlive that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_REPORT_S)


# Shares of the floor that whole steps should reach: what is wanted first, and in the end.
_DECODE = {1: (0.60, 0.79), 64: (0.60, 0.77), 256: (0.60, 0.75)}
_PREFILL = (0.45, 0.62)
_LEAST_OF_TORCH = 0.90  # speed of a product of ours
_LEAST_OF_ROOF = 0.70  # of attention over single tokens
_LARGE_BYTES = 64 << 20  # of keys and values, below which launching is what takes time
_LEAST_OF_PEER = 1.5
_WAY = "graphs and ahead"  # that steps are meant to run
_GATE = {"smoke", "correct", "bits"}  # parts that must be right before "auto" takes a GPU
_SHOWN = 4


def is_wrong(finding: Finding) -> bool:
    """Whether a finding is a check that failed, or a part that did not end by itself."""
    if finding["what"] == "end":
        return bool(finding["code"] != 0)
    return not finding.get("ok", True)


def passes(findings: Sequence[Finding]) -> bool | None:
    """Return whether answers are right on this card; None if not all of it was checked."""
    checks = [one for one in findings if one["part"] in _GATE]
    if any(map(is_wrong, checks)):
        return False
    ended = {one["part"] for one in checks if one["what"] == "end"}
    left = any(one["what"] == "left out" for one in checks)
    return True if ended >= _GATE and not left else None


def floor_s(finding: Finding, device: Device | None) -> float | None:
    """Return the least time of a step on a card, as the planner reckons; None if unknown."""
    if device is None or "least_bytes" not in finding:
        return None
    reads_s = float(finding["least_bytes"]) / device.read_bytes_per_s
    return max(reads_s, float(finding["flops"]) / device.peak_ops_per_s["bf16"])


def share_of_floor(finding: Finding, device: Device | None) -> float | None:
    """Return the least time over the time that a step took."""
    least_s = floor_s(finding, device)
    return None if least_s is None else least_s * 1e3 / float(finding["ms"])


def decisions(findings: Sequence[Finding], device: Device | None) -> Iterator[str]:
    """Yield a line for each question that the findings answer."""
    yield from _correct(findings)
    yield from _bits(findings)
    yield from _gate(findings)
    yield from _steps(findings, device)
    yield from _ahead(findings)
    yield from _products(findings)
    yield from _packed(findings)
    yield from _attention(findings)
    yield from _peer(findings)


def _correct(findings: Sequence[Finding]) -> Iterator[str]:
    checks = [one for one in findings if one["part"] in ("smoke", "correct")]
    wrong = sum(map(is_wrong, checks))
    if wrong:
        yield f"right? NO: {wrong} wrong in smoke and correct: mend these; no speed counts before"
    elif any("ok" in one for one in checks):
        yield "right? yes: smoke and correct are clean, so speeds count"


def _bits(findings: Sequence[Finding]) -> Iterator[str]:
    comparisons = [one for one in findings if one["part"] == "bits" and "same_bits" in one]
    ours = [one for one in comparisons if "ok" in one]
    differ = [one["what"] for one in ours if not one["same_bits"]]
    if differ:
        yield (
            f"same bits? NO, in {len(differ)} of {len(ours)}: one tile for all numbers of rows "
            f"there, or the promise is void on this card: {_few(differ)}"
        )
    elif ours:
        of_torch = [one["same_bits"] for one in comparisons if "ok" not in one]
        yield (
            f"same bits? yes, in all {len(ours)}: tiles may differ by the number of rows; torch's "
            f"product keeps them in {sum(of_torch)} of {len(of_torch)}"
        )


def _gate(findings: Sequence[Finding]) -> Iterator[str]:
    if (passed := passes(findings)) is not None:
        no = "the processor: this GPU has to be right first"
        yield f"--backend auto? {'this GPU, from now on' if passed else no}"


def _steps(findings: Sequence[Finding], device: Device | None) -> Iterator[str]:
    for one in findings:
        share = share_of_floor(one, device)
        wanted = _PREFILL if "prefill" in one["what"] else _DECODE.get(one.get("batch", 0))
        is_meant = " bf16 " in one["what"] and one.get("way", _WAY) == _WAY
        if share is None or wanted is None or not is_meant:
            continue
        first, last = wanted
        verdict = "the target" if share >= last else "enough to land" if share >= first else "LOW"
        yield (
            f"{one['what'].partition(',')[0]}: {share:.0%} of the floor, {verdict} (first "
            f"{first:.0%}, target {last:.0%})"
            + ("" if share >= first else ": see host us, attention, products")
        )


def _ahead(findings: Sequence[Finding]) -> Iterator[str]:
    rates = {one["what"]: one["tok_per_s"] for one in findings if "way" in one}
    gains = {
        what.partition(",")[0]: rate / rates[plain] - 1
        for what, rate in rates.items()
        if what.endswith(_WAY) and (plain := what.removesuffix(" and ahead")) in rates
    }
    if gains:
        least, most = min(gains.values()), max(gains.values())
        verdict = "keep it" if least > -0.02 else "NO GAIN somewhere: see rest and waits of host us"
        yield f"running ahead gains {least:.0%} to {most:.0%}: {verdict}"


def _products(findings: Sequence[Finding]) -> Iterator[str]:
    ours = [one for one in findings if one.get("who") == "ours"]
    slow = [one["what"] for one in ours if one["speed_of_torch"] < _LEAST_OF_TORCH]
    if slow:
        yield (
            f"our product is below {_LEAST_OF_TORCH:.0%} of torch's in {len(slow)} of {len(ours)}: "
            f"try other tiles there: {_few(slow)}"
        )
    elif ours:
        yield f"our product has {_LEAST_OF_TORCH:.0%} of torch's speed everywhere: keep the tiles"


def _packed(findings: Sequence[Finding]) -> Iterator[str]:
    of_64 = {one["what"]: one["us"] for one in findings if one.get("rows") == 64}
    pairs = [(what, us, of_64.get(what.replace("int4", "ours"))) for what, us in of_64.items()]
    slower = [
        what for what, us, wide in pairs if what.endswith("int4") and wide is not None and us > wide
    ]
    if slower:
        yield f"int4 is slower than bf16 at 64 rows: unpack once a step above that: {_few(slower)}"
    elif any(what.endswith("int4") for what in of_64):
        yield "int4 is as fast as bf16 at 64 rows: the packed product serves all numbers of rows"


def _attention(findings: Sequence[Finding]) -> Iterator[str]:
    roofs = [one["tb_per_s"] for one in findings if one["part"] == "roof" and "tb_per_s" in one]
    decodes = [one for one in findings if one["part"] == "attention" and "num_bytes" in one]
    large = [one for one in decodes if one["num_bytes"] >= _LARGE_BYTES]
    if not roofs or not large:
        return
    slow = [one["what"] for one in large if one["tb_per_s"] < _LEAST_OF_ROOF * max(roofs)]
    what = f"attention of single tokens at {_LEAST_OF_ROOF:.0%} of the fastest copy or read"
    if slow:
        yield f"{what}: NO in {len(slow)}: try other rows and warps for it: {_few(slow)}"
    else:
        yield f"{what}: yes, in all {len(large)} of 64 MiB and more"


def _peer(findings: Sequence[Finding]) -> Iterator[str]:
    peers = [one["tok_per_s"] for one in findings if one.get("peer") == "warm"]
    ours = [
        one["tok_per_s"]
        for one in findings
        if one.get("workload") == "warm" and " bf16 " in one["what"] and "llama" in one["what"]
    ]
    if peers and ours:
        ratio = ours[0] / max(peers)
        verdict = "enough" if ratio >= _LEAST_OF_PEER else "TOO LITTLE"
        yield f"{ratio:.1f} times transformers' batching, {verdict} (wanted {_LEAST_OF_PEER})"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more


MOST_CHARACTERS = 11_000  # what a terminal's record of a run usually keeps whole
_MOST_WRONG = 25
_MOST_REASON = 200
_HOST_MATTERS = 64  # sequences of a step
# What is shown of a finding, and after which name.
_NUMBERS = (
    "tok_per_s", "ms", "us", "sdpa_us", "tb_per_s", "gb_per_s", "tflops_per_s",
    "sdpa_tflops_per_s", "seconds", "steps", "num_ahead", "gb",
)  # fmt: skip


def table(findings: Sequence[Finding], device: Device | None, *, decides: bool = True) -> str:
    """Return the last lines of a run; of too many the first are left out.

    ``device`` is the card as the catalogue knows it, if it does; a run on a CPU decides nothing.
    """
    lines = [
        *_numbers(findings, device),
        *_ends(findings),
        *(f"=> {line}" for line in decisions(findings, device) if decides),
        *_wrong(findings),
    ]
    tail: list[str] = []
    room = MOST_CHARACTERS
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0:
            break
        tail.insert(0, line)
    return "\n".join(tail)


def _numbers(findings: Sequence[Finding], device: Device | None) -> Iterator[str]:
    """Yield what was measured; what was measured in several ways has one line."""
    together: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        has_ways = "way" in one or "who" in one
        what = one["what"].rpartition(", ")[0] if has_ways else one["what"]
        together.setdefault((one["part"], what), []).append(one)
    for (part, what), ones in together.items():
        first = ones[0]
        if what == "end" or (part == "correct" and "us" not in first):
            continue
        if "way" in first:
            shown = _ways(ones, "way", "tok_per_s")
        elif "who" in first:
            shown = _ways(ones, "who", "us")
        else:
            shown = [f"{name} {figure(first[name])}" for name in _NUMBERS if name in first]
        if (share := share_of_floor(first, device)) is not None:
            shown.append(f"of floor {share:.0%}")
        if "host_us" in first and first["batch"] >= _HOST_MATTERS:
            host = ", ".join(f"{name} {us:.0f}" for name, us in first["host_us"].items())
            shown.append(f"host us {host}")
        if shown:
            yield f"{part:9} {what}: {', '.join(shown)}"


def _ways(findings: Sequence[Finding], name: str, number: str) -> list[str]:
    """Return one number of each way."""
    first, *rest = [f"{one[name]} {figure(one[number])}" for one in findings]
    return [f"{number} {first}", *rest]


def _ends(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield how each part ended, what it left out, and what others could not."""
    for one in findings:
        if one["what"] == "left out":
            yield f"{one['part']}: no time left for {', '.join(one['cases'])}"[:_MOST_REASON]
        elif "failed" in one and not is_wrong(one):
            yield f"{one['part']}: {one['what']} failed, {one['failed']}"[:_MOST_REASON]
        elif one["what"] == "skipped":
            yield f"{one['part']}: skipped, {one['why']}"
        elif one["what"] == "end":
            checks = [c for c in findings if c["part"] == one["part"] and "ok" in c]
            right = sum(bool(check["ok"]) for check in checks)
            yield f"{one['part']}: {right} of {len(checks)} checks right, {one['seconds']:.0f} s"


def _wrong(findings: Sequence[Finding]) -> Iterator[str]:
    wrong = [one for one in findings if is_wrong(one)]
    for one in wrong[:_MOST_WRONG]:
        yield f"WRONG {one['part']}: {_reason(one)}"[:_MOST_REASON]
    if len(wrong) > _MOST_WRONG:
        yield f"WRONG and {len(wrong) - _MOST_WRONG} more"
    yield f"{len(wrong)} wrong" if wrong else "nothing is wrong"


def _reason(finding: Finding) -> str:
    if finding["what"] != "end":
        figures = (
            f"{name} {finding[name]}" for name in ("failed", "error", "bad") if name in finding
        )
        return f"{finding['what']} {', '.join(figures)}"
    last = (finding["tail"] or [""])[-1]
    if finding["code"] is None:
        return f"ended at its deadline after {finding['seconds']:.0f} s {last}"
    return f"ended with {finding['code']} after {finding['seconds']:.0f} s: {last}"


SECONDS = 570.0  # for all parts: machines are often lent for ten minutes


def chosen_parts(text: str | None) -> list[str]:
    """Return the parts of a list with commas between, in our order; ValueError names one that
    there is not.
    """
    wanted = list(PARTS) if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in wanted if name not in PARTS]:
        raise ValueError(f"--parts {unknown[0]} is not one of {', '.join(PARTS)}")
    return [name for name in PARTS if name in wanted]


def bench_gpu(parts: Sequence[str], seconds: float, *, is_tiny: bool, out: Path | None) -> bool:
    """Measure, print, and return whether nothing is wrong.

    If smoke, correct and bits were all checked, it is remembered whether ``--backend auto`` may
    take this GPU.

    Args:
        parts: of ``PARTS``.
        seconds: for all of them; those for which nothing is left are named.
        is_tiny: small shapes, computed by twins on the CPU.
        out: where findings go, a line of JSON each.

    Raises:
        ValueError: there is no GPU, or no torch; with the way out.
        OSError: a file cannot be written.
    """
    if out is not None:
        check_place(out)
    end_s = time.monotonic() + seconds
    findings: list[Finding] = []
    machine = _machine(is_tiny)
    device = None if is_tiny else next(iter(cards_here()), None)
    before = signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        file = stack.enter_context(out.open("w", encoding="utf-8")) if out else None

        def take(finding: Finding) -> None:
            findings.append(finding)
            line = json.dumps(finding)
            print(line, flush=True)
            if file is not None and out is not None:
                with naming(out):
                    print(line, file=file, flush=True)

        try:
            take({"part": "all", "what": "machine", **machine})
            _measure(parts, end_s, is_tiny=is_tiny, take=take)
        except KeyboardInterrupt:
            take({"part": "all", "what": "interrupted", "failed": "before its end", "ok": False})
    shown = table(findings, device, decides=not is_tiny)
    print(f"\n{', '.join(machine.values())}\n{shown}", flush=True)
    if not is_tiny and (passed := passes(findings)) is not None:
        cuda.approval.remember(default_home(), machine["date"], is_right=passed)
    return not any(map(is_wrong, findings))


def _measure(
    parts: Sequence[str], end_s: float, *, is_tiny: bool, take: Callable[[Finding], None]
) -> None:
    """Run parts one after another until ``end_s``; ValueError if there is nothing to compute on."""
    home = default_home()
    last: dict[str, Any] = {}

    def note(finding: Finding) -> None:
        last.update(finding)
        take(finding)

    for part in parts:
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S and not is_tiny:
            take({"part": part, "what": "left out", "cases": ["all of it"]})
            continue
        measure(part, left_s=left_s, is_tiny=is_tiny, home=home, take=note)
        if last["code"] == NO_DEVICE:
            raise ValueError(last["tail"][-1])


def _interrupt(number: int, frame: Any) -> None:
    """Print the table of what is known: the sender of the signal would like to read it."""
    raise KeyboardInterrupt


def _machine(is_tiny: bool) -> dict[str, str]:
    date = datetime.now(UTC).isoformat(timespec="minutes")
    if is_tiny:
        return {
            "gpu": "none: twins on the CPU, small shapes; no speed means anything",
            "date": date,
        }
    return {"date": date, **dict(cuda.gpu_models.lines())}


def main() -> None:
    """Run what the same flags of the command line ask for."""
    parser = argparse.ArgumentParser(prog="python -m ridgeline.bench.gpu")
    parser.add_argument("--parts")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        is_right = bench_gpu(
            chosen_parts(args.parts), args.seconds, is_tiny=args.tiny, out=args.out
        )
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
