"""What fits into memory: weights, a step, states of recurrent layers, and the KV cache."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.backends.hidden_state_cache import STATE_BYTES
from ridgeline.backends.interface import Backend
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.engine.setup.config import EngineConfig
from ridgeline.engine.setup.options import Options, parse_bytes
from ridgeline.model.cost.kv_capacity import fit_kv_cache
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import limits_addresses
from ridgeline.system.report import gib

_DEFAULT_KV_BYTES = 4 << 30
_LEAST_BLOCK_BYTES = 512  # of a block without keys and values: the engine's own book-keeping
_SHORT_TOKENS = 512  # all weights are in memory if a sequence of these has room beside them


def fit(
    config: EngineConfig,
    options: Options,
    backend: Backend,
    checkpoint: Checkpoint,
    left_bytes: int,
    kept_bytes: int,
) -> EngineConfig:
    """Share out ``left_bytes``, of which ``kept_bytes`` stay untouched; return what fits.

    ``config`` has what is wanted, and ``options`` say which of it the user asked for. Raises
    ValueError if not even a short sequence fits.

    Weights that a backend maps from a file need not fit, and few rows of an embedding are ever
    read: the system drops what it has no room for, and reads it again. Where weights do not fit,
    they get three quarters of what a step leaves. Where addresses are limited, all weights count.
    """
    arch = checkpoint.arch
    footprint = backend.footprint(arch, config)
    packed = backend.packed_bytes(checkpoint, config)
    weights_bytes = sum(packed.values())
    drops_weights = footprint.maps_weights and not limits_addresses()
    held_bytes = weights_bytes - (packed["embedding"] if drops_weights else 0)
    block_size, max_num_batched_tokens = config.block_size, config.max_num_batched_tokens
    kv_bytes_per_block = max(block_size * footprint.kv_bytes_per_token, _LEAST_BLOCK_BYTES)
    cache = KVCache(0, block_size, windows=tuple(group.window for group in config.groups))

    def one_sequence(num_tokens: int) -> int:
        return (
            cache.most_blocks(min(num_tokens, config.max_model_len), max_num_batched_tokens)
            * kv_bytes_per_block
        )

    room = left_bytes - kept_bytes - footprint.step_bytes
    least = held_bytes + one_sequence(_SHORT_TOKENS) + footprint.state_bytes_per_seq
    if drops_weights and least > room > 0:
        note = _larger_than_memory(held_bytes, room * 3 // 4)
        config = replace(config, notes=(*config.notes, note))
        held_bytes = room * 3 // 4
    config = _fit_states(footprint.state_bytes_per_seq, room - held_bytes, options, config)
    step_bytes = footprint.step_bytes + config.num_states * footprint.state_bytes_per_seq
    wanted = options.kv_cache_memory
    state_bytes_per_block = block_size * arch.hidden_size * STATE_BYTES
    plan = fit_kv_cache(
        available_bytes=left_bytes,
        weights_bytes=held_bytes,
        step_bytes=step_bytes,
        kv_bytes_per_block=kv_bytes_per_block,
        block_size=block_size,
        wanted_kv_bytes=None if wanted is None else parse_bytes(wanted, "--kv-cache-memory"),
        max_model_len=config.max_model_len,
        blocks_of=lambda num_tokens: cache.most_blocks(num_tokens, max_num_batched_tokens),
        max_num_seqs=min(
            config.max_num_seqs, max(1, _DEFAULT_KV_BYTES // one_sequence(config.max_model_len))
        ),
        other_bytes_per_block=state_bytes_per_block if config.enable_contrastive_search else 0,
        takes_all=config.uses_all_memory,
        kept_bytes=kept_bytes,
    )
    kv_bytes = plan.num_blocks * kv_bytes_per_block
    return replace(
        config,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        total_bytes=held_bytes + step_bytes + kv_bytes,
        notes=(*config.notes, *plan.notes),
    )


def _larger_than_memory(read_bytes: int, held_bytes: int) -> str:
    """Return what to say where weights are read from the disk again and again."""
    return (
        f"of {gib(read_bytes)} of weights about {gib(held_bytes)} fit into memory: the others "
        f"are read from the disk whenever they are needed, which is slow; take a smaller "
        f"quantisation, or free some memory"
    )


def _fit_states(size: int, budget_bytes: int, options: Options, config: EngineConfig) -> EngineConfig:
    """Return how many states of ``size`` bytes are kept, of at most ``max_num_seqs`` sequences.

    They take at most a quarter of the room that weights and steps leave, unless the sequences that
    the user wants need more. Of checkpoints there are at most four for each sequence. Drafts need
    the slot of one. Raises ValueError if they do not fit.
    """
    if not size:
        return config
    speculative_config, most = config.speculative_config, config.max_num_seqs
    room = budget_bytes // size
    num_seqs = options.max_num_seqs or max(1, min(most, room // 8))
    if num_seqs > room:
        raise ValueError(
            f"states of {num_seqs} sequences take {num_seqs * size / 2**20:,.0f} MiB, but there is "
            f"room for {max(room, 0)} sequences: lower --max-num-seqs, or take a smaller model"
        )
    num_checkpoints = max(0, min(4 * num_seqs, room // 4 - num_seqs))
    if not options.enable_prefix_caching:
        num_checkpoints = min(num_checkpoints, num_seqs) if speculative_config else 0
    notes: list[str] = []
    if num_seqs < most:
        notes.append(
            f"at most {num_seqs} sequences run at once, not {most}: the state of one takes "
            f"{size / 2**20:,.1f} MiB; --max-num-seqs asks for more"
        )
    if speculative_config and not num_checkpoints:
        speculative_config = None
        notes.append(
            f"no speculative decoding: memory for one more state, of {size / 2**20:,.1f} MiB, "
            "is missing; lower --max-num-seqs"
        )
    return replace(
        config,
        max_num_seqs=num_seqs,
        num_checkpoints=num_checkpoints,
        num_states=num_seqs + num_checkpoints,
        speculative_config=speculative_config,
        notes=(*config.notes, *notes),
    )
