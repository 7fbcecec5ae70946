"""Options, the model and the machine become plain values, without any "auto" left.

What is built later receives the values it uses, not this object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from ridgeline.backends import AUTO, BACKENDS, cuda
from ridgeline.backends.hidden_state_cache import STATE_BYTES
from ridgeline.backends.interface import Backend, Setup
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import POLICIES, Orca, Policy, SplitFuse, Static
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.options import (
    Options,
    SpeculativeConfig,
    parse_bytes,
    parse_speculative,
)
from ridgeline.model.cost.kv_capacity import KEPT_PART, fit_kv_cache
from ridgeline.model.files.gguf.pre_tokenizers import names_no_pre_tokenizer
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import cache_groups, one_group
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import available_bytes, limits_addresses, usable_cpus
from ridgeline.system.report import gb, gib

_USUAL_SEQS, _USUAL_STEP = 256, 2048  # sequences that run at once, tokens in a step
# Where several keys share a processor, a step should not keep another key waiting for long: 256
# tokens of a small model's prompts take 0.1 s on two cores. 64 answers are as fast as 256.
_SHARED_SEQS, _SHARED_STEP = 64, 256
_DEFAULT_KV_BYTES = 4 << 30
_LEAST_BLOCK_BYTES = 512  # of a block without keys and values: the engine's own book-keeping
_SHORT_TOKENS = 512  # all weights are in memory if a sequence of these has room beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Setup):
    """Plain values to build an engine from, beside those that its backend knows.

    Attributes:
        backend: its name.
        policy: what fills steps.
        enable_prefix_caching: whether equal prefixes are computed once.
        seed: of requests without one.
        enable_contrastive_search: whether final hidden states are kept beside the cache.
        speculative_config: drafts; None where there are none, or no room for them.
        looks_ahead: whether the backend starts the next step before it is asked for.
        num_checkpoints: of states; None for models without recurrent layers.
        weights_bytes: of all weights.
        kv_bytes: of the cache.
        total_bytes: of all that is in memory.
        notes: lines for the user.
    """

    backend: str
    policy: Policy
    enable_prefix_caching: bool
    seed: int
    enable_contrastive_search: bool
    speculative_config: SpeculativeConfig | None
    looks_ahead: bool = False
    num_checkpoints: int | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0
    total_bytes: int = 0
    notes: tuple[str, ...] = ()

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
        reserved_bytes: of the memory that is there, for another model.
        limit_bytes: that this model takes of the rest.
        max_lora_rank: of adapters.
        lora_bytes: for adapters.
        keeps_all: the cache gives nothing back behind windows.
    """

    reserved_bytes: int
    limit_bytes: int | None
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
    approval = cuda.approval.read(default_home())
    on_cpu = replace(options, backend=AUTO)
    if approval is None:
        return _resolve(on_cpu, checkpoint, **room)
    why = f"backend {AUTO}: {approval.why}; --backend cuda takes the GPU anyway"
    if approval.is_open:
        try:
            config = _resolve(replace(options, backend="cuda"), checkpoint, **room)
            return _noted(config, f"backend cuda: {approval.why}")
        except ValueError as error:
            why = f"backend {AUTO}: {error}"
    return _noted(_resolve(on_cpu, checkpoint, **room), why)


def _noted(config: EngineConfig, note: str) -> EngineConfig:
    return replace(config, notes=(note, *config.notes))


