"""What this machine gives to this process: memory, processors and files, also inside a container.

Reads the kernel's own files and this process's limits, gives back memory that was freed, and reads
and writes whole files. What a system other than Linux lacks of these is missing here alone.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import platform
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from ridgeline.system.report import gb

try:
    import fcntl
except ImportError:  # of no use, and not there, on Windows
    fcntl = None  # type: ignore[assignment]

try:
    import resource
except ImportError:  # Windows sets no limits
    resource = None  # type: ignore[assignment]

_KIB = 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096  # Windows: no sysconf
_ENTRY_BYTES = 8  # of a page in the kernel's page map; its highest bit says that it is in memory
_PAGES_AT_ONCE = 1 << 15  # so that looking takes no memory to speak of
_IS_PRESENT = bytes(byte >> 7 for byte in range(256))
_LATER_BYTES = 128 << 20  # of addresses, for libraries and threads' stacks that come later
_ARENA_BYTES = 64 << 20  # of glibc, for what a thread allocates
# Of x86-64 Linux: the system call, what it is asked for, and the state that tiles are.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_TILES_REFUSED = {
    errno.EINVAL: "Linux does not know them before 5.16",
    errno.EOPNOTSUPP: "the processor has none, or its hypervisor hides them",
    errno.ENOSPC: "a thread of this process has a signal stack that is too small for them",
    errno.EPERM: "a sandbox around this process forbids arch_prctl",
}


class DeviceLost(OSError):
    """A device that computes has failed for good: this process can use it no more."""


class DiskFull(ValueError):
    """A disk has too little room for what is about to be written."""


class Memory(NamedTuple):
    """What a process uses: all that is in memory, and of it what no file on disk backs."""

    resident_bytes: int
    private_bytes: int

    @property
    def file_bytes(self) -> int:
        """What pages of files it has in memory: code, and what it mapped."""
        return self.resident_bytes - self.private_bytes


class _Allocated(ctypes.Structure):
    """What glibc's ``mallinfo2`` says of all arenas together, in bytes or counts."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process can still have, in bytes; at least 0.

    This is the least of what the machine has, what each control group around the process (a
    container, a service) has left, and what the limit on its address space leaves. Raises OSError
    if the system does not say.

    Args:
        proc: where the kernel's process files are; they may be missing (macOS).
        cgroup: where control groups are mounted, version 1 or 2; may be missing too.
    """
    room = [_machine_bytes(proc), *_group_bytes(proc, cgroup)]
    if resource:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limits_addresses():
            room.append(limit - _address_space_bytes(proc) - _LATER_BYTES)
    return max(0, min(room))


def limits_addresses() -> bool:
    """Whether this process's address space is limited (``ulimit -v``): then mapped files count."""
    return bool(resource) and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def total_bytes() -> int:
    """Return the memory that the machine has, in bytes. Raises OSError if it does not say."""
    if not hasattr(os, "sysconf"):
        raise OSError("this system does not say how much memory it has: models run on Linux only")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cpus(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many CPUs this process can keep busy; at least 1.

    This is the least of what it may be scheduled on (``taskset``, cpusets) and of the CPU quota of
    each control group around it (a container, a service), rounded up.

    Args:
        proc: where the kernel's process files are.
        cgroup: where control groups are mounted, version 1 or 2; may be missing.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([allowed, *_group_cpus(proc, cgroup)]))


def max_open_files() -> int | None:
    """Return how many files this process may have open; None if there is no such limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else None


def raise_file_limit() -> None:
    """Allow as many open files as the system does; the default of 1,024 is soon reached."""
    if resource:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_fact(*names: str, proc: Path = Path("/proc")) -> str:
    """Return what the kernel says of the processor under the first of ``names``; "" if nothing."""
    lines = _text(proc / "cpuinfo").splitlines()
    fact = next((line for line in lines if line.startswith(names)), "")
    return fact.partition(":")[2].strip()


def processor_name() -> str:
    """Return what the processor is called; its kind where the system says no more."""
    return cpu_fact("model name", "Model") or platform.processor() or platform.machine()


@cache
def tiles_refusal() -> str:
    """Ask the system, once, to let this process use matrix tiles (AMX); return why it does not.

    It is "" where it does. Without a grant the first such instruction ends the process (SIGILL). A
    grant holds for all threads and is kept over fork, not over exec.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only processors with AMX have them, and Linux grants their use"
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    words = (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if system_call(*map(ctypes.c_long, words)) == 0:
        return ""
    error = ctypes.get_errno()
    return _TILES_REFUSED.get(error, f"Linux refused: {os.strerror(error)}")


def memory_of(process_id: int, proc: Path = Path("/proc")) -> Memory:
    """Return what a process of this machine uses; zeros if that cannot be seen."""
    fields = _fields(proc / str(process_id) / "status")
    private = fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0)
    return Memory(fields.get("VmRSS:", 0) * _KIB, private * _KIB)


