"""Where a step lies on the device: its tokens, block tables and work lists, in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.backends.cuda.sizes import MOST_SLOTS, attention_room
from ridgeline.backends.cuda.step.batch import (
    FOLD,
    ITEM,
    Batch,
    Cut,
    Kind,
    Tables,
    arrange,
)
from ridgeline.backends.cuda.step.cache import CUT, States
from ridgeline.backends.cuda.step.cache import ITEM as ITEM_OF_STATES
from ridgeline.backends.cuda.step.graphs import Variant
from ridgeline.backends.cuda.step.plan import AdapterPlan, AttentionPlan, StatePlan
from ridgeline.backends.cuda.step.staging import StagedArray, Staging
from ridgeline.backends.cuda.tiles import PROGRAMS_PER_PROCESSOR, SPLIT, rows_of
from ridgeline.backends.interface import Setup
from ridgeline.core.step import Work
from ridgeline.model.shape.model import ModelArch

_MOST_CHANGES = 4096  # entries of tables that travel with a step; more of them go in a copy of all
_TWINS = 2  # processors of a CPU: twins need none


class StagedSteps:
    """Arrays of steps on the host and on the device.

    Attributes:
        staging: what travels with each step.
        tables: block tables on the device, ``[groups, rows, width]``.
        partial_results: of attention, for layers of any kind: they run one after another.
    """

    def __init__(
        self,
        setup: Setup,
        num_groups: int,
        kinds: Sequence[Kind],
        arch: ModelArch,
        states: States,
        adapters: Mapping[int, Any],
        device: torch.device,
    ) -> None:
        """Make room for the largest step, whose layers have attention of these kinds, or states.

        ``adapters`` are those that work may name, while there are any.
        """
        max_num_batched_tokens = setup.max_num_batched_tokens
        width = -(-setup.max_model_len // setup.block_size) + 1
        self._kinds = list(dict.fromkeys(kinds))
        self._host_tables = Tables(num_groups, setup.max_num_seqs + 1, width)
        shape = self._host_tables.array.shape
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        shapes = {
            **dict.fromkeys(("tokens", "positions", "table_rows"), (max_num_batched_tokens,)),
            **dict.fromkeys(("head_rows", "places"), (setup.max_num_seqs + 1,)),
            "changes": (2, _MOST_CHANGES),
        }
        self._states = states
        if states.are_there:
            shapes |= {
                "state_items": (max_num_batched_tokens, ITEM_OF_STATES),
                "item_of": (max_num_batched_tokens,),
            }
            shapes |= {"cuts": (2 * max_num_batched_tokens, CUT), "state_counts": (2,)}
        self._adapters, self._max_lora_rank = adapters, setup.max_lora_rank
        if setup.max_lora_rank:
            shapes |= {
                "slot_of": (max_num_batched_tokens,),
                "adapter_words": (setup.max_num_seqs + 1,),
            }
        for n in range(len(self._kinds)):
            shapes |= {f"counts{n}": (2,), f"folds{n}": (MOST_SLOTS, FOLD)}
            shapes[f"items{n}"] = (max_num_batched_tokens + MOST_SLOTS, ITEM)
        parts = {
            name: StagedArray(shape, torch.int64 if name == "adapter_words" else torch.int32)
            for name, shape in shapes.items()
        }
        self.staging = Staging(parts, device)
        self._most_slots, *sizes = attention_room(arch)
        self.partial_results = [
            torch.zeros(size, dtype=torch.float32, device=device) for size in sizes
        ]
        self._processors = _TWINS
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._batch: Batch | None = None

    def arrange(
        self, work: tuple[Work, ...], padded: Callable[[int], int]
    ) -> tuple[Batch, list[tuple[int, int]]]:
        """Write a step into the host's arrays; return it, and items whose rows are new to them."""
        single = all(len(item.tokens) == 1 for item in work)
        cuts = {
            kind: Cut(rows_of(kind.shared, single or kind.is_wide), SPLIT, self._most_slots)
            for kind in self._kinds
        }
        batch = self._batch = arrange(work, self._host_tables, cuts)
        host, count = self.staging.host, len(batch.tokens)
        size = padded(count)
        for name, fill in (("tokens", 0), ("positions", 0), ("table_rows", -1)):
            host[name][:count] = getattr(batch, name)
            host[name][count:size] = fill
        for n, kind in enumerate(self._kinds):
            items, folds = batch.lists[kind]
            host[f"counts{n}"][:] = len(items), len(folds)
            host[f"items{n}"][: len(items)] = items
            host[f"folds{n}"][: len(folds)] = folds
        if self._states.are_there:
            texts, ends = self._states.cut(work)
            host["state_counts"][:] = len(texts), len(ends)
            host["state_items"][: len(texts)] = texts
            host["cuts"][: len(ends)] = ends
            host["item_of"][:count] = np.repeat(np.arange(len(texts)), texts[:, 1])
            host["item_of"][count:size] = -1
        if batch.adapters:
            words = [self._adapters[number].words.data_ptr() for number in batch.adapters]
            host["adapter_words"][: len(words)] = words
            none = len(host["adapter_words"])
            host["slot_of"][:count] = np.where(batch.slots < 0, none, batch.slots)
            host["slot_of"][count:size] = none
        return batch, self._host_tables.fresh

    def send(self, head_rows: Any = (), places: Sequence[int] = ()) -> Mapping[str, torch.Tensor]:
        """Start the copy of the step that was arranged; return its arrays on the device.

        ``head_rows`` are tokens whose logits are wanted, ``places`` of tokens that lie there.
        """
        host, there = self.staging.host, self.staging.device
        host["head_rows"][: len(head_rows)] = head_rows
        host["places"][: len(places)] = places
        changed, table = self._host_tables.take_changes(), self._host_tables.array
        count = len(changed)
        travels = count <= _MOST_CHANGES
        if travels and count:
            host["changes"][0, :count] = changed
            host["changes"][1, :count] = table.reshape(-1)[changed]
        self.staging.send()
        if not travels:
            self.tables.copy_(torch.from_numpy(table))
        elif count:
            index, value = there["changes"][:, :count]
            self.tables.view(-1)[index.long()] = value
        return there

    def forget(self) -> None:
        """Take all sequences for new, with their next step: a failed one may have sent nothing."""
        self._host_tables.forget()

    def state_plan(self, size: int) -> StatePlan | None:
        """Return where states are, for layers of ``size`` tokens; None where there are none."""
        if not self._states.are_there:
            return None
        there = self.staging.device
        return StatePlan(
            items=there["state_items"],
            num_items=there["state_counts"][:1],
            cuts=there["cuts"],
            num_cuts=there["state_counts"][1:],
            item_of=there["item_of"],
            programs=min(size, self._host_tables.array.shape[1]),
        )

    def adapter_plan(self, size: int) -> AdapterPlan:
        """Return which adapters ``size`` tokens have."""
        assert self._batch is not None
        there = self.staging.device
        return AdapterPlan(
            slot_of=there["slot_of"][:size],
            words=there["adapter_words"],
            max_lora_rank=self._max_lora_rank,
            numbers=self._batch.adapters,
            loaded=self._adapters,
        )

    def plans(self, variant: Variant, *, is_captured: bool) -> dict[Kind, AttentionPlan]:
        """Return attention's work lists; a graph that is captured is for any number of folds."""
        assert self._batch is not None
        there, batch, plans = self.staging.device, self._batch, dict[Kind, AttentionPlan]()
        for n, kind in enumerate(self._kinds):
            counts, rows = there[f"counts{n}"], rows_of(kind.shared, variant.single or kind.is_wide)
            most_folds = len(there[f"folds{n}"]) if variant.folds else 0
            plans[kind] = AttentionPlan(
                items=there[f"items{n}"],
                num_items=counts[:1],
                folds=there[f"folds{n}"],
                num_folds=counts[1:],
                part_a=self.partial_results[0],
                part_ml=self.partial_results[1],
                programs=PROGRAMS_PER_PROCESSOR[rows] * self._processors,
                rows=rows,
                folds_at_most=most_folds if is_captured else len(batch.lists[kind].folds),
                spans=batch.spans,
                row_of=batch.row_of,
            )
        return plans
