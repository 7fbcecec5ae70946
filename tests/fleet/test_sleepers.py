"""Models of a router that sleep: which give way, and which are ended."""

from __future__ import annotations

from pathlib import Path

from tests.fleet.test_router import routing


def test_sleepers_are_ended_if_there_is_no_room_beside_them(folder: Path, tmp_path: Path) -> None:
    probe = ("--models-memory", "100KiB")
    with routing(folder, tmp_path / "probe", *probe) as routed:
        assert routed.call("/v1/sleep", {"model": "a"})[0] == 503, "it is not loaded"
    flags = ("--models-memory", "6.5MiB", "--kv-cache-memory", "6MiB")
    with routing(folder, tmp_path / "log", *flags) as routed:
        first = routed.complete("a")
        status, told, _ = routed.call("/v1/sleep", {"model": "a", "level": 1})
        assert (status, told["level"]) == (200, 1)
        assert routed.call("/v1/wake", {"model": "a"})[1]["level"] == 0
        assert routed.complete("b")
        assert "a sleeps, to make room for b" in routed.log
        assert "a makes room for b" in routed.log
        assert routed.complete("a") == first