def resident_bytes(address: int, num_bytes: int, proc: Path = Path("/proc")) -> int:
    """Return how much of a part of this process's memory is in memory, by whole pages.

    A page that no one has written or read yet takes none, nor does one that was swapped out. Of
    pages at the ends only what belongs to the part counts. Where the system does not say (macOS),
    it is all of it.
    """
    first, end = address // _PAGE_BYTES, -(-(address + num_bytes) // _PAGE_BYTES)
    present = bytearray()
    try:
        with (proc / "self" / "pagemap").open("rb", buffering=0) as file:
            file.seek(first * _ENTRY_BYTES)
            while (left := end - first - len(present)) and (
                entries := file.read(min(left, _PAGES_AT_ONCE) * _ENTRY_BYTES)
            ):
                present += entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_IS_PRESENT)
    except OSError:
        return num_bytes
    if len(present) < end - first:
        return num_bytes
    num_resident = present.count(1) * _PAGE_BYTES
    num_resident -= present[0] * (address - first * _PAGE_BYTES)
    return num_resident - present[-1] * (end * _PAGE_BYTES - address - num_bytes)


def memory_in_use() -> int:
    """Return the bytes this process has in memory that no file backs and that were not freed."""
    return max(0, memory_of(os.getpid()).private_bytes - freed_bytes())


def freed_bytes(proc: Path = Path("/proc")) -> int:
    """Return how much of this process's memory was freed and not given back to the system.

    C libraries keep what is freed between things that are still in use, for the next allocation.
    It is what the arenas of glibc have in memory less what is in use in them; 0 with another C
    library, and where the system does not say.
    """
    heap = _heap()
    if heap is None:
        return 0
    held = sum(resident_bytes(start, end - start, proc) for start, end in _arenas(proc))
    return max(0, held - int(heap.uordblks))


def allocated_bytes() -> int:
    """Return the bytes in use on the heap; 0 where the C library does not say."""
    heap = _heap()
    return 0 if heap is None else int(heap.uordblks + heap.hblkhd)


def _heap() -> _Allocated | None:
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None
    count.restype = _Allocated
    heap: _Allocated = count()
    return heap


def give_back() -> None:
    """Give memory that was freed back to the system; glibc alone would keep tens of MB of it."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def drop_pages(address: int, num_bytes: int) -> None:
    """Give the whole pages of a part of this process's memory back to the system, unlocked.

    Those of a file are read again when they are needed, and all others are zeros then, or as they
    were on systems that only take note (macOS). Nothing happens where there is no such call.
    """
    first, end = -(-address // _PAGE_BYTES), (address + num_bytes) // _PAGE_BYTES
    if end > first and hasattr(mmap, "MADV_DONTNEED"):
        pages = ctypes.c_void_p(first * _PAGE_BYTES), ctypes.c_size_t((end - first) * _PAGE_BYTES)
        ctypes.CDLL(None).madvise(*pages, mmap.MADV_DONTNEED)


def _arenas(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield where glibc's arenas begin and end: the heap, and those of threads.

    One of a thread begins at a multiple of its greatest size, and the rest of that is reserved.
    """
    start = end = 0
    for line in _text(proc / "self" / "maps").splitlines():
        if "/" in line:  # of a file, as most are
            continue
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        previous, (start, end) = (start, end), [int(address, 16) for address in span.split("-")]
        if path == ["[heap]"]:
            yield start, end
        is_reserve = rights.startswith("---") and start == previous[1]
        if is_reserve and previous[0] % _ARENA_BYTES == 0 and end - previous[0] >= _ARENA_BYTES:
            yield previous


def _machine_bytes(proc: Path) -> int:
    available = _fields(proc / "meminfo").get("MemAvailable:")
    if available is not None:
        return available * _KIB
    # A system that does not say what is free: count on half of what it has.
    return total_bytes() // 2


def _group_bytes(proc: Path, cgroup: Path) -> Iterator[int]:
    """Yield the memory that is left in each group around the process, in bytes."""
    for group, version in _groups("memory", proc, cgroup):
        if version == 2:
            limit_file, usage_file, prefix = "memory.max", "memory.current", ""
        else:
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        limit = _text(group / limit_file).strip()
        usage = _text(group / usage_file).strip()
        if limit.isdigit() and usage.isdigit():  # "max" means no limit
            stat = _fields(group / "memory.stat")
            # Cached files count as used but are given up when memory is needed. Our own mapped
            # model files are the largest part of them.
            cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            yield int(limit) - max(0, int(usage) - cached)


