"""A step's work on the device, as the model hands it to operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ridgeline.backends.cuda.step.batch import Span


@dataclass(slots=True)
class StatePlan:
    """Where the tokens and the states of a step's sequences are, on the device.

    Attributes:
        items: of sequences (``step.cache``), of which ``num_items`` [1] count.
        cuts: of their tokens, behind which states are written; ``num_cuts`` [1] count.
        item_of: the item of each token, -1 for padding.
        programs: as many as there may be items.
    """

    items: Tensor
    num_items: Tensor
    cuts: Tensor
    num_cuts: Tensor
    item_of: Tensor
    programs: int


@dataclass(slots=True)
class AdapterPlan:
    """Which adapter each token of a step has, on the device.

    Attributes:
        slot_of: of each token, the number of its adapter in this step, int32; that of no slot, if
            it has none.
        words: of each slot, the address of the adapter's words, int64 (``model.adapters``).
        max_lora_rank: the largest that an adapter may have.
        numbers: of the adapters, by slot, and ``loaded`` they themselves: what twins read. They
            are kept alive elsewhere.
    """

    slot_of: Tensor
    words: Tensor
    max_lora_rank: int
    numbers: Sequence[int]
    loaded: Mapping[int, Any]


@dataclass(slots=True)
class AttentionPlan:
    """Attention's work list on the device, for one kind of layers.

    Attributes:
        items: the list (``step.batch``), of which ``num_items`` [1] count.
        folds: partial results to fold, of which ``num_folds`` [1] count.
        part_a: room for partial results.
        part_ml: the same, for their greatest scores and sums of weights.
        programs: of a launch; they stride over the items.
        rows: of queries in a program.
        folds_at_most: how many folds a launch must have programs for.
        spans: of the step's items, and ``row_of`` their tables: what twins read.
    """

    items: Tensor
    num_items: Tensor
    folds: Tensor
    num_folds: Tensor
    part_a: Tensor
    part_ml: Tensor
    programs: int
    rows: int
    folds_at_most: int = 0
    spans: Sequence[Span] = ()
    row_of: Sequence[int] = field(default_factory=list)
