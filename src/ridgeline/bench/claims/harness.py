"""Where techniques are compared: a stage runs a load with a setup, and tells what it took.

There are two: the real engine on this machine, and the scheduler under a virtual clock with the
constants of a device. Both keep the same records, from which a tally is counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, cached_property
from random import Random
from typing import Any, NamedTuple, Protocol

from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.core.scheduling.policies import Load
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.home import stores
from ridgeline.foresight.simulator.drafts import parse_drafts
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.planner import PlanFlags
from ridgeline.planner.capacity.option import engine_record, with_blocks_for
from ridgeline.planner.catalogue import prices_of
from ridgeline.planner.memory.flags import AUTO
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.single_device import DeviceReplica, on_device

_PROMPT_TOKENS_PER_S, _LEAST_TOKENS_PER_S = 512, 4  # FastGen's service level


class ClaimRequest(NamedTuple):
    """A request: its prompt, how long its answer is, and how long its client allows it to be."""

    prompt: tuple[int, ...]
    num_new: int
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVariant:
    """How an engine is set up: the flags of ``ridgeline``; None leaves one as it is.

    ``drafts`` are "off", a method, or as in ``simulate --drafts``; ``cache_tokens`` are what the
    cache holds of the usual format, where a device has more than loads can fill.
    """

    policy: str = "splitfuse"
    max_num_seqs: int = 256
    kv_reservation: str = "auto"
    enable_prefix_caching: bool = False
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    drafts: str = "off"
    cache_tokens: int | None = None


class RunCounts(NamedTuple):
    """What a run took.

    Attributes:
        seconds: from the first arrival to the last end.
        num_tokens: generated.
        num_steps: of the engine.
        num_rows: tokens that went through the layers.
        num_seqs: in a step, in the mean.
        step_s: seconds of a step, in the mean.
        tail_s: seconds of a token of an answer, that 95 % of the answers do not exceed.
        served_well: the share of requests within FastGen's service level: a first token within a
            second for each 512 tokens of the prompt, and then four a second at least.
        rate_per_s: of arrivals, where that was looked for.
    """

    seconds: float
    num_tokens: int
    num_steps: int
    num_rows: int
    num_seqs: float
    step_s: float
    tail_s: float
    served_well: float
    rate_per_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second."""
        return self.num_tokens / self.seconds


class LoadSizes(NamedTuple):
    """How large loads are, so that all of them together fit the time.

    Attributes:
        num_requests: of a load of many.
        prompts: shortest and longest prompt of it.
        mean_new, most_new: tokens of its answers: the mean, and what clients allow.
        one: prompt and answer of a load of one stream.
        cache_tokens: what the cache holds where it is to be scarce; None for what the device has.
        shared: tokens that prompts share, and those that they do not.
        batches: numbers of streams, rising.
        long_prompt: of which attention is looked at alone.
        long_load: of requests with long prompts: their number, and tokens of both in the mean.
        weights: formats in 16 bits, 8 and 4.
        caches: formats of keys and values, the wide one first.
    """

    num_requests: int
    prompts: tuple[int, int]
    mean_new: int
    most_new: int
    one: tuple[int, int]
    cache_tokens: int | None
    shared: tuple[int, int]
    batches: tuple[int, ...]
    long_prompt: int
    long_load: tuple[int, int, int]
    weights: tuple[str, str, str]
    caches: tuple[str, str]


class Harness(Protocol):
    """Where loads run: an engine on this machine, or a scheduler under a virtual clock."""

    @property
    def name(self) -> str:
        """Of the machine."""

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def rounds(self) -> int:
        """How often both sides of a technique run, in turn."""

    @property
    def sizes(self) -> LoadSizes:
        """How large loads are."""

    @property
    def is_real(self) -> bool:
        """Whether a model computes; else only its time passes."""

    @property
    def num_heads(self) -> int:
        """Query heads of all layers together, on one device."""

    @property
    def read_bytes_per_s(self) -> float:
        """Of the device's memory; 0 where it was not measured."""

    @property
    def usd_per_hour(self) -> float | None:
        """What the device costs; None if that is not known."""

    def prompt(self, num_tokens: int, seed: str) -> tuple[int, ...]:
        """Return random token ids."""

    def repeating_prompt(self) -> tuple[int, ...]:
        """Return the ids of a text that its answer repeats."""

    def run(
        self, load: Sequence[ClaimRequest], variant: EngineVariant, *, in_turn: bool = False
    ) -> RunCounts:
        """Serve a load to its end; ``in_turn`` one after the other."""


