"""All parts one after another; findings go to a file as they come, and a table to the terminal."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.backends import cuda
from ridgeline.bench.gpu.decisions import is_wrong, passes
from ridgeline.bench.gpu.parts import NO_DEVICE, PARTS, Finding, measure
from ridgeline.bench.gpu.table import table
from ridgeline.bench.out_file import check_place
from ridgeline.engine.setup.home import default_home
from ridgeline.model.files.tensors import naming
from ridgeline.planner.catalogue import cards_here

SECONDS = 570.0  # for all parts: machines are often lent for ten minutes
_LEAST_S = 12.0  # for a part to be begun


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
