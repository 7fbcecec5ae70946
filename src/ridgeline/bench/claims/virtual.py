"""The stage of devices that are not here: the scheduler under a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache, cached_property
from random import Random
from typing import Any

from ridgeline.bench.claims.stage import ClaimRequest, LoadSizes, RunCounts, Ways, counted
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord
from ridgeline.engine_setup.locate import stores
from ridgeline.foresight.simulator.drafts import parse_drafts
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.step_time.prompt_pieces import least_prompt_tokens
from ridgeline.planner import PlanFlags
from ridgeline.planner.capacity.candidate import bounds_of
from ridgeline.planner.capacity.latency_model import clock_of
from ridgeline.planner.catalogue import find_devices, prices_of
from ridgeline.planner.memory.model_spec import subject_of
from ridgeline.planner.memory.placement import Placement, place

_MOST_TOKENS = 1 << 20
_STEP_TOKENS = 2048  # of a step of splitfuse; other policies run prompts whole
_CONTEXT = 2048
# What most of the papers measured, by its shape (Llama 2 13B).
LLAMA_2_13B: Mapping[str, Any] = {
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

    def __init__(self, model: str | Mapping[str, Any], on: str, sizes: LoadSizes) -> None:
        """Take a model, as ``ridgeline plan`` does, and one device. Raises ValueError."""
        self._subject = subject_of(model, stores())
        devices = find_devices(on).devices
        if len(devices) != 1:
            raise ValueError(f"--on {on} names {len(devices)} devices: name one")
        self._device = devices[0]
        self.sizes = sizes
        self.model = "Llama 2 13B" if model is LLAMA_2_13B else self._subject.name
        self._place = cache(self._placed)
        placement = self._place(None, None)
        ranks = placement.num_devices
        self.name = f"{ranks} x {self._device.id}" if ranks > 1 else self._device.id

    def _placed(self, dtype: str | None, kv_cache_dtype: str | None) -> Placement:
        flags = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
        given = {name: value for name, value in flags.items() if value is not None}
        wishes = PlanFlags(context=_CONTEXT, **given)  # type: ignore[arg-type]
        return place(self._subject, self._device, wishes, default_ranks="auto")

    @cached_property
    def num_heads(self) -> int:
        """Query heads of all layers together, on one device."""
        heads = 0
        for layer in self._subject.shape.layers:
            outputs = [m.columns for m in layer.matrices if m.name == "self_attn.o_proj"]
            channels = layer.cache.values_per_head // 2
            heads += sum(outputs) // channels if channels else 0
        return heads // self._place(None, None).num_devices

    @property
    def read_bytes_per_s(self) -> float:
        """Of the device's memory."""
        return self._device.read_bytes_per_s

    @cached_property
    def usd_per_hour(self) -> float | None:
        """The cheapest price of the devices on demand; None if none is known."""
        prices, _ = prices_of(self._device, "on_demand", date.today())
        num = self._place(None, None).num_devices
        return prices[0].of(num, self._device) if prices else None

    def prompt(self, num_tokens: int, seed: str) -> tuple[int, ...]:
        """Return random token ids."""
        return tuple(Random(seed).choices(range(1000), k=num_tokens))

    def repeating_prompt(self) -> tuple[int, ...]:
        """Return any ids: how many drafts are right is assumed."""
        return self.prompt(self.sizes.one[0], "repeating")

    def run(self, load: Sequence[ClaimRequest], ways: Ways, *, in_turn: bool = False) -> RunCounts:
        """Serve a load to its end; ``in_turn`` one after the other."""
        placement = self._place(ways.dtype, ways.kv_cache_dtype)
        times, bounds = clock_of(self._subject, placement).times, bounds_of(placement)
        is_split, size = ways.policy == "splitfuse", bounds.block_size
        longest = [len(one.prompt) + one.max_tokens for one in load]
        settings = EngineRecord(
            policy=ways.policy,
            block_size=size,
            num_blocks=min(bounds.num_blocks, sum(num // size + 2 for num in longest)),
            max_num_batched_tokens=_STEP_TOKENS if is_split else _MOST_TOKENS,
            max_num_seqs=ways.max_num_seqs,
            max_model_len=_MOST_TOKENS,
            enable_prefix_caching=ways.enable_prefix_caching,
            seed=0,
            eos_ids=(),
            least_prompt_tokens=least_prompt_tokens(times.seconds),
            reserve_full=ways.kv_reservation == "full",
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
        drafts = parse_drafts(ways.drafts) if ":" in ways.drafts else None
        concurrency = 1 if in_turn else None
        return counted(simulate(requests, settings, times, concurrency=concurrency, drafts=drafts))
