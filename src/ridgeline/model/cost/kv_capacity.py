"""How large a KV cache to make of the memory that is there.

It knows nothing of models (sizes come in as bytes), reads nothing and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.system.report import gib

KEPT_PART = 20  # of a machine's free memory one byte in twenty stays untouched


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What the KV cache will be.

    Attributes:
        num_blocks: blocks in the pool.
        max_model_len: tokens that one sequence may have, prompt and answer together.
        notes: at most one line, for the user: what was chosen, what was given up, which flag
            changes it. Empty if nothing had to be changed.
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
    max_model_len: int,
    blocks_of: Callable[[int], int],
    max_num_seqs: int,
    other_bytes_per_block: int = 0,
    kept_bytes: int = 0,
    takes_all: bool = False,
) -> KVPlan:
    """Size the KV cache from the memory that is there; make it smaller rather than refuse.

    Unless a size is given, the cache holds ``max_num_seqs`` sequences of full length but takes at
    most half of what the weights leave, unless one single sequence needs more.

    Args:
        available_bytes: memory that can be had, of which ``kept_bytes`` stay untouched.
        weights_bytes: weights as the backend holds them.
        step_bytes: activations and other working memory of the largest step.
        kv_bytes_per_block: keys and values of one block, all layers.
        block_size: tokens per block.
        wanted_kv_bytes: the user's ``--kv-cache-memory``; None leaves the choice to us.
        max_model_len: longest sequence that the user wants, tokens.
        blocks_of: from a sequence's tokens to the most blocks that it holds; windows make it fewer.
        max_num_seqs: sequences that may run at once.
        other_bytes_per_block: what is kept beside the keys and values of a block.
        takes_all: then the cache gets all that is left, of a device that nothing else needs.

    Raises:
        ValueError: not even one sequence of two blocks fits.
    """
    blocks_per_seq = blocks_of(max_model_len)
    min_blocks = min(blocks_of(2 * block_size), blocks_per_seq)
    least_tokens = min_blocks // blocks_of(1) * block_size
    budget_bytes = available_bytes - kept_bytes - weights_bytes - step_bytes
    room_blocks = budget_bytes // (kv_bytes_per_block + other_bytes_per_block)
    if room_blocks < min_blocks:
        raise ValueError(
            f"not enough memory: {gib(available_bytes)} is available, and the smallest start "
            f"needs {gib(weights_bytes)} for weights, {gib(step_bytes)} for a step, "
            f"{gib(min_blocks * kv_bytes_per_block)} for the KV cache of "
            f"{least_tokens} tokens{_margin(kept_bytes)}; free some memory, raise the "
            "limit of the container, lower --max-num-batched-tokens, or take a smaller model"
        )
    if wanted_kv_bytes is None:
        most = room_blocks if takes_all else min(max_num_seqs * blocks_per_seq, room_blocks // 2)
        num_blocks = max(most, min(blocks_per_seq, room_blocks))
    else:
        num_blocks = min(wanted_kv_bytes // kv_bytes_per_block, room_blocks)
        if num_blocks < min_blocks:
            raise ValueError(
                f"--kv-cache-memory {gib(wanted_kv_bytes)} is too little: {min_blocks} blocks of "
                f"{block_size} tokens need {gib(min_blocks * kv_bytes_per_block)}"
            )
    fitting_len = max_model_len
    if num_blocks < blocks_per_seq:
        fitting_len = min(fitting_len, _longest(blocks_of, num_blocks, block_size))
    given_up, flags = [], []
    if wanted_kv_bytes is not None and num_blocks < wanted_kv_bytes // kv_bytes_per_block:
        given_up.append(f"not {gib(wanted_kv_bytes)}")
        flags.append("--kv-cache-memory")
    if fitting_len < max_model_len:
        given_up.append(f"sequences of at most {fitting_len:,} tokens, not {max_model_len:,}")
        flags.append("--max-model-len")
    if not given_up:
        return KVPlan(num_blocks, fitting_len)
    if num_blocks == room_blocks:
        reason = f"of {gib(available_bytes)} available, weights and steps take the rest; change"
    else:
        reason = "more would not fit in --kv-cache-memory; raise it or change"
    note = (
        f"KV cache of {gib(num_blocks * kv_bytes_per_block)} "
        f"({num_blocks // blocks_of(1) * block_size:,} tokens), {', '.join(given_up)}: "
        f"{reason} {' and '.join(flags)}"
    )
    return KVPlan(num_blocks, fitting_len, (note,))


def _margin(kept_bytes: int) -> str:
    return f" and a margin of {100 / KEPT_PART:g} %" if kept_bytes else ""


def _longest(blocks_of: Callable[[int], int], num_blocks: int, block_size: int) -> int:
    """Return how many tokens one sequence may have in these blocks, in whole ones."""
    low, high = 0, num_blocks + 1  # in blocks: fits, and does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = blocks_of(middle * block_size) <= num_blocks
        low, high = (middle, high) if fits else (low, middle)
    return low * block_size
