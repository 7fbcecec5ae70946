"""What this machine is, what will be used, and what is wrong. Changes nothing.

A roof that it measured is kept, for plans and for servers that were not calibrated.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from threadpoolctl import threadpool_info

from ridgeline import LLM, SamplingParams
from ridgeline.backends import AUTO, BACKENDS, cuda
from ridgeline.bench.gpu import PARTS, Finding, measure
from ridgeline.engine.calibration import measure_and_save_roof, stored_calibrations, unreadable
from ridgeline.engine.setup.home import stores, why_unwritable
from ridgeline.engine.setup.progress import count_bar
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.model.hub.short_names import SHORT_NAMES
from ridgeline.planner.needs import needs_of_file
from ridgeline.system.machine import (
    available_bytes,
    cpu_fact,
    processor_name,
    tiles_refusal,
    total_bytes,
    usable_cpus,
)
from ridgeline.system.report import Cell, Row, Table, bold, gb, gib, of_pairs
from ridgeline.system.terminal import drawn

_MOST_OFF = 0.1  # of a thousand steps, after the speed of the moment
_INSTRUCTION_SETS = (  # as Linux spells them, x86 then ARM
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip

# Of the part "roof" of ``ridgeline bench gpu``: what a line is called, its finding, rate and unit.
_GPU_ROOFS = (
    ("gpu memory roof", "copy", "tb_per_s", "TB/s"),
    ("gpu bf16 roof", "product bfloat16", "tflops_per_s", "TFLOP/s"),
)


def report(
    console: Console, home: Path, *, model: str | None = None, with_roof: bool = False
) -> None:
    """Print the facts as a table, then every problem with its way out.

    ``model`` is loaded, and what this process takes with it is shown line by line. ``with_roof``
    adds what memory and arithmetic reach, measured for about ten seconds.
    """
    console.print(drawn(of_pairs(_pairs(home, with_roof=with_roof))))
    if model is not None:
        _report_memory(console, model)
    all_problems = list(problems(home))
    for problem in all_problems:
        console.print(f"[yellow]problem[/]  {escape(problem)}")
    if not all_problems:
        console.print("[green]nothing is wrong[/]  next: ridgeline run smollm2")


def document(home: Path, *, model: str | None = None, with_roof: bool = False) -> dict[str, Any]:
    """Return what ``report`` prints, for JSON: facts, problems, and a model's memory in bytes."""
    pairs = _pairs(home, with_roof=with_roof)
    content: dict[str, Any] = {"facts": [{"name": name, "value": value} for name, value in pairs]}
    if model is not None:
        with LLM(model) as llm:
            llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))
            content["memory"] = llm.memory().as_dict()
    return content | {"problems": list(problems(home))}


def _pairs(home: Path, *, with_roof: bool) -> Iterator[tuple[str, str]]:
    yield from facts(home)
    if with_roof:
        yield from roof_facts(home)
        yield from gpu_roof_facts(home)


def facts(home: Path) -> Iterator[tuple[str, str]]:
    """Yield what this machine has and what will be used: name and text."""
    flags = cpu_fact("flags", "Features").split()
    sets = [name for name in _INSTRUCTION_SETS if name in flags]
    cores = usable_cpus()
    yield "processor", f"{processor_name()}, {cores} of {os.cpu_count()} cores usable"
    yield "instruction sets", " ".join(sets) or "unknown"
    refusal = tiles_refusal()
    yield "matrix tiles", f"not used: {refusal}" if refusal else "granted: int8-row uses them"
    yield "memory", f"{gib(available_bytes())} usable of {gib(total_bytes())}"
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    library = f"{blas[0]['internal_api']} {blas[0]['version']}" if blas else "no BLAS"
    yield "numpy", f"{np.__version__} with {library}"
    yield from cuda.gpu_models.lines()
    approval = cuda.approval.read(home)
    if approval is not None:
        taken = "--backend auto takes it" if approval.is_open else f"--backend auto is {AUTO}"
        yield "gpu gate", f"{approval.why}: {taken}"
    name = "cuda" if approval and approval.is_open else AUTO
    yield "backend", f"{name} ({BACKENDS[name].describe()}), {cores} threads"
    disk = shutil.disk_usage(_existing(home)).free
    yield "models", f"{home / 'models'} ({gib(disk)} free on disk)"
    yield "models here", ", ".join(place.name for place in stores().all()) or "none yet"
    lines = [foreseen(calibration) for calibration in stored_calibrations(home)]
    for line in lines or ["nothing measured yet: ridgeline calibrate MODEL"]:
        yield "foresight", line


def foreseen(calibration: Calibration) -> str:
    """Say how well the times of a model's steps are known, and its recent speed."""
    days = (time.time() - calibration.measured_at) / 86400
    when = "today" if days < 1 else f"{days:,.0f} days ago"
    how = "measured" if calibration.source == "measured" else "learnt while serving,"
    on = f"{calibration.backend}, {calibration.threads} threads"
    texts = [f"{calibration.model}: step times {how} {when} ({on})"]
    reads = {
        "weights at {:,.1f} GB/s or more": calibration.weights_bytes_per_s,
        "the KV cache at {:,.1f} GB/s": calibration.kv_bytes_per_s,
    }
    if speeds := [text.format(rate / 1e9) for text, rate in reads.items() if rate]:
        texts.append(f"it reads {' and '.join(speeds)}")
    if calibration.factors:
        speed = 1 / calibration.factors[-1]
        if 0.5 <= speed <= 2:
            texts.append(f"it last ran at {speed:.0%} of that speed")
        else:  # no machine drifts so far
            again = f"ridgeline calibrate {calibration.model}"
            texts.append(f"it last ran at {speed:,.1f} times that speed: {again}")
    errors = (
        ("one step", calibration.step_error),
        ("a thousand steps together", calibration.total_error),
    )
    if off := [f"{of} by {abs(error):.0%}" for of, error in errors if error is not None]:
        texts.append(f"predictions miss {' and '.join(off)}")
    return "; ".join(texts)


