"""Options, the model and the machine become plain values, without any "auto" left.

What is built later receives the values it uses, not this object.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from ridgeline.backends import AUTO, BACKENDS, cuda
from ridgeline.backends.interface import Setup
from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import POLICIES, Orca, Policy, SplitFuse, Static
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.memory_fit import fit
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.speculative import SpeculativeConfig
from ridgeline.model.cost.kv_capacity import KEPT_PART
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import cache_groups, one_group
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import available_bytes, usable_cpus

_USUAL_SEQS, _USUAL_STEP = 256, 2048  # sequences that run at once, tokens in a step
# Where several keys share a processor, a step should not keep another key waiting for long: 256
# tokens of a small model's prompts take 0.1 s on two cores. 64 answers are as fast as 256.
_SHARED_SEQS, _SHARED_STEP = 64, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Setup):
    """Plain values to build an engine from. ``notes`` are lines for the user.

    ``num_checkpoints`` is None for models without recurrent layers. ``looks_ahead`` is what the
    backend says.
    """

    backend: str
    policy: Policy
    num_checkpoints: int | None
    looks_ahead: bool
    weights_bytes: int
    kv_bytes: int
    total_bytes: int
    enable_prefix_caching: bool
    seed: int
    speculative: SpeculativeConfig | None
    enable_contrastive_search: bool
    notes: tuple[str, ...]

    def settings(self, eos_ids: tuple[int, ...]) -> EngineRecord:
        """Return the settings of the engine that this makes."""
        return EngineRecord(
            policy=self.policy.name,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            seed=self.seed,
            eos_ids=eos_ids,
            num_checkpoints=self.num_checkpoints,
            windows=tuple(group.window for group in self.groups),
            looks_ahead=self.looks_ahead,
            least_prompt_tokens=self.policy.min_chunk,
            reserve_full=self.policy.reserve_full,
        )


class MemoryShare(TypedDict, total=False):
    """What a model's memory is shared with.

    Attributes:
        taken_bytes: of the memory that is there, for another model.
        most_bytes: that this model takes of the rest.
        max_lora_rank: of adapters.
        lora_bytes: for adapters.
        keeps_all: the cache gives nothing back behind windows.
    """

    taken_bytes: int
    most_bytes: int | None
    max_lora_rank: int
    lora_bytes: int
    keeps_all: bool


def resolve(options: Options, checkpoint: Checkpoint, **room: Unpack[MemoryShare]) -> EngineConfig:
    """Choose everything that is still open, from the model and from the memory that is there.

    "auto" takes a GPU that has passed its checks, if the model can run on it, and notes why.
    Raises ValueError if an option contradicts another or the model, or if nothing fits.
    """
    if options.backend != "auto":
        return _resolve(options, checkpoint, **room)
    found = cuda.approval.read(default_home())
    on_cpu = replace(options, backend=AUTO)
    if found is None:
        return _resolve(on_cpu, checkpoint, **room)
    why = f"backend {AUTO}: {found.why}; --backend cuda takes the GPU anyway"
    if found.is_open:
        try:
            config = _resolve(replace(options, backend="cuda"), checkpoint, **room)
            return _noted(config, f"backend cuda: {found.why}")
        except ValueError as error:
            why = f"backend {AUTO}: {error}"
    return _noted(_resolve(on_cpu, checkpoint, **room), why)


def _noted(config: EngineConfig, note: str) -> EngineConfig:
    return replace(config, notes=(note, *config.notes))


def _resolve(
    options: Options,
    checkpoint: Checkpoint,
    *,
    taken_bytes: int = 0,
    most_bytes: int | None = None,
    max_lora_rank: int = 0,
    lora_bytes: int = 0,
    keeps_all: bool = False,
) -> EngineConfig:
    name, arch = options.backend, checkpoint.arch
    backend = BACKENDS[name]
    _check_processes(options, name)
    model_len = _model_len(options, arch)
    groups = one_group(arch) if keeps_all else cache_groups(arch)
    threads = options.threads or usable_cpus()
    policy, notes = _policy(options, arch)
    shares_processor = options.is_shared and name != "cuda"
    usual_seqs, usual_step = (
        (_SHARED_SEQS, _SHARED_STEP) if shares_processor else (_USUAL_SEQS, _USUAL_STEP)
    )
    needed = max(options.max_num_seqs or 0, model_len if policy.whole_prompts else 0)
    batched = options.max_num_batched_tokens or max(usual_step, needed)
    max_num_seqs = options.max_num_seqs or min(usual_seqs, batched)
    setup = backend.check(
        Setup(
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            threads=threads,
            max_model_len=model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched,
            max_lora_rank=max_lora_rank,
            lora_bytes=lora_bytes,
            groups=groups,
            tensor_parallel_size=options.tensor_parallel_size,
            stages=options.stages,
            stage_port=options.stage_port,
            stage_key_file=options.stage_key_file,
        ),
        arch,
    )
    room_bytes = backend.room_bytes(checkpoint, setup)
    setup = replace(setup, fills_device=room_bytes is not None and not options.kv_cache_memory)
    left_bytes, kept_bytes = _left_bytes(room_bytes, taken_bytes + lora_bytes, most_bytes)
    fitted = fit(options, backend, checkpoint, setup, left_bytes, kept_bytes)
    return EngineConfig(
        backend=name,
        dtype=setup.dtype,
        kv_cache_dtype=setup.kv_cache_dtype,
        policy=replace(policy, min_chunk=backend.least_prompt_tokens(arch, setup)),
        max_model_len=fitted.max_model_len,
        max_num_seqs=fitted.max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=options.block_size,
        num_blocks=fitted.num_blocks,
        num_checkpoints=fitted.num_checkpoints,
        looks_ahead=backend.looks_ahead(arch, setup),
        num_states=fitted.num_states,
        groups=groups,
        tensor_parallel_size=setup.tensor_parallel_size,
        stages=setup.stages,
        stage_port=setup.stage_port,
        stage_key_file=setup.stage_key_file,
        fills_device=setup.fills_device,
        weights_bytes=fitted.weights_bytes,
        kv_bytes=fitted.kv_bytes,
        total_bytes=fitted.total_bytes,
        enable_prefix_caching=options.enable_prefix_caching and not arch.reads_whole,
        threads=threads,
        seed=options.seed or 0,
        speculative=fitted.speculative,
        enable_contrastive_search=options.enable_contrastive_search,
        max_lora_rank=max_lora_rank,
        lora_bytes=lora_bytes,
        notes=(*notes, *fitted.notes),
    )


def _check_processes(options: Options, name: str) -> None:
    """Raise ValueError if the backend of this name cannot be divided as the options say."""
    if options.tensor_parallel_size > 1 and name != "cuda":
        raise ValueError(
            f"tensor_parallel_size is {options.tensor_parallel_size}: the {name} backend runs in "
            f"one process, on all its cores (--threads); --backend cuda divides a model among GPUs"
        )
    if options.stages > 1 and name != "cpu":
        raise ValueError(
            f"--stages {options.stages} needs --backend cpu: the {name} backend has no stages"
        )
    if options.stages > 1 and options.kv_disk:
        raise ValueError("--kv-disk cannot be used with --stages yet: leave out one of them")


def _left_bytes(
    room_bytes: int | None, taken_bytes: int, most_bytes: int | None
) -> tuple[int, int]:
    """Return the memory that a model may take, a device's or the machine's, and what it leaves.

    A backend has subtracted what stays free of a device.
    """
    left_bytes = (available_bytes() if room_bytes is None else room_bytes) - taken_bytes
    left_bytes = left_bytes if most_bytes is None else min(left_bytes, most_bytes)
    return left_bytes, left_bytes // KEPT_PART if room_bytes is None else 0


def _model_len(options: Options, arch: ModelArch) -> int:
    """Return how long sequences may become. Raises ValueError if more is asked than can be."""
    if options.max_model_len and options.max_model_len > arch.max_position:
        raise ValueError(
            f"--max-model-len {options.max_model_len} is more than the {arch.max_position} tokens "
            f"that this model was trained for"
        )
    return options.max_model_len or arch.max_position


def _policy(options: Options, arch: ModelArch) -> tuple[Static | Orca | SplitFuse, list[str]]:
    """Return the policy, and what is to be said of it."""
    policy, notes = POLICIES[options.policy], list[str]()
    if arch.reads_whole and not policy.whole_prompts:
        policy, notes = Orca(), ["policy orca: this model reads each text whole"]
    if options.kv_reservation != "auto":
        policy = replace(policy, reserve_full=options.kv_reservation == "full")
    return policy, notes
