"""The roof's kernels do the work they are credited with; the rest is plumbing. No speeds here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels import probes
from ridgeline.backends.cpu.kernels.compile import host_target
from ridgeline.backends.cpu.measure import roofs as roof
from ridgeline.backends.cpu.measure.roofs import Rates, Roof
from ridgeline.cli.commands import doctor
from ridgeline.engine.calibration import measure_and_save_roof, save_roof, stored_roof
from ridgeline.foresight.step_time.calibration import KeptRoof
from ridgeline.system.machine import usable_cpus

HOST = host_target()
TILES = ["int8", "f32", *(["bf16"] if HOST.features.get("avx512bf16") else [])]


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_READ_BYTES": 1 << 20,
        "_QUICK_READ_BYTES": 1 << 20,
        "_ROUND_S": 1e-4,
        "_QUICK_ROUND_S": 1e-4,
        "_ROUNDS": 3,
    }.items():
        monkeypatch.setattr(roof, name, value)


def test_reading_reads_every_byte_as_often_as_it_says() -> None:
    kernels = probes.compile_probes(["read"], HOST)
    data = aligned(5 * 4096, np.int64)
    data[...] = np.random.default_rng(0).integers(0, 1 << 62, len(data))
    whole = np.bitwise_xor.reduce(data)
    kernels.function("read", 3)(address(data), data.nbytes, 3)  # an odd number of times
    found = np.bitwise_xor.reduce(data[: 4 * 8])  # the streams' sums, eight words each
    assert found == whole


@pytest.mark.parametrize("name", TILES)
def test_products_are_as_many_as_they_count(name: str) -> None:
    kernels = probes.compile_probes([name], HOST)
    probe = roof._tile_probe(kernels, name, 1, HOST)
    probe.seconds(37)
    assert isinstance(probe.owners, tuple)
    results = probe.owners[1].view(np.uint8).reshape(-1)[probes._RESULT_AT :]
    rows, halves = probes.tile_shape(HOST)
    sums = results[: rows * halves * 64].view(np.int32 if name == "int8" else np.float32)
    assert sums.sum() * 2 == 37 * probe.per_count  # of ones times ones
    assert (sums == sums[0]).all()


def test_threads_share_the_memory_without_overlap() -> None:
    kernels = probes.compile_probes(["read"], HOST)
    probe = roof._read_probe(kernels, roof._buffer(1 << 20), 3)
    assert probe.size == probe.per_count
    assert all(b - a == probe.size for a, b in pairwise(probe.memories))
    assert 3 * probe.size <= 1 << 20


def test_a_slow_moment_at_first_does_not_make_all_rounds_too_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that the kernel moves: each turn takes a microsecond."""
    counts, now_s = list[int](), 0.0

    def kernel(memory: int, size: int, count: int) -> None:
        nonlocal now_s
        counts.append(count)
        now_s += 0.05 if len(counts) < 4 else 1e-6 * count  # at first somebody else has the core

    monkeypatch.setattr(roof, "time", SimpleNamespace(perf_counter=lambda: now_s))
    probe, best = roof._Probe(kernel, [0], 0, 1, None), 0.0
    for _ in range(12):
        best = max(best, probe.rate(0.016, best))
    assert max(counts[:3]) == 1
    assert counts[-1] == 16_000


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("threads", [1, 2])
def test_measuring_reports_progress_and_finds_every_rate(threads: int) -> None:
    seen: list[tuple[int, int]] = []
    found = roof.measure_roof(threads, lambda done, total: seen.append((done, total)))
    assert seen == [(i, len(seen)) for i in range(len(seen))]
    assert found.threads == threads
    for rates in (found.one_thread, found.all_threads):
        assert rates.read_bytes_per_s > 0
        assert rates.int8_ops_per_s > 0
        assert rates.f32_ops_per_s > 0
        assert (rates.bf16_ops_per_s is not None) == ("bf16" in TILES)
    assert (found.one_thread == found.all_threads) == (threads == 1)


@pytest.mark.usefixtures("hurry")
def test_a_quick_look_at_memory() -> None:
    assert roof.measure_read(2) > 0


def test_buffers_are_really_there() -> None:
    assert roof._buffer(1 << 16).min() == 1


@pytest.mark.parametrize(("threads", "bf16"), [(1, None), (4, 5e11)])
def test_doctor_prints_a_line_for_each_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int, bf16: float | None
) -> None:
    one, many = Rates(2e10, 1e12, bf16, 2.5e11), Rates(4.56e10, 4e12, bf16, 1e12)
    found = Roof(threads, one, many)
    monkeypatch.setattr(roof, "measure_roof", lambda threads, report: found)
    lines = dict(doctor.roof_facts(tmp_path))
    assert ("bf16 roof" in lines) == (bf16 is not None)
    assert len({len(line) for line in lines.values()}) == 1  # aligned
    assert "20.0 GB/s" in lines["memory roof"]
    assert "1,000.0 GOP/s" in lines["int8 roof"]
    assert ("45.6 GB/s  on 4" in lines["memory roof"]) == (threads == 4)


@pytest.mark.usefixtures("hurry")
def test_what_was_measured_is_kept_for_this_processor_and_its_threads(tmp_path: Path) -> None:
    assert stored_roof(tmp_path) is None
    measured = measure_and_save_roof(tmp_path)
    assert stored_roof(tmp_path) == measured
    assert measured.threads == usable_cpus()
    assert measured.read_bytes_per_s() == measured.all_threads["read_bytes_per_s"]
    (path,) = (tmp_path / "roof").iterdir()
    for damage in ("{", "[]", "{}", path.read_text().replace("read_bytes", "wrote_bytes")):
        path.write_text(damage)
        assert stored_roof(tmp_path) is None
    other = replace(measured, processor="another")
    path.write_bytes(save_roof(tmp_path, other).read_bytes())  # a home that was copied
    assert stored_roof(tmp_path) is None


def test_fewer_threads_reach_less_and_what_lacks_an_instruction_is_widened() -> None:
    one = {"read_bytes_per_s": 2e10, "int8_ops_per_s": 1e12, "f32_ops_per_s": 2e11}
    kept = KeptRoof("p", 4, 0.0, one, {name: 3 * rate for name, rate in one.items()})
    assert [kept.read_bytes_per_s(n) for n in (1, 2, 4, None)] == [2e10, 4e10, 6e10, 6e10]
    assert kept.ops_per_s("bf16") == kept.ops_per_s("f32") == 6e11
    assert kept.ops_per_s("int8", 2) == 2e12