def counted(records: Sequence[Record]) -> RunCounts:
    """Count what records tell of a run. Raises ValueError if a request failed."""
    steps = [one for one in records if isinstance(one, StepRecord) and one.work]
    ended = [one for one in records if isinstance(one, RequestRecord)]
    if errors := [one.error for one in ended if one.error]:
        raise ValueError(f"{len(errors)} of {len(ended)} requests failed: {errors[0]}")
    num_tokens = [sum(one.num_generated) for one in ended]
    token_s = sorted(
        (one.finish_s - one.first_token_s) / (num - 1)
        for one, num in zip(ended, num_tokens, strict=True)
        if one.first_token_s is not None and num > 1
    )
    begin_s = min(one.arrival_s for one in ended)
    return RunCounts(
        seconds=max(one.finish_s for one in ended) - begin_s,
        num_tokens=sum(num_tokens),
        num_steps=len(steps),
        num_rows=sum(count for one in steps for _, _, count in one.work),
        num_seqs=sum(len(one.work) for one in steps) / len(steps),
        step_s=sum(one.duration_s for one in steps) / len(steps),
        tail_s=token_s[int(0.95 * len(token_s))] if token_s else 0.0,
        served_well=sum(map(_is_served_well, ended)) / len(ended),
    )


def _is_served_well(one: RequestRecord) -> bool:
    if one.first_token_s is None:
        return False
    first_s, rest_s = one.first_token_s - one.arrival_s, one.finish_s - one.first_token_s
    is_soon = first_s <= len(one.prompt_token_ids) / _PROMPT_TOKENS_PER_S
    return is_soon and sum(one.num_generated) - 1 >= _LEAST_TOKENS_PER_S * rest_s


_DRAFTS = {
    "off": "off",
    "ngram": '{"method":"ngram","num_speculative_tokens":4}',
    "lookahead": '{"method":"lookahead"}',
}
_REPEATING = "Count: one two three four five six seven eight nine ten eleven twelve " * 6
_MOST_LEN = 1024  # of a sequence
_MOST_LOADED = 2  # the two sides of a technique


class RealStage:
    """A model that is loaded here, once for each way to set up its engine.

    Attributes:
        name: of the machine.
        model: the model's name.
        rounds: how often both sides run, in turn.
    """

    is_real = True
    rounds = 2
    name = "this machine"
    usd_per_hour = None

    def __init__(self, model: str, options: dict[str, Any], sizes: LoadSizes) -> None:
        """Load the model; ``options`` hold for all ways. Raises ValueError if it cannot be."""
        self._model, self._options, self.sizes = model, dict(options), sizes
        self._loaded: dict[EngineVariant, LLM] = {}
        first = self._llm(EngineVariant())
        self.model = first.path.stem
        self._options["max_model_len"] = min(_MOST_LEN, first.config.max_model_len)
        self._vocab = range(10, first.arch.vocab_size)
        self.num_heads = sum(mixer.num_heads for mixer in first.arch.attentions)

    def _llm(self, variant: EngineVariant) -> LLM:
        """Return the model with an engine that is set up so; of others the oldest is given up."""
        if variant not in self._loaded:
            while len(self._loaded) >= _MOST_LOADED:
                self._loaded.pop(next(iter(self._loaded))).close()
            chosen = {"dtype": variant.dtype, "kv_cache_dtype": variant.kv_cache_dtype}
            if variant.cache_tokens:
                chosen["kv_cache_memory"] = str(variant.cache_tokens * self._token_bytes)
            self._loaded[variant] = LLM(
                self._model,
                policy=variant.policy,
                max_num_seqs=variant.max_num_seqs,
                kv_reservation=variant.kv_reservation,
                enable_prefix_caching=variant.enable_prefix_caching,
                speculative_config=_DRAFTS[variant.drafts],
                **self._options | {name: value for name, value in chosen.items() if value},
            )
        return self._loaded[variant]

    @cached_property
    def _token_bytes(self) -> int:
        """Bytes of a token in the cache, in the format that is usual here."""
        config = self._llm(EngineVariant()).config
        return -(-config.kv_bytes // (config.num_blocks * config.block_size))

    @cached_property
    def read_bytes_per_s(self) -> float:
        """Of the memory, as far as one stream reads weights: at least."""
        num_prompt, num_new = self.sizes.one
        load = [ClaimRequest(self.prompt(num_prompt, "one"), num_new, num_new)]
        return (
            self._llm(EngineVariant()).config.weights_bytes / self.run(load, EngineVariant()).tail_s
        )

    def prompt(self, num_tokens: int, seed: str) -> tuple[int, ...]:
        """Return random token ids."""
        return tuple(Random(seed).choices(self._vocab, k=num_tokens))

    def repeating_prompt(self) -> tuple[int, ...]:
        """Return the ids of a text that its answer repeats."""
        return tuple(self._llm(EngineVariant()).text.encode(_REPEATING)[: self.sizes.shared[0]])

    def run(
        self, load: Sequence[ClaimRequest], variant: EngineVariant, *, in_turn: bool = False
    ) -> RunCounts:
        """Serve a load to its end; ``in_turn`` one after the other."""
        engine, records = self._llm(variant).engine, list[Record]()
        engine.listeners.append(records.append)
        try:
            if in_turn:
                for one in load:
                    _serve(engine, [one])
            else:
                _serve(engine, load)
        finally:
            engine.listeners.remove(records.append)
        return counted(records)

    def close(self) -> None:
        """Give all models up."""
        while self._loaded:
            self._loaded.popitem()[1].close()


def _serve(engine: Engine, load: Sequence[ClaimRequest]) -> None:
    """Let requests come when they are due, and end each when its answer is long enough."""
    coming = sorted(load, key=lambda one: one.arrival_s)[::-1]
    begin_s, missing = time.monotonic(), dict[int, int]()
    while coming or engine.has_work():
        now_s = time.monotonic() - begin_s
        while coming and coming[-1].arrival_s <= now_s:
            one = coming.pop()
            params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True)
            missing[engine.add(one.prompt, params)] = one.num_new
        if not engine.has_work():
            time.sleep(max(0.0, coming[-1].arrival_s - now_s))
            continue
        for event in engine.step(Load()):
            request_id = event.seq_id[0]
            missing[request_id] -= event.token is not None
            if missing[request_id] == 0 and event.finish_reason is None:
                engine.abort(request_id)


