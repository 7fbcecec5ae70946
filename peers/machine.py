"""Is the machine quiet, and what is it? Read from /proc; nothing is changed."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from ridgeline.system.machine import usable_cpus

BUSY_CORES = 0.10  # more than this much of a core used by others, and nothing is measured
_STAT = Path("/proc/stat")
# Of the columns: user nice system idle iowait irq softirq steal.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
STOLEN_SHARE = 0.05  # of the time that an engine asked for: where more is lost, the result says so


def busy_cores(before: str, after: str) -> float:
    """Return how many cores worked between two readings of /proc/stat; stolen time counts."""
    old, new = _totals(before), _totals(after)
    total, busy = new[0] - old[0], new[1] - old[1]
    cores = sum(line.startswith("cpu") for line in after.splitlines()) - 1
    return cores * busy / total if total else 0.0


def stolen_share(before: str, after: str) -> float:
    """Return which share of the time asked for between two readings a virtual machine's host kept.

    A core that somebody else's guest shares with this one shows as slow, not as stolen.
    """
    old, new = _totals(before), _totals(after)
    asked, stolen = new[1] - old[1], new[2] - old[2]
    return stolen / asked if asked else 0.0


def read_stat() -> str:
    """Return what the system has counted so far."""
    return _STAT.read_text()


def _totals(stat: str) -> tuple[int, int, int]:
    """Return all ticks, those in which something ran or wanted to, and the stolen ones of these."""
    ticks = [int(word) for word in stat.splitlines()[0].split()[1:9]]
    return sum(ticks), sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT], ticks[_STEAL]


def sample_busy_cores(seconds: float = 2.0) -> float:
    """Watch the machine for a while and return how many cores were busy."""
    before = read_stat()
    time.sleep(seconds)
    return busy_cores(before, read_stat())


def refusal(busy: float) -> str | None:
    """Return why nothing is measured at this load, None when it is quiet enough."""
    if busy <= BUSY_CORES:
        return None
    return (
        f"the machine is busy: {busy:.2f} cores are in use, at most {BUSY_CORES:.2f} may be; "
        "stop what else is running, or measure all the same with --anyway"
    )


def description() -> dict[str, str | int]:
    """Return what the result says of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {}
    for line in reversed(lines):  # the first processor's lines win
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    wanted = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    model = facts.get("model name", platform.machine())
    family = " ".join(facts[k] for k in ("cpu family", "model") if k in facts)
    return {
        "cpu": f"{model} (family and model {family})" if family else model,
        "cores": usable_cpus(),
        "instruction_sets": " ".join(name for name in wanted if name in flags),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }
