"""Options, the model and the machine become plain values, without any "auto" left.

What is built later receives the values it uses, not this object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.backends import BACKENDS
from ridgeline.backends.face import Setup
from ridgeline.backends.states import STATE_BYTES
from ridgeline.core.kvcache import KVCache
from ridgeline.core.policies import Orca, Policy, SplitFuse, Static
from ridgeline.engine_setup.options import Options, parse_bytes
from ridgeline.engine_setup.speculative import SpeculativeConfig, parse_speculative
from ridgeline.machine import available_bytes, usable_cpus
from ridgeline.models.tensors import Checkpoint
from ridgeline.physics.arch import ModelArch
from ridgeline.physics.cache_groups import CacheGroup, cache_groups, one_group
from ridgeline.physics.kv_plan import fit_kv_cache

POLICIES: Mapping[str, type[Policy]] = {"static": Static, "orca": Orca, "splitfuse": SplitFuse}

_DEFAULT_MAX_NUM_SEQS = 256
_DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
_DEFAULT_KV_BYTES = 4 << 30
_LEAST_BLOCK_BYTES = 512  # of a block without keys and values: the engine's own book-keeping


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Plain values to build an engine from. ``notes`` are lines for the user.

    ``num_checkpoints`` is None for models without recurrent layers. ``groups`` are the layers that
    share a block table, with the window of each.
    """

    backend: str
    dtype: str
    kv_cache_dtype: str
    policy: Policy
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_checkpoints: int | None
    groups: tuple[CacheGroup, ...]
    weights_bytes: int
    kv_bytes: int
    total_bytes: int
    enable_prefix_caching: bool
    threads: int
    seed: int
    speculative: SpeculativeConfig | None
    enable_contrastive_search: bool
    max_lora_rank: int
    notes: tuple[str, ...]


