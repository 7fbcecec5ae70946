"""What this process's memory is taken by: a line for everything that can be named, and the rest.

The lines in memory sum to what the process has in memory. Arrays are counted by their pages, other
things by how much what is in use grew when they were made. What was freed meanwhile and is kept for
the next allocation has a line, and so have pages of files: libraries' code, and a model's file
until all of it is converted. It shows why memory grows and does not come back: a cache is reserved
at the start and takes memory only as its blocks are first used, a mapped file as it is first read,
and both are given back only to sleep (``engine.llm``). It changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, NamedTuple

from ridgeline.backends.interface import MemoryUse
from ridgeline.core.engine import Engine
from ridgeline.core.request import Content
from ridgeline.system.machine import freed_bytes, memory_of
from ridgeline.system.report import gb

MEASURED, COMPUTED = "measured", "computed"
_ID_BYTES = getsizeof(1 << 20)  # a token id or the number of a block, of those that Python keeps


class MemoryLine(NamedTuple):
    """Memory under one name.

    Attributes:
        name: such as ``weights.mlp``; what belongs together has the same beginning.
        num_bytes: that it may take.
        resident_bytes: that it takes now.
        how: "measured" by pages or by growth, or "computed" from the sizes of objects.
        is_mapped: whether it is read from a file: the system may take such memory back at any time.
        device: that has the memory; none is the machine's own, of which alone sums are made.
    """

    name: str
    num_bytes: int
    resident_bytes: int
    how: str
    is_mapped: bool = False
    device: str = ""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """All lines, and what the process has in memory: the sum of what the lines have."""

    lines: tuple[MemoryLine, ...]
    resident_bytes: int

    def part_bytes(self, name: str) -> int:
        """Return what all lines of a name, or with this beginning, have in memory."""
        of_name = (line for line in self.lines if f"{line.name}.".startswith(f"{name}."))
        return sum(line.resident_bytes for line in of_name if not line.device)

    @property
    def device_bytes(self) -> dict[str, int]:
        """What is used of each device's memory, by all processes: the sum of its lines."""
        used = dict.fromkeys((line.device for line in self.lines if line.device), 0)
        for line in self.lines:
            if line.device:
                used[line.device] += line.resident_bytes
        return used

    @property
    def grown_bytes(self) -> int:
        """By how much the process grew since a model began to be loaded."""
        return self.resident_bytes - self.part_bytes("process.before")

    @property
    def notes(self) -> list[str]:
        """What may still grow, and why it does not come back, in sentences."""
        notes = []
        caches = [line for line in self.lines if line.name.endswith("kv_cache")]
        reserved, used = _sizes([line for line in caches if not line.device])
        if reserved:
            notes.append(
                f"The KV cache takes memory as its blocks are first used, and keeps it for the "
                f"next texts: {gb(used)} so far, at most {gb(reserved)} (--kv-cache-memory). "
                f"While the engine sleeps it has none (POST /v1/sleep, --idle-release)."
            )
        for device, size in self.device_bytes.items():
            notes.append(
                f"Of the memory of {device} {gb(size)} are used, by all processes; the KV cache "
                f"has all of its blocks from the start (--kv-cache-memory)."
            )
        mapped = [line for line in self.lines if line.is_mapped]
        if mapped:
            size, read = _sizes(mapped)
            notes.append(
                f"Weights are mapped from a file and read when they are first needed: {gb(read)} "
                f"of {gb(size)}; the system may take this memory back, and shares it among "
                f"processes."
            )
        names = "before", "files", "freed", "other"
        before, files, freed, unnamed = (self.part_bytes(f"process.{name}") for name in names)
        notes.append(
            f"Before it loaded a model, the process had {gb(before)}: Python and libraries. Since "
            f"then it read {gb(files)} of files in place, such as libraries, and freed "
            f"{gb(freed)}, which the next allocations take. {gb(unnamed)} have no name: Python's "
            f"objects, and connections."
        )
        return notes

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        lines = [
            {
                "name": line.name,
                "bytes": line.num_bytes,
                "resident_bytes": line.resident_bytes,
                "how": line.how,
                "mapped": line.is_mapped,
                **({"device": line.device} if line.device else {}),
            }
            for line in self.lines
        ]
        return {
            "resident_bytes": self.resident_bytes,
            "grown_bytes": self.grown_bytes,
            "lines": lines,
            "notes": self.notes,
        }


