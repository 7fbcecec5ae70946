"""The settings that an engine is built from, decided: no "auto" is left, and nothing is open.

``options`` has them as people type them, and ``resolve`` makes these of those. The names are the
same. Each part is given what it needs of them: a backend its ``Setup``, which is their base, and a
scheduler or a simulation the record that a trace begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ridgeline.backends.interface import Setup
from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import Policy
from ridgeline.engine.setup.options import SpeculativeConfig


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
