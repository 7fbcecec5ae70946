"""What a model needs in memory on this machine: one figure, for every command and for the page.

It is what a plan counts for one text, without the margin: that stays free, and is larger on a
larger machine. It neither reads weights nor knows who asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.engine.setup.home import stores
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.planner.memory.flags import PlanFlags
from ridgeline.planner.memory.model_spec import ModelSpec, read_model_spec
from ridgeline.planner.memory.placement import DEFAULT_CONTEXT, parts_of
from ridgeline.planner.plan import plan_for
from ridgeline.system.report import gb

_USUAL = PlanFlags()


class Needs(NamedTuple):
    """What a model needs.

    Attributes:
        num_bytes: all of it.
        parts: bytes by name; they sum to ``num_bytes``.
        context: tokens of the one text that it is counted for.
    """

    num_bytes: int
    parts: dict[str, int]
    context: int

    @property
    def in_words(self) -> str:
        """The figure, and what it is for."""
        return f"{gb(self.num_bytes)} for a text of {self.context:,} tokens"

    @property
    def parts_in_words(self) -> str:
        """The parts."""
        return ", ".join(f"{name} {gb(size)}" for name, size in self.parts.items())

    @property
    def sentence(self) -> str:
        """All of it, beside what a process has in memory."""
        return (
            f"The model needs {self.in_words}: {self.parts_in_words}. Memory is taken as it is "
            f"first used: less than this before the first answers, and more for more texts at once."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"bytes": self.num_bytes, "context_tokens": self.context, "parts": self.parts}


def needs_of(spec: ModelSpec, flags: PlanFlags = _USUAL) -> Needs:
    """Return what a model that runs here needs. Raises ValueError if it does not."""
    if spec.checkpoint is None:
        raise ValueError(f"{spec.name} does not run here")
    best = plan_for(spec, flags).best
    *parts, _margin = parts_of(best.ledger)
    return Needs(best.ledger.needed_bytes, dict(parts), best.memory.context)


def needs_of_file(path: Path) -> Needs:
    """Return what the model of a file or directory needs here.

    Raises ValueError if it does not run, and OSError if it cannot be read.
    """
    return needs_of(read_model_spec(path, stores()))


def flags_of(config: EngineConfig) -> PlanFlags:
    """Return what an engine was built with, as a plan is asked for it: for a text of usual length.

    Of a longer one only so much is asked as the engine takes.
    """
    has_adapters = bool(config.max_lora_rank)
    return PlanFlags(
        context=min(DEFAULT_CONTEXT, config.max_model_len),
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_lora=has_adapters,
        max_lora_rank=config.max_lora_rank or None,
        lora_memory=str(config.lora_bytes) if has_adapters else None,
    )