def _group_cpus(proc: Path, cgroup: Path) -> Iterator[int]:
    """Yield the CPUs that each group around the process may keep busy, rounded up."""
    for group, version in _groups("cpu", proc, cgroup):
        if version == 2:
            words = _text(group / "cpu.max").split()
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_text(group / name).strip() for name in files]
        if len(words) == 2 and all(word.isdigit() for word in words):  # no limit: "max", or -1
            quota_us, period_us = map(int, words)
            if period_us:
                yield -(-quota_us // period_us)


def _groups(controller: str, proc: Path, cgroup: Path) -> Iterator[tuple[Path, int]]:
    """Yield the control groups around the process, the root first, with their version, 1 or 2."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy, without a name
            top, version = cgroup, 2
        elif controller in controllers.split(","):
            top, version = cgroup / controller, 1
        else:
            continue
        # In a container the path may be the host's and not exist here; its own group is then top.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield top.joinpath(*parts[:depth]), version


def _address_space_bytes(proc: Path) -> int:
    return _fields(proc / "self" / "status").get("VmSize:", 0) * _KIB


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number; other lines and a missing file are passed over."""
    words = [line.split() for line in _text(path).splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) >= 2 and w[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def lower_priority() -> None:
    """Let the thread that calls this give way to all others, where the system can do that."""
    with suppress(OSError, AttributeError):  # of this thread alone, on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def users_home() -> Path | None:
    """Return the user's directory; None of a user without an entry in the system, nor HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def free_bytes(folder: Path) -> int:
    """Return what this user may still write to the disk of ``folder``, which need not exist yet."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free


def check_room(folder: Path, num_bytes: int, what: str, instead: str) -> None:
    """Raise DiskFull unless the disk of ``folder`` has room for ``what``; it says what to do."""
    free = free_bytes(folder)
    if free < num_bytes:
        raise DiskFull(
            f"{what} needs {gb(num_bytes)}, but {gb(free)} are free in "
            f"{folder}: make room, or {instead}"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file that the user has named; a full disk leaves the one that was there.

    Raises DiskFull where the disk has too little room, and OSError, which names the file.
    """
    content = text.encode()
    try:
        if not path.exists() or path.is_file():
            before = path.stat().st_size if path.exists() else 0
            room = len(content) - before, path.name, "name another folder"
            check_room(path.absolute().parent, *room)
        path.write_bytes(content)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of an open file has none
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_sources(folder: Path, rooms: Sequence[str]) -> str:
    """Return the SHA-256 of all Python files in some folders of ``folder`` and of their names."""
    digest = hashlib.sha256()
    for room in rooms:
        for source in sorted((folder / room).rglob("*.py")):
            digest.update(source.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(source.read_bytes())
    return digest.hexdigest()


def write_whole(
    path: Path,
    content: Callable[[IO[bytes]], object],
    name: Callable[[], str] | None = None,
    *,
    is_private: bool = True,
    least_bytes: int = 0,
    instead: str = "name another folder",
) -> None:
    """Let a complete file appear at ``path``, on the disk.

    Raises OSError, which names a file, if none can be written. Before it begins it raises DiskFull,
    as ``check_room`` does, if there is no room for ``least_bytes``.

    ``name`` is asked for another name in the same folder, when the content is written. One that is
    not private has the mode of the file that it replaces, or as any program's.

    A file system may keep a name longer than what the file holds when power is lost; so the
    content is synced before the name is given, and the name after. While it is written it is
    locked: one without a lock was left by a process that was killed, and a later start
    sweeps it away (``engine.setup.home``).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path.parent, least_bytes, path.name, instead)
    handle, partial = tempfile.mkstemp(dir=path.parent)
    with suppress(OSError, AttributeError):  # not every system has locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        with os.fdopen(handle, "wb") as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
        if not is_private:
            os.chmod(partial, _usual_mode(path))
        rename(Path(partial), path.with_name(name()) if name else path)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of an open file has none
        raise
    finally:
        Path(partial).unlink(missing_ok=True)


def _usual_mode(path: Path) -> int:
    """Return the mode of a file, or of a new one at ``path``."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0o077)  # it can only be read by setting it: for that moment to the strictest
    os.umask(mask)
    return 0o666 & ~mask


def make_once(file: Path, content: Callable[[], bytes]) -> None:
    """Write a file that only its user may read, unless it is there. Raises OSError.

    Of several processes that do so at the same time one writes it; it is whole at any moment.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(content())
            os.fsync(out.fileno())
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def folder_name(text: str) -> str:
    """Return a name for the folder of what has this name: each text has its own."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return "-".join((re.sub(r"[^\w.-]", "_", text)[:64], digest))


def rename(partial: Path, target: Path) -> None:
    """Rename at once and for good, even if the power fails after it. Raises OSError."""
    os.replace(partial, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Let new names in a folder outlast a power failure; not every system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