_MOST_TOKENS = 1 << 20
_STEP_TOKENS = 2048  # of a step of splitfuse; other policies run prompts whole
_CONTEXT = 2048
# What most of the papers measured, by its shape (Llama 2 13B).
LLAMA_2_13B: Mapping[str, Any] = {
    "_name_or_path": "Llama 2 13B",
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


class VirtualStage:
    """A model on a device of the catalogue; no weight is loaded.

    Attributes:
        name: of the device.
        model: the model's name.
        rounds: a virtual clock repeats itself.
    """

    is_real = False
    rounds = 1

    def __init__(
        self, model: str | Mapping[str, Any], plan_flags: PlanFlags, sizes: LoadSizes
    ) -> None:
        """Take a model, as ``ridgeline plan`` does, and one device. Raises ValueError."""
        self._spec = read_model_spec(model, stores())
        context = min(_CONTEXT, self._spec.shape.max_position or _CONTEXT)
        self._plan_flags = replace(plan_flags, context=context)
        self.sizes = sizes
        self.model = self._spec.name
        self._replica = cache(self._placed)
        self._usual = self._replica(None, None)
        self._device, self.name = self._usual.placement.device, self._usual.name
        self.notes = self._usual.notes

    def _placed(self, dtype: str | None, kv_cache_dtype: str | None) -> DeviceReplica:
        plan_flags = replace(
            self._plan_flags, dtype=dtype or AUTO, kv_cache_dtype=kv_cache_dtype or AUTO
        )
        return on_device(self._spec, plan_flags)

    @cached_property
    def num_heads(self) -> int:
        """Query heads of all layers together, on one device."""
        heads = 0
        for layer in self._spec.shape.layers:
            outputs = [m.columns for m in layer.matrices if m.name == "self_attn.o_proj"]
            channels = layer.cache.values_per_head // 2
            heads += sum(outputs) // channels if channels else 0
        return heads // self._usual.placement.num_devices

    @property
    def read_bytes_per_s(self) -> float:
        """Of the device's memory."""
        return self._device.read_bytes_per_s

    @cached_property
    def usd_per_hour(self) -> float | None:
        """The cheapest price of the devices on demand; None if none is known."""
        prices, _ = prices_of(self._device, "on_demand", date.today())
        num = self._usual.placement.num_devices
        return prices[0].of(num, self._device) if prices else None

    def prompt(self, num_tokens: int, seed: str) -> tuple[int, ...]:
        """Return random token ids."""
        return tuple(Random(seed).choices(range(1000), k=num_tokens))

    def repeating_prompt(self) -> tuple[int, ...]:
        """Return any ids: how many drafts are right is assumed."""
        return self.prompt(self.sizes.one[0], "repeating")

    def run(
        self, load: Sequence[ClaimRequest], variant: EngineVariant, *, in_turn: bool = False
    ) -> RunCounts:
        """Serve a load to its end; ``in_turn`` one after the other."""
        replica = self._replica(variant.dtype, variant.kv_cache_dtype)
        times = replica.latency_model.times
        lengths = [len(one.prompt) + one.max_tokens for one in load]
        settings = replace(
            with_blocks_for(engine_record(replica.placement, times), lengths),
            policy=variant.policy,
            max_num_batched_tokens=_STEP_TOKENS if variant.policy == "splitfuse" else _MOST_TOKENS,
            max_num_seqs=variant.max_num_seqs,
            enable_prefix_caching=variant.enable_prefix_caching,
            reserve_full=variant.kv_reservation == "full",
        )
        requests = [
            SimRequest(
                prompt=one.prompt,
                num_new=(one.num_new,),
                arrival_s=None if in_turn else one.arrival_s,
                params=SamplingParams(temperature=0.0, max_tokens=one.max_tokens),
            )
            for one in load
        ]
        drafts = parse_drafts(variant.drafts) if ":" in variant.drafts else None
        concurrency = 1 if in_turn else None
        return counted(simulate(requests, settings, times, concurrency=concurrency, drafts=drafts))