def _resolve(
    options: Options,
    checkpoint: Checkpoint,
    *,
    reserved_bytes: int = 0,
    limit_bytes: int | None = None,
    max_lora_rank: int = 0,
    lora_bytes: int = 0,
    keeps_all: bool = False,
) -> EngineConfig:
    name, arch = options.backend, checkpoint.arch
    backend = BACKENDS[name]
    _check_processes(options, name)
    max_model_len = _max_model_len(options, arch)
    policy, notes = _policy(options, arch)
    shares_processor = options.is_shared and name != "cuda"
    usual_seqs, usual_step = (
        (_SHARED_SEQS, _SHARED_STEP) if shares_processor else (_USUAL_SEQS, _USUAL_STEP)
    )
    needed = max(options.max_num_seqs or 0, max_model_len if policy.whole_prompts else 0)
    max_num_batched_tokens = options.max_num_batched_tokens or max(usual_step, needed)
    wanted = EngineConfig(
        backend=name,
        policy=policy,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        threads=options.threads or usable_cpus(),
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs or min(usual_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_lora_rank=max_lora_rank,
        lora_bytes=lora_bytes,
        groups=one_group(arch) if keeps_all else cache_groups(arch),
        tensor_parallel_size=options.tensor_parallel_size,
        stages=options.stages,
        stage_port=options.stage_port,
        stage_key_file=options.stage_key_file,
        enable_prefix_caching=options.enable_prefix_caching and not arch.reads_whole,
        seed=options.seed or 0,
        enable_contrastive_search=options.enable_contrastive_search,
        speculative_config=parse_speculative(options.speculative_config),
        notes=tuple(notes),
    )
    config = backend.check(wanted, arch)
    budget_bytes = backend.budget_bytes(checkpoint, config)
    config = replace(
        config, uses_all_memory=budget_bytes is not None and not options.kv_cache_memory
    )
    left_bytes, kept_bytes = _left_bytes(budget_bytes, reserved_bytes + lora_bytes, limit_bytes)
    config = _fit(config, options, backend, checkpoint, left_bytes, kept_bytes)
    return replace(
        config,
        policy=replace(policy, min_chunk=backend.least_prompt_tokens(arch, config)),
        looks_ahead=backend.looks_ahead(arch, config),
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
    budget_bytes: int | None, reserved_bytes: int, limit_bytes: int | None
) -> tuple[int, int]:
    """Return the memory that a model may take, a device's or the machine's, and what it leaves.

    A backend has subtracted what stays free of a device.
    """
    left_bytes = (available_bytes() if budget_bytes is None else budget_bytes) - reserved_bytes
    left_bytes = left_bytes if limit_bytes is None else min(left_bytes, limit_bytes)
    return left_bytes, left_bytes // KEPT_PART if budget_bytes is None else 0


def _max_model_len(options: Options, arch: ModelArch) -> int:
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


# --- what fits: weights, a step, states of recurrent layers, and the cache ----------------------


def _fit(
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


def _fit_states(
    size: int, budget_bytes: int, options: Options, config: EngineConfig
) -> EngineConfig:
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
            f"states of {num_seqs} sequences take {gib(num_seqs * size)}, but there is "
            f"room for {max(room, 0)} sequences: lower --max-num-seqs, or take a smaller model"
        )
    num_checkpoints = max(0, min(4 * num_seqs, room // 4 - num_seqs))
    if not options.enable_prefix_caching:
        num_checkpoints = min(num_checkpoints, num_seqs) if speculative_config else 0
    notes: list[str] = []
    if num_seqs < most:
        notes.append(
            f"at most {num_seqs} sequences run at once, not {most}: the state of one takes "
            f"{gib(size)}; --max-num-seqs asks for more"
        )
    if speculative_config and not num_checkpoints:
        speculative_config = None
        notes.append(
            f"no speculative decoding: memory for one more state, of {gib(size)}, "
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


# --- what to say ---------------------------------------------------------------------------------

_FOUR_BITS = ("Q4_", "Q2_", "Q3_", "IQ", "MXFP4")  # and those that have fewer
# What becomes of types, where --dtype leaves it to the engine.
_AGAIN = "8 bits, quantised again"
_OUT_OF_ORDER = f"{_AGAIN}, for its groups are out of order (act-order)"
_BECOME = {
    "INT4": "4 bits, as in the file",
    "INT4_ZERO": "4 bits with zeros, as in the file",
    "INT4_FLOAT_ZERO": "4 bits, zeros rounded to half floats",
    "INT4_ORDERED": _OUT_OF_ORDER,
    "INT8": "8 bits, as in the file",
    "INT8_ZERO": _AGAIN,
    "INT8_ORDERED": _OUT_OF_ORDER,
    "FP8": _AGAIN,
    "NF4": "4 bits, levels rounded to 1/127 of the largest",
    "MXFP4": "4 bits, as in the file",
}
# What running so, by default, added to the mean KL of SmolLM2 on prose (docs/benchmarks.md).
_ADDED_KL = {
    "INT4": 0.004,
    "INT4_ZERO": 0.004,
    "INT4_FLOAT_ZERO": 0.005,
    "INT8": 0.002,
    "FP8": 0.003,
    "NF4": 0.009,
    "MXFP4": 0.003,
}
_FEW_BITS = ("Q2_", "Q3_", "IQ1_", "IQ2_", "IQ3_")  # of GGUF, which nothing runs as they are
_WIDTHS = {"int4": "4 bits", "int8": "8 bits", "int8-row": "8 bits per output"}


def start_lines(model: str, checkpoint: Checkpoint, config: EngineConfig) -> list[str]:
    """Return the lines to say, each with the way out. ``model`` is what the user calls it."""
    tokenizer, lines = checkpoint.tokenizer, [f"{model}: {note}" for note in checkpoint.notes]
    if checkpoint.arch.has_head and not checkpoint.eos_ids:
        lines.append(
            f"{model} names no token that ends an answer: answers run to their limit of tokens, or "
            f"to a stop string; name one under eos_token in tokenizer_config.json, or in a GGUF "
            f"file as tokenizer.ggml.eos_token_id"
        )
    if isinstance(tokenizer, Mapping) and names_no_pre_tokenizer(tokenizer):
        lines.append(f"{checkpoint.path.name} names no pre-tokenizer: llama.cpp's default is used")
    lines.append(_long_rope_line(checkpoint.arch, config.max_model_len))
    if checkpoint.arch.chunk:
        lines.append(
            f"sequences end at {checkpoint.arch.max_position:,} tokens: beyond them layers of this "
            f"model see chunks of {checkpoint.arch.chunk:,} tokens, which is not computed"
        )
    lines.append(conversion_line(model, checkpoint, config))
    if not lines[-1]:  # which says as much of quantised files
        lines.append(_four_bits_line(model, checkpoint, config.dtype))
    return [line for line in lines if line]


def _four_bits_line(model: str, checkpoint: Checkpoint, dtype: str) -> str:
    """Return what to say of ``--dtype int4`` where the file has more bits, else ""."""
    matrices = [one.dtype for one in checkpoint.tensors.values() if len(one.shape) == 2]
    wider = dict.fromkeys(kind for kind in matrices if not kind.startswith(_FOUR_BITS))
    if dtype != "int4" or not wider:
        return ""
    return (
        f"--dtype int4: what the file has as {', '.join(wider)} becomes 4 bits, which raised the "
        f"perplexity of Qwen2.5-Coder 0.5B by 7 %, and the file's own blocks by 0.2 %: those run "
        f"without --dtype; `ridgeline bench quality {model}` measures it"
    )


def _long_rope_line(arch: ModelArch, max_model_len: int) -> str:
    """Return what to say where LongRoPE's factors of long texts serve short ones too, else ""."""
    ropes = [mixer.rope for mixer in arch.attentions if mixer.rope and mixer.rope.long_divisors]
    if not ropes or max_model_len <= (original := ropes[0].original_max_position):
        return ""
    return (
        f"LongRoPE: sequences may have {max_model_len:,} tokens, so positions of all texts turn by "
        f"the factors of long ones; the publisher's code has others for texts of up to "
        f"{original:,} tokens, and --max-model-len {original} takes those"
    )


def conversion_line(model: str, checkpoint: Checkpoint, config: EngineConfig) -> str:
    """Return the line to say, "" where the weights run as they are in the file.

    ``model`` is what the user calls it.
    """
    types = list(dict.fromkeys(tensor.dtype for tensor in checkpoint.tensors.values()))
    few = [name for name in types if name.startswith(_FEW_BITS)]
    if not checkpoint.quantization and not few:
        return ""
    has = checkpoint.quantization or ", ".join(few)
    converted = [name for name in types if name in _BECOME]
    kind = _becomes(converted, config)
    in_memory = sum(BACKENDS[config.backend].packed_bytes(checkpoint, config).values())
    smaller = ""
    if few and not checkpoint.quantization and config.dtype in ("auto", "int8"):
        smaller = "; --dtype int4 takes less, and loses more"
    cost = ""
    if config.dtype == "auto" and converted and _ADDED_KL.keys() >= {*converted}:
        most = max(_ADDED_KL[name] for name in converted)
        cost = f"; that added {most} to the mean KL of SmolLM2"
    return (
        f"{has} runs as {kind}: {gb(checkpoint.nbytes)} in the file, "
        f"{gb(in_memory)} in memory{smaller}{cost}; "
        f"`ridgeline bench quality {model}` measures what it costs"
    )


def _becomes(types: Sequence[str], config: EngineConfig) -> str:
    """Return what these types, or those that only GGUF has, become."""
    if config.dtype != "auto":
        return _WIDTHS.get(config.dtype, config.dtype)
    return "; ".join(dict.fromkeys(_BECOME[name] for name in types)) or _AGAIN
