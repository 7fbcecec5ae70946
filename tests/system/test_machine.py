"""Reading what a (made-up) kernel says of memory and processors."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.system.machine import (
    available_bytes,
    freed_bytes,
    resident_bytes,
    usable_cpus,
    write_whole,
)

MIB = 1024**2
GIB = 1024**3


class Kernel:
    """A tree of files like /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(
        self, path: str, limit: int | str, usage: int, stat: str = "", v1: bool = False
    ) -> None:
        names = ("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")
        for name, value in zip((*names, "stat"), (limit, usage, stat), strict=True):
            self.write(self.cgroup / path / f"memory.{name}", f"{value}\n")

    def available(self) -> int:
        return available_bytes(self.proc, self.cgroup)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_machine_without_groups_has_what_meminfo_says(kernel: Kernel) -> None:
    assert kernel.available() == 8 * GIB


def test_a_group_of_version_2_limits(kernel: Kernel) -> None:
    kernel.write(kernel.proc / "self/cgroup", "0::/user/job\n")
    kernel.group("user/job", 2 * GIB, 512 * MIB)
    assert kernel.available() == 2 * GIB - 512 * MIB


def test_cached_files_of_a_group_can_be_given_up(kernel: Kernel) -> None:
    kernel.write(kernel.proc / "self/cgroup", "0::/\n")
    stat = f"anon 5\ninactive_file {100 * MIB}\nactive_file {200 * MIB}\n"
    kernel.group("", GIB, 500 * MIB, stat)
    assert kernel.available() == GIB - 200 * MIB


def test_the_tightest_group_up_the_tree_counts(kernel: Kernel) -> None:
    kernel.write(kernel.proc / "self/cgroup", "0::/a/b/c\n")
    kernel.group("a/b/c", "max", 1)
    kernel.group("a/b", 3 * GIB, GIB)
    kernel.group("a", 6 * GIB, 5 * GIB)
    assert kernel.available() == GIB


def test_groups_of_version_1_count_their_children(kernel: Kernel) -> None:
    lines = "5:cpuset,cpu:/x\n4:memory:/docker/abc\n1:name=systemd:/x:y\n0::/\n"
    kernel.write(kernel.proc / "self/cgroup", lines)
    stat = f"inactive_file 7\ntotal_inactive_file {50 * MIB}\ntotal_active_file {25 * MIB}\n"
    kernel.group("memory/docker/abc", 300 * MIB, 175 * MIB, stat, v1=True)
    kernel.group("memory", 0x7FFFFFFFFFFFF000, 9 * GIB, v1=True)
    assert kernel.available() == 200 * MIB


@pytest.mark.parametrize("path", ["/docker/on-the-host", "/../../sibling"])
def test_a_path_from_outside_the_container_means_its_root(path: str, kernel: Kernel) -> None:
    kernel.write(kernel.proc / "self/cgroup", f"4:memory:{path}\n")
    kernel.group("memory", 300 * MIB, 100 * MIB, v1=True)
    kernel.group("../sibling", MIB, 0, v1=True)
    assert kernel.available() == 200 * MIB


def test_a_group_over_its_limit_leaves_nothing(kernel: Kernel) -> None:
    kernel.write(kernel.proc / "self/cgroup", "0::/\n")
    kernel.group("", MIB, 2 * MIB)
    assert kernel.available() == 0


