"""The memory that adapters take beside a model: what the engine leaves for them, or a flag."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.engine.adapters import read_adapters, room_for
from ridgeline.model.files.adapters import Base
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.planner.memory.flags import PlanFlags
from ridgeline.planner.memory.ledger import ASSUMED, FROM_FILE


class AdapterRoom(NamedTuple):
    """Room for adapters.

    Attributes:
        rank: the largest that steps have working memory for; 0 if there are none.
        num_bytes: of all adapters, on one device.
        how: how that is known.
    """

    rank: int = 0
    num_bytes: int = 0
    how: str = FROM_FILE


NO_ADAPTERS = AdapterRoom()


def adapter_room(flags: PlanFlags, checkpoint: Checkpoint | None) -> AdapterRoom:
    """Return the room that the engine leaves for adapters.

    Args:
        flags: the flags.
        checkpoint: the model, if the engine can run it; no other can be asked what fits it.

    Raises:
        ValueError: an adapter cannot be read, is for another model, has too large a rank, or does
            not fit the room that was wished for.
    """
    options = flags.of_adapters
    if options.adapters and checkpoint is None:
        raise ValueError(
            "--lora: adapters are read for models that this engine runs; for this one give "
            "--enable-lora and --lora-memory"
        )
    base = Base.of(checkpoint) if checkpoint else None
    adapters = read_adapters(options.adapters, base) if base else {}
    weights = [one for _, one in adapters.values()]
    rank, num_bytes = room_for(options, weights)
    if not rank:
        if flags.max_lora_rank or flags.lora_memory:
            raise ValueError(
                "--max-lora-rank and --lora-memory need adapters: name some with --lora, or "
                "give --enable-lora"
            )
        return NO_ADAPTERS
    for name, one in zip(adapters, weights, strict=True):
        if one.rank > rank:
            raise ValueError(
                f"--lora {name}: its rank is {one.rank}: give --max-lora-rank {one.rank}"
            )
    is_read = not flags.lora_memory and not flags.enable_lora
    return AdapterRoom(rank, num_bytes, FROM_FILE if is_read else ASSUMED)
