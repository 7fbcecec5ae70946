"""What ``nvidia-smi`` says of this machine's GPUs, for ``ridgeline doctor``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import NamedTuple

from ridgeline.backends.cuda.device import dotted, facts, what_is_missing
from ridgeline.system.report import gib

_TIMEOUT_S = 20  # the driver may have to start first
_FIELDS = "name,driver_version,memory.total,memory.free,persistence_mode"
_MIB = 1 << 20


class Card(NamedTuple):
    """One GPU."""

    name: str
    driver: str
    total_bytes: int
    free_bytes: int
    is_persistent: bool


def lines() -> Iterator[tuple[str, str]]:
    """Yield what there is to compute on, name and text; nothing where there is no GPU."""
    gpus = cards()
    if not gpus:
        return
    stack = facts()
    newest = f", CUDA {dotted(stack.driver)}" if stack.driver else ""
    for gpu in gpus:
        sizes = f"{gib(gpu.free_bytes)} usable of {gib(gpu.total_bytes)}"
        yield "gpu", f"{gpu.name}, {sizes}, driver {gpu.driver}{newest}"
    yield "torch", what_is_missing(stack) or f"{stack.torch}, triton {version('triton')}"


def problems() -> Iterator[str]:
    """Yield what keeps the GPUs from being used well, and what to do about it."""
    gpus = cards()
    if gpus and (why := what_is_missing(facts())):
        yield f"the GPU cannot be used: {why}"
    for gpu in gpus:
        if not gpu.is_persistent:
            yield (
                f"{gpu.name}: persistence mode is off, so each start waits for the driver: "
                f"nvidia-smi -pm 1, as root"
            )
    others = _ask("--query-compute-apps=pid,used_memory")
    if others:
        used = sum(_mib(size) for _, size in others)
        yield (
            f"{len(others)} other processes use {gib(used)} of the GPUs' memory: nvidia-smi says "
            f"which; a model gets what is left"
        )


def cards() -> list[Card]:
    """Return the GPUs of this machine; none where nvidia-smi is not there, or fails."""
    return [
        Card(name, driver, _mib(total), _mib(free), persistence == "Enabled")
        for name, driver, total, free, persistence in _ask(f"--query-gpu={_FIELDS}")
    ]


def _ask(query: str) -> Sequence[list[str]]:
    """Return the rows that nvidia-smi answers; none where it is not there, or fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    wanted = query.count(",") + 1
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == wanted]


def _mib(text: str) -> int:
    """Return the bytes of a number of MiB; 0 if it is no number, as with some drivers."""
    return int(text) * _MIB if text.isdigit() else 0