def test_a_limit_on_the_address_space_counts(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.write(kernel.proc / "self/status", "Name:\tx\nVmSize:\t  1048576 kB\nVmRSS: 7 kB\n")
    limits = {resource.RLIMIT_AS: (3 * GIB, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert kernel.available() == 2 * GIB - 128 * MIB, "libraries and stacks come later"


def test_a_machine_without_proc_counts_on_half(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes(tmp_path, tmp_path) == total // 2


def test_this_machine_has_some_memory() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 16 * MIB < available_bytes() <= total


# Pages


def test_pages_are_in_memory_when_they_were_written(tmp_path: Path) -> None:
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 8 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert resident_bytes(address, 8 * page) == 0
    area[2 * page] = area[3 * page] = area[7 * page] = 1
    assert resident_bytes(address, 8 * page) == 3 * page
    assert resident_bytes(address + 3 * page - 5, page) == page  # what belongs to it
    assert resident_bytes(address + 2 * page + 7, 30) == 30
    assert resident_bytes(address + 4 * page - 5, 20) == 5
    assert resident_bytes(address, page, tmp_path) == page  # where the system does not say


# Processors


@pytest.fixture
def cpus(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many CPUs are usable on a machine with 64."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    return lambda: usable_cpus(kernel.proc, kernel.cgroup)


def test_without_groups_the_affinity_counts(cpus: Callable[[], int]) -> None:
    assert cpus() == 64


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("400000 100000", 4),
        ("350000 100000", 4),  # rounded up
        ("20000 100000", 1),
        ("1 100000", 1),
        ("max 100000", 64),
        ("9900000 100000", 64),
        ("", 64),
    ],
)
def test_a_quota_of_version_2(
    limit: str, expected: int, kernel: Kernel, cpus: Callable[[], int]
) -> None:
    kernel.write(kernel.proc / "self/cgroup", "0::/kubepods/pod1\n")
    kernel.write(kernel.cgroup / "kubepods/pod1/cpu.max", f"{limit}\n")
    assert cpus() == expected


@pytest.mark.parametrize(("quota_us", "expected"), [(250_000, 5), (-1, 64)])
def test_a_quota_of_version_1(
    quota_us: int, expected: int, kernel: Kernel, cpus: Callable[[], int]
) -> None:
    kernel.write(kernel.proc / "self/cgroup", "9:memory:/m\n5:cpu,cpuacct:/docker/abc\n0::/\n")
    kernel.write(kernel.cgroup / "cpu/docker/abc/cpu.cfs_quota_us", f"{quota_us}\n")
    kernel.write(kernel.cgroup / "cpu/docker/abc/cpu.cfs_period_us", "50000\n")
    assert cpus() == expected


def test_the_tightest_quota_up_the_tree_counts(kernel: Kernel, cpus: Callable[[], int]) -> None:
    kernel.write(kernel.proc / "self/cgroup", "0::/a/b\n")
    kernel.write(kernel.cgroup / "a/b/cpu.max", "max 100000\n")
    kernel.write(kernel.cgroup / "a/cpu.max", "300000 100000\n")
    kernel.write(kernel.cgroup / "cpu.max", "800000 100000\n")
    assert cpus() == 3


def test_a_quota_above_the_affinity_changes_nothing(
    kernel: Kernel, cpus: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    kernel.write(kernel.proc / "self/cgroup", "0::/\n")
    kernel.write(kernel.cgroup / "cpu.max", "800000 100000\n")
    assert cpus() == 2


FREEING = """
import ctypes
from ridgeline.system.machine import freed_bytes
libc, num, size = ctypes.CDLL(None), 2000, 4096
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
parts = [libc.malloc(size) for _ in range(num)]
for part in parts:
    ctypes.memset(part, 1, size)
freed_bytes()
before = freed_bytes()
for part in parts[::2]:
    libc.free(part)
print(num // 2 * size, freed_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library")
def test_what_was_freed_between_what_is_in_use_is_seen() -> None:
    # In a process of its own: in one that ran other tests, these free something meanwhile.
    done = subprocess.run(
        [sys.executable, "-c", FREEING], capture_output=True, text=True, check=True
    )
    freed, grown = map(int, done.stdout.split())
    assert grown == pytest.approx(freed, rel=0.1)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library")
def test_an_array_where_an_arena_could_begin_is_not_taken_for_one() -> None:
    libc, arena, size = ctypes.CDLL(None), 64 * MIB, 8 * MIB
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    free = libc.mmap(None, 2 * arena, rights, flags, -1, 0)  # an address in it is a multiple
    libc.munmap(free, 2 * arena)
    at = -(-free // arena) * arena
    before = freed_bytes()
    assert libc.mmap(at, size, rights, flags, -1, 0) == at
    ctypes.memset(at, 1, size)
    after = freed_bytes()
    libc.munmap(at, size)
    assert after == pytest.approx(before, abs=MIB)


def test_a_system_that_says_nothing_has_freed_nothing(tmp_path: Path) -> None:
    assert freed_bytes(tmp_path) == 0


def test_a_file_for_others_has_the_mode_that_umask_leaves_and_a_replaced_one_its_own(
    tmp_path: Path,
) -> None:
    def written(name: str, **how: bool) -> int:
        write_whole(tmp_path / name, lambda file: file.write(b"x"), **how)
        return (tmp_path / name).stat().st_mode & 0o777

    before = os.umask(0o027)
    try:
        assert written("private") == 0o600
        assert written("shown", is_private=False) == 0o640
        (tmp_path / "shown").chmod(0o664)
        assert written("shown", is_private=False) == 0o664
        assert os.umask(0o027) == 0o027, "it is as it was"
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_that_nobody_knows_needs_nothing_but_ridgelines_directory(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from ridgeline.engine.setup.home import stores\n"
        "from ridgeline.model.hub.fetch.index import read_settings\n"
        "os.setuid(54321)\n"
        "print(stores().home)\n"
        "read_settings({})"
    )

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        rest = {name: value for name, value in os.environ.items() if name != "HOME"}
        rest.pop("RIDGELINE_HOME", None)
        return subprocess.run(
            [sys.executable, "-c", code],
            env=rest | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    named = run(RIDGELINE_HOME=str(tmp_path))
    assert (named.returncode, named.stdout) == (0, f"{tmp_path}\n"), named.stderr
    neither = run()
    last = neither.stderr.splitlines()[-1]
    assert last.startswith("ValueError: this user has no home directory: set RIDGELINE_HOME")
