"""How much memory there really is, and how large a KV cache to make of it.

Reads the kernel's own files and this process's limits, nothing else; it knows no model (sizes come
in as bytes) and allocates nothing.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What the KV cache will be.

    Attributes:
        num_blocks: blocks in the pool.
        max_model_len: tokens that one sequence may have, prompt and answer together.
        notes: at most one line, for the user: what was chosen, what was given up, which flag
            changes it. Empty when every wish was met.
    """

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def fit_kv_cache(
    available_bytes: int,
    weights_bytes: int,
    step_bytes: int,
    kv_bytes_per_block: int,
    block_size: int,
    wanted_kv_bytes: int | None,
    wanted_model_len: int,
    max_num_seqs: int,
) -> KVPlan:
    """Size the KV cache from the memory that is there; shrink the wishes rather than refuse.

    A twentieth of what is available stays untouched. Without a wish the cache holds
    ``max_num_seqs`` sequences of full length but takes at most half of what the weights leave,
    unless one single sequence needs more.

    Args:
        available_bytes: memory that can be had, before the weights are loaded.
        weights_bytes: weights as the backend holds them.
        step_bytes: activations and other working memory of the largest step.
        kv_bytes_per_block: keys and values of one block, all layers.
        block_size: tokens per block.
        wanted_kv_bytes: the user's ``--kv-cache-memory``; None leaves the choice to us.
        wanted_model_len: longest sequence wished for, tokens.
        max_num_seqs: sequences that may run at once.

    Raises:
        ValueError: not even one sequence of two blocks fits.
    """
    blocks_per_seq = -(-wanted_model_len // block_size)
    min_blocks = min(2, blocks_per_seq)
    room_bytes = available_bytes - available_bytes // 20 - weights_bytes - step_bytes
    room_blocks = room_bytes // kv_bytes_per_block
    if room_blocks < min_blocks:
        raise ValueError(
            f"not enough memory: {_size(available_bytes)} is available, and the smallest start "
            f"needs {_size(weights_bytes)} for weights, {_size(step_bytes)} for a step, "
            f"{_size(min_blocks * kv_bytes_per_block)} for the KV cache of "
            f"{min_blocks * block_size} tokens and a margin of 5 %; free some memory, raise the "
            "limit of the container, lower --max-num-batched-tokens, or take a smaller model"
        )
    if wanted_kv_bytes is None:
        half = min(max_num_seqs * blocks_per_seq, room_blocks // 2)
        num_blocks = max(half, min(blocks_per_seq, room_blocks))
    else:
        num_blocks = min(wanted_kv_bytes // kv_bytes_per_block, room_blocks)
        if num_blocks < min_blocks:
            raise ValueError(
                f"--kv-cache-memory {_size(wanted_kv_bytes)} is too little: {min_blocks} blocks of "
                f"{block_size} tokens need {_size(min_blocks * kv_bytes_per_block)}"
            )
    max_model_len = min(wanted_model_len, num_blocks * block_size)

    given_up, flags = [], []
    if wanted_kv_bytes is not None and num_blocks < wanted_kv_bytes // kv_bytes_per_block:
        given_up.append(f"not {_size(wanted_kv_bytes)}")
        flags.append("--kv-cache-memory")
    if max_model_len < wanted_model_len:
        given_up.append(f"sequences of at most {max_model_len:,} tokens, not {wanted_model_len:,}")
        flags.append("--max-model-len")
    if not given_up:
        return KVPlan(num_blocks, max_model_len)
    if num_blocks == room_blocks:
        reason = f"of {_size(available_bytes)} available, weights and steps take the rest; change"
    else:
        reason = "more would not fit in --kv-cache-memory; raise it or change"
    note = (
        f"KV cache of {_size(num_blocks * kv_bytes_per_block)} ({num_blocks * block_size:,} "
        f"tokens), {', '.join(given_up)}: {reason} {' and '.join(flags)}"
    )
    return KVPlan(num_blocks, max_model_len, (note,))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process can still have, in bytes; at least 0.

    This is the least of what the machine has, what each control group around the process (a
    container, a service) has left, and what the limit on its address space leaves.

    Args:
        proc: where the kernel's process files are; they may be missing (macOS).
        cgroup: where control groups are mounted, version 1 or 2; may be missing too.
    """
    room = [_machine_bytes(proc), *_cgroup_bytes(proc, cgroup)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        room.append(limit - _address_space_bytes(proc))
    return max(0, min(room))


def _machine_bytes(proc: Path) -> int:
    available = _fields(proc / "meminfo").get("MemAvailable:")
    if available is not None:
        return available * _KIB
    # A system that does not say what is free: count on half of what it has.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_bytes(proc: Path, cgroup: Path) -> list[int]:
    """Return what is left in each group from the process's own up to the root."""
    room = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy, without a name
            top, limit_file, usage_file, prefix = cgroup, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, prefix = cgroup / "memory", "total_"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's and not exist here; its own group is then top.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = top.joinpath(*parts[:depth])
            limit = _text(group / limit_file).strip()
            usage = _text(group / usage_file).strip()
            if limit.isdigit() and usage.isdigit():  # "max" is no limit
                stat = _fields(group / "memory.stat")
                # Cached files count as used but are given up for whoever needs the memory. Our own
                # mapped model files are the greatest part of them.
                cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
                room.append(int(limit) - max(0, int(usage) - cached))
    return room


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


def _size(num_bytes: int) -> str:
    if num_bytes >= 1024 * _MIB:
        return f"{num_bytes / (1024 * _MIB):.1f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB"
