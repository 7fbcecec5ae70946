"""The stage of devices that are not here: the scheduler under a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache, cached_property
from random import Random
from typing import Any

from ridgeline.bench.claims.harness import (
    ClaimRequest,
    EngineVariant,
    LoadSizes,
    RunCounts,
    counted,
)
from ridgeline.core.params import SamplingParams
from ridgeline.engine.setup.home import stores
from ridgeline.foresight.simulator.drafts import parse_drafts
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.planner import PlanFlags
from ridgeline.planner.capacity.option import engine_record
from ridgeline.planner.catalogue import prices_of
from ridgeline.planner.memory.flags import AUTO
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.single_device import DeviceReplica, on_device

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
        held = [len(one.prompt) + one.max_tokens for one in load]
        settings = replace(
            engine_record(replica.placement, times, held),
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