def resolve(
    options: Options,
    checkpoint: Checkpoint,
    *,
    taken_bytes: int = 0,
    most_bytes: int | None = None,
    max_lora_rank: int = 0,
    keeps_all: bool = False,
) -> EngineConfig:
    """Choose everything that is still open, from the model and from the memory that is there.

    ``taken_bytes`` of it are for another model and for adapters, whose rank is at most
    ``max_lora_rank``; of the rest, this model takes ``most_bytes`` at most. A cache that
    ``keeps_all`` gives nothing back behind windows. Raises ValueError if an option contradicts
    another or the model, or if nothing fits.
    """
    arch = checkpoint.arch
    name = next(iter(BACKENDS)) if options.backend == "auto" else options.backend
    backend = BACKENDS[name]
    model_len = _model_len(options, arch)
    groups = one_group(arch) if keeps_all else cache_groups(arch)
    threads = options.threads or usable_cpus()
    policy, notes = _policy(options, arch)
    least = max(options.max_num_seqs or 0, model_len if policy.whole_prompts else 0)
    batched = options.max_num_batched_tokens or max(_DEFAULT_MAX_NUM_BATCHED_TOKENS, least)
    max_num_seqs = options.max_num_seqs or min(_DEFAULT_MAX_NUM_SEQS, batched)
    setup = backend.check(
        Setup(
            *(options.dtype, options.kv_cache_dtype, options.block_size, threads),
            *(model_len, max_num_seqs, batched),
            max_lora_rank=max_lora_rank,
            groups=groups,
        ),
        arch,
    )
    footprint = backend.footprint(arch, setup)
    weights_bytes = sum(backend.packed_bytes(checkpoint, setup).values())
    kv_bytes_per_block = max(options.block_size * footprint.kv_bytes_per_token, _LEAST_BLOCK_BYTES)
    left_bytes = _left_bytes(taken_bytes, most_bytes)
    fixed_bytes = weights_bytes + footprint.step_bytes
    room = left_bytes - left_bytes // 20 - fixed_bytes
    states = _fit_states(footprint.state_bytes_per_seq, room, options, max_num_seqs)
    max_num_seqs = states.num_seqs
    wanted_kv_bytes = (
        None if options.kv_cache_memory is None else parse_bytes(options.kv_cache_memory)
    )
    state_bytes_per_block = options.block_size * arch.hidden_size * STATE_BYTES
    cache = KVCache(0, options.block_size, windows=tuple(group.window for group in groups))
    one_sequence = cache.most_blocks(model_len, batched) * kv_bytes_per_block
    plan = fit_kv_cache(
        available_bytes=left_bytes,
        weights_bytes=weights_bytes,
        step_bytes=footprint.step_bytes + states.num_bytes,
        kv_bytes_per_block=kv_bytes_per_block,
        block_size=options.block_size,
        wanted_kv_bytes=wanted_kv_bytes,
        wanted_model_len=model_len,
        blocks_of=lambda num_tokens: cache.most_blocks(num_tokens, batched),
        max_num_seqs=min(max_num_seqs, max(1, _DEFAULT_KV_BYTES // one_sequence)),
        other_bytes_per_block=state_bytes_per_block if options.enable_contrastive_search else 0,
    )
    kv_bytes = plan.num_blocks * kv_bytes_per_block
    return EngineConfig(
        backend=name,
        dtype=setup.dtype,
        kv_cache_dtype=setup.kv_cache_dtype,
        policy=policy,
        max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=options.block_size,
        num_blocks=plan.num_blocks,
        num_checkpoints=states.num_checkpoints,
        groups=groups,
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        total_bytes=fixed_bytes + states.num_bytes + kv_bytes,
        enable_prefix_caching=options.enable_prefix_caching and not arch.reads_whole,
        threads=threads,
        seed=options.seed or 0,
        speculative=states.speculative,
        enable_contrastive_search=options.enable_contrastive_search,
        max_lora_rank=max_lora_rank,
        notes=(*notes, *states.notes, *plan.notes),
    )


def _left_bytes(taken_bytes: int, most_bytes: int | None) -> int:
    """Return what a model may take of the memory that is there."""
    left_bytes = available_bytes() - taken_bytes
    return left_bytes if most_bytes is None else min(left_bytes, most_bytes)


def _model_len(options: Options, arch: ModelArch) -> int:
    """Return how long sequences may become. Raises ValueError if more is asked than can be."""
    if options.max_model_len and options.max_model_len > arch.max_position:
        raise ValueError(
            f"--max-model-len {options.max_model_len} is more than the {arch.max_position} tokens "
            f"that this model was trained for"
        )
    return options.max_model_len or arch.max_position


def _policy(options: Options, arch: ModelArch) -> tuple[Policy, list[str]]:
    """Return the policy, and what is to be said of it."""
    policy = POLICIES[options.policy]()
    if arch.reads_whole and not policy.whole_prompts:
        return Orca(), ["policy orca: this model reads each text whole"]
    return policy, []


class _States(NamedTuple):
    """How many sequences may run and checkpoints are kept, the bytes of both, drafts, and notes."""

    num_seqs: int
    speculative: SpeculativeConfig | None
    num_checkpoints: int | None = None
    num_bytes: int = 0
    notes: tuple[str, ...] = ()


def _fit_states(size: int, room_bytes: int, options: Options, most: int) -> _States:
    """Return how many states of ``size`` bytes are kept, of at most ``most`` sequences.

    They take at most a quarter of the room that weights and steps leave, unless the sequences that
    the user wants need more. Of checkpoints there are at most four for each sequence. Drafts need
    the slot of one. Raises ValueError if they do not fit.
    """
    speculative = parse_speculative(options.speculative_config)
    wanted = options.max_num_seqs
    if not size:
        return _States(most, speculative)
    room = room_bytes // size
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
            f"no drafts: memory for one state more, of {size / 2**20:,.1f} MiB, is missing; lower "
            f"--max-num-seqs"
        )
    num_bytes = (num_seqs + num_checkpoints) * size
    return _States(num_seqs, speculative, num_checkpoints, num_bytes, tuple(notes))
