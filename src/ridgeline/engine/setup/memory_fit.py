"""What fits into memory: weights, a step, states of recurrent layers, and the KV cache."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.backends.hidden_state_cache import STATE_BYTES
from ridgeline.backends.interface import Backend, Setup
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.engine.setup.options import (
    Options,
    SpeculativeConfig,
    parse_bytes,
    parse_speculative,
)
from ridgeline.model.cost.kv_capacity import fit_kv_cache
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import limits_addresses
from ridgeline.system.report import gib

_DEFAULT_KV_BYTES = 4 << 30
_LEAST_BLOCK_BYTES = 512  # of a block without keys and values: the engine's own book-keeping
_SHORT_TOKENS = 512  # all weights are in memory if a sequence of these has room beside them


class Fitted(NamedTuple):
    """How the memory is shared out.

    Attributes:
        max_model_len: tokens that one sequence may have.
        max_num_seqs: sequences that may run at once.
        num_blocks: blocks of the cache.
        num_checkpoints: of states; None for models without recurrent layers.
        speculative: drafts, None where there is no room for them.
        weights_bytes: of all weights.
        kv_bytes: of the cache.
        total_bytes: of all that is in memory.
        notes: lines for the user.
    """

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    num_checkpoints: int | None
    speculative: SpeculativeConfig | None
    weights_bytes: int
    kv_bytes: int
    total_bytes: int
    notes: tuple[str, ...]

    @property
    def num_states(self) -> int:
        """Slots for states of recurrent layers: of running sequences and of checkpoints."""
        return 0 if self.num_checkpoints is None else self.max_num_seqs + self.num_checkpoints


def fit(
    options: Options,
    backend: Backend,
    checkpoint: Checkpoint,
    setup: Setup,
    left_bytes: int,
    kept_bytes: int,
) -> Fitted:
    """Share out ``left_bytes``, of which ``kept_bytes`` stay untouched.

    Raises ValueError if not even a short sequence fits.

    Weights that a backend maps from a file need not fit, and few rows of an embedding are ever
    read: the system drops what it has no room for, and reads it again. Where weights do not fit,
    they get three quarters of what a step leaves. Where addresses are limited, all weights count.
    """
    arch = checkpoint.arch
    footprint = backend.footprint(arch, setup)
    packed = backend.packed_bytes(checkpoint, setup)
    weights_bytes = sum(packed.values())
    drops_weights = footprint.maps_weights and not limits_addresses()
    held_bytes = weights_bytes - (packed["embedding"] if drops_weights else 0)
    block_size, batched = setup.block_size, setup.max_num_batched_tokens
    kv_bytes_per_block = max(block_size * footprint.kv_bytes_per_token, _LEAST_BLOCK_BYTES)
    cache = KVCache(0, block_size, windows=tuple(group.window for group in setup.groups))

    def one_sequence(num_tokens: int) -> int:
        return cache.most_blocks(min(num_tokens, setup.max_model_len), batched) * kv_bytes_per_block

    room = left_bytes - kept_bytes - footprint.step_bytes
    least = held_bytes + one_sequence(_SHORT_TOKENS) + footprint.state_bytes_per_seq
    notes: tuple[str, ...] = ()
    if drops_weights and least > room > 0:
        notes = (_larger_than_memory(held_bytes, room * 3 // 4),)
        held_bytes = room * 3 // 4
    states = _fit_states(
        footprint.state_bytes_per_seq, room - held_bytes, options, setup.max_num_seqs
    )
    wanted = options.kv_cache_memory
    state_bytes_per_block = block_size * arch.hidden_size * STATE_BYTES
    plan = fit_kv_cache(
        available_bytes=left_bytes,
        weights_bytes=held_bytes,
        step_bytes=footprint.step_bytes + states.num_bytes,
        kv_bytes_per_block=kv_bytes_per_block,
        block_size=block_size,
        wanted_kv_bytes=None if wanted is None else parse_bytes(wanted, "--kv-cache-memory"),
        wanted_model_len=setup.max_model_len,
        blocks_of=lambda num_tokens: cache.most_blocks(num_tokens, batched),
        max_num_seqs=min(
            states.num_seqs, max(1, _DEFAULT_KV_BYTES // one_sequence(setup.max_model_len))
        ),
        other_bytes_per_block=state_bytes_per_block if options.enable_contrastive_search else 0,
        takes_all=setup.uses_all_memory,
        kept_bytes=kept_bytes,
    )
    kv_bytes = plan.num_blocks * kv_bytes_per_block
    return Fitted(
        max_model_len=plan.max_model_len,
        max_num_seqs=states.num_seqs,
        num_blocks=plan.num_blocks,
        num_checkpoints=states.num_checkpoints,
        speculative=states.speculative,
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        total_bytes=held_bytes + footprint.step_bytes + states.num_bytes + kv_bytes,
        notes=(*notes, *states.notes, *plan.notes),
    )


def _larger_than_memory(read_bytes: int, held_bytes: int) -> str:
    """Return what to say where weights are read from the disk again and again."""
    return (
        f"of {gib(read_bytes)} of weights about {gib(held_bytes)} fit into memory: the others "
        f"are read from the disk whenever they are needed, which is slow; take a smaller "
        f"quantisation, or free some memory"
    )


class _StateRoom(NamedTuple):
    """How many sequences may run and checkpoints are kept, the bytes of both, drafts, and notes."""

    num_seqs: int
    speculative: SpeculativeConfig | None
    num_checkpoints: int | None = None
    num_bytes: int = 0
    notes: tuple[str, ...] = ()


def _fit_states(size: int, budget_bytes: int, options: Options, most: int) -> _StateRoom:
    """Return how many states of ``size`` bytes are kept, of at most ``most`` sequences.

    They take at most a quarter of the room that weights and steps leave, unless the sequences that
    the user wants need more. Of checkpoints there are at most four for each sequence. Drafts need
    the slot of one. Raises ValueError if they do not fit.
    """
    speculative = parse_speculative(options.speculative_config)
    wanted = options.max_num_seqs
    if not size:
        return _StateRoom(most, speculative)
    room = budget_bytes // size
    num_seqs = wanted or max(1, min(most, room // 8))
    if num_seqs > room:
        raise ValueError(
            f"states of {num_seqs} sequences take {num_seqs * size / 2**20:,.0f} MiB, but there is "
            f"room for {max(room, 0)} sequences: lower --max-num-seqs, or take a smaller model"
        )
    num_checkpoints = max(0, min(4 * num_seqs, room // 4 - num_seqs))
    if not options.enable_prefix_caching:
        num_checkpoints = min(num_checkpoints, num_seqs) if speculative else 0
    notes: list[str] = []
    if num_seqs < most:
        notes.append(
            f"at most {num_seqs} sequences run at once, not {most}: the state of one takes "
            f"{size / 2**20:,.1f} MiB; --max-num-seqs asks for more"
        )
    if speculative and not num_checkpoints:
        speculative = None
        notes.append(
            f"no speculative decoding: memory for one more state, of {size / 2**20:,.1f} MiB, "
            "is missing; lower --max-num-seqs"
        )
    num_bytes = (num_seqs + num_checkpoints) * size
    return _StateRoom(num_seqs, speculative, num_checkpoints, num_bytes, tuple(notes))