class Snapshot(NamedTuple):
    """What this process has in memory at one time.

    Attributes:
        resident_bytes: all of it.
        file_bytes: of that, pages of files.
        freed_bytes: of that, what was freed and not given back to the system.
    """

    resident_bytes: int
    file_bytes: int
    freed_bytes: int

    @classmethod
    def now(cls) -> Snapshot:
        """Return what it has now."""
        memory = memory_of(os.getpid())
        return cls(memory.resident_bytes, memory.file_bytes, freed_bytes())


def process_memory(
    parts: Mapping[str, MemoryUse], grown: Mapping[str, int], engine: Engine, before: Snapshot
) -> ProcessMemory:
    """Return the ledger of this process.

    Args:
        parts: what runners hold, by name.
        grown: by how much what is in use grew for other things.
        engine: whose tables and texts are counted.
        before: what the process had when loading began.
    """
    of_runners = [
        MemoryLine(name, part.num_bytes, part.resident_bytes, MEASURED, part.is_mapped, part.device)
        for name, part in parts.items()
    ]
    lines = [line for line in of_runners if not line.device]
    lines += [MemoryLine(name, size, size, MEASURED) for name, size in grown.items()]
    objects = {"engine.blocks": _blocks_bytes(engine), "engine.sequences": _sequences_bytes(engine)}
    lines += [MemoryLine(name, size, size, COMPUTED) for name, size in objects.items()]
    now = Snapshot.now()
    _, of_weights = _sizes([line for line in lines if line.is_mapped])
    since = {
        "process.files": now.file_bytes - before.file_bytes - of_weights,
        "process.freed": now.freed_bytes - before.freed_bytes,
    }
    lines += [MemoryLine(name, max(0, s), max(0, s), MEASURED) for name, s in since.items()]
    named = sum(line.resident_bytes for line in lines)
    # Another model may have been unloaded since, and a system may not say what a process has.
    total = max(now.resident_bytes, named)
    at_start = min(before.resident_bytes, total - named)
    remainder = {"process.before": at_start, "process.other": total - named - at_start}
    lines += [MemoryLine(name, size, size, MEASURED) for name, size in remainder.items()]
    lines += [line for line in of_runners if line.device]
    return ProcessMemory(
        tuple(line for line in lines if line.num_bytes or line.name in remainder), total
    )


def _blocks_bytes(engine: Engine) -> int:
    """Return what the list of blocks and the index of their contents take."""
    kv = engine.scheduler.queues.kv
    pool = kv.pool
    tables = sum(map(getsizeof, (pool.refs, pool.content, pool.group, *pool.index, pool.free)))
    content = Content(bytes(16), b"", (0,) * kv.block_size)
    of_content = getsizeof(content) + getsizeof(content.key) + _ids_bytes(content.tokens)
    return tables + len(pool.refs) * _ID_BYTES + pool.num_indexed * of_content


def _sequences_bytes(engine: Engine) -> int:
    """Return what the tokens and the block tables of sequences take."""
    alive = tuple(engine.scheduler.queues.alive.values())
    prompts = {id(seq.request): seq.request.prompt for seq in alive}
    texts = sum(_ids_bytes(seq.tokens) for seq in alive)
    texts += sum(getsizeof(table) for seq in alive for table in (seq.table, *seq.others))
    return texts + sum(map(getsizeof, prompts.values()))


def _ids_bytes(ids: Sequence[int]) -> int:
    return getsizeof(ids) + len(ids) * _ID_BYTES


def _sizes(lines: Sequence[MemoryLine]) -> tuple[int, int]:
    """Return what lines may take in all, and what they take now."""
    return sum(line.num_bytes for line in lines), sum(line.resident_bytes for line in lines)