def _report_memory(console: Console, model: str) -> None:
    """Load a model, let it answer, and print what takes this process's memory."""
    with LLM(model) as llm:
        llm.tokenizer.prepare()
        loaded = {line.name: line.resident_bytes for line in llm.memory().lines}
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))
        memory = llm.memory()
        path = llm.path
        needs = needs_of_file(path)
    rows: list[Row] = []
    for line in memory.lines:
        is_rest = line.name.startswith("process.")
        sizes = (line.num_bytes, loaded.get(line.name, 0), line.resident_bytes)
        cells = ["" if is_rest else _mb(sizes[0]), *map(_mb, sizes[1:])]
        how = f"{line.how}, mapped from a file" if line.is_mapped else line.how
        rows.append((line.name, *cells, Cell(how, "dim")))
    cells = [_mb(sum(loaded.values())), _mb(memory.resident_bytes)]
    rows.append(bold("all of this process", "", *cells))
    for device, size in memory.device_bytes.items():
        rows.append(bold(f"all of {device}", "", "", _mb(size)))
    console.print(f"\n[bold]{escape(path.name)}[/] in this process:")
    heads = ("MB of memory", "may take", "loaded", "after an answer", "how")
    console.print(drawn(Table(heads, rows, "lrrrl")))
    for note in (needs.sentence, *memory.notes):
        console.print(f"- {note}", style="dim", highlight=False)
    console.print()


def roof_facts(home: Path) -> Iterator[tuple[str, str]]:
    """Measure this machine's roof and keep it for plans; yield a line for each part of it."""
    with count_bar("Measuring the roof", note="rounds") as show:
        roof = measure_and_save_roof(home, show)
    for name, attribute, unit in (
        ("memory roof", "read_bytes_per_s", "GB/s"),
        ("int8 roof", "int8_ops_per_s", "GOP/s"),
        ("bf16 roof", "bf16_ops_per_s", "GOP/s"),
        ("f32 roof", "f32_ops_per_s", "GOP/s"),
    ):
        if attribute in roof.all_threads:
            alone, together = (
                f"{rates[attribute] / 1e9:8,.1f} {unit:5}"
                for rates in (roof.one_thread, roof.all_threads)
            )
            on_all = f"   {together} on {roof.threads}" if roof.threads > 1 else ""
            yield name, f"{alone} on 1 thread{on_all}"


def gpu_roof_facts(home: Path) -> Iterator[tuple[str, str]]:
    """Measure what the first GPU reaches, in a process of its own: twenty seconds at most.

    Nothing is yielded where there is no GPU that the cuda backend could compute on.
    """
    if cuda.device.problem() is not None:
        return
    roofs: dict[str, Finding] = {}
    measure(
        "roof",
        left_s=PARTS["roof"],
        is_tiny=False,
        home=home,
        take=lambda finding: roofs.update({finding["what"]: finding}),
    )
    for name, what, rate, unit in _GPU_ROOFS:
        if rate in (of := roofs.get(what, {})):
            yield name, f"{of[rate]:8,.2f} {unit}"
        else:
            why = of.get("failed") or " ".join(roofs["end"]["tail"][-1:]) or "nothing was measured"
            yield name, f"unknown: {why}"


def problems(home: Path) -> Iterator[str]:
    """Yield what is wrong, and what to do about it."""
    cores = usable_cpus()
    if available_bytes() < 2 << 30:
        needed = gb(SHORT_NAMES["smollm2"].needed_bytes)
        yield f"only {gib(available_bytes())} of memory: smollm2 needs {needed}, close something"
    if cores < (os.cpu_count() or 1):
        yield f"{cores} of {os.cpu_count()} cores may be used: see taskset or the container's limit"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5 * cores:
        yield f"the machine is busy (load {load:.1f} on {cores} cores): answers will be slower"
    if not any(pool["user_api"] == "blas" for pool in threadpool_info()):
        yield "numpy found no BLAS library: matrix products will be very slow; reinstall numpy"
    for reason in unreadable(home):
        yield f"{reason}; the next measurement replaces it"
    for calibration in stored_calibrations(home):
        if abs(calibration.total_error or 0.0) > _MOST_OFF:
            yield (
                f"{calibration.model}: steps are off by {abs(calibration.total_error or 0.0):.0%} "
                "from the prediction, and not just because the machine is slower: run ridgeline "
                "calibrate for it while nothing else runs"
            )
    yield from cuda.gpu_models.problems()
    if problem := why_unwritable(home):
        yield f"{home} cannot be written ({problem}): set RIDGELINE_HOME to a directory of yours"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"
