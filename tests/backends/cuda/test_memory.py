"""Lines of a device's memory sum to what the device says is used."""

from __future__ import annotations

import pytest

from ridgeline.backends import cuda
from ridgeline.backends.cuda.device import rest_of_device
from ridgeline.engine.memory import MemoryLine, ProcessMemory
from ridgeline.engine.setup.resolve import _left_bytes
from ridgeline.planner.memory.ledger import ENGINES
from ridgeline.planner.memory.own_engine import OWN, on_gpu


def test_what_has_no_name_has_a_line() -> None:
    named, allocated, reserved, used = 60, 70, 75, 80
    rest = rest_of_device("cuda:0", named, allocated, reserved, used)
    assert named + sum(part.resident_bytes for part in rest.values()) == used
    assert {part.device for part in rest.values()} == {"cuda:0"}
    assert rest["torch.reserve"].num_bytes == 5


def test_a_devices_memory_is_not_the_processs() -> None:
    lines = (
        MemoryLine("weights.mlp", 50, 50, "measured", device="cuda:0"),
        MemoryLine("kv_cache", 30, 30, "measured", device="cuda:0"),
        MemoryLine("states", 7, 7, "measured"),
        MemoryLine("process.other", 3, 3, "measured"),
    )
    memory = ProcessMemory(lines, 10)
    assert memory.device_bytes == {"cuda:0": 80}
    assert memory.part_bytes("weights") == 0
    assert memory.part_bytes("states") == 7
    assert [line.get("device") for line in memory.as_dict()["lines"]] == ["cuda:0"] * 2 + [None] * 2
    assert any("Of the memory of cuda:0" in note for note in memory.notes)
    assert not any("as its blocks are first used" in note for note in memory.notes)


def test_a_margin_is_kept_once() -> None:
    """Of the machine's memory a twentieth; a GPU's room is counted without what it keeps."""
    assert _left_bytes(1000, 100, None) == (900, 0)
    assert _left_bytes(None, 0, 1000) == (1000, 50)
    assert ENGINES[OWN].gpu_memory_utilization == pytest.approx(1 - 50 / 1000)
    assert on_gpu(ENGINES[OWN], None).gpu_memory_utilization == 1 - cuda.KEPT_SHARE
