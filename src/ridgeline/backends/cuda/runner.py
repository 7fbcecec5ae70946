"""A ``core.step.Runner`` on torch: a step becomes arrays, one copy, launches, and tokens.

It keeps weights, the cache and buffers, and nothing about requests. Steps whose items all draw
plainly take the short way: the device draws, and the next step is launched before this one's tokens
are read (``step.ahead``). All others go through ``sampler.step_output``, as in every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from ridgeline.backends.arrays import memory_use
from ridgeline.backends.cuda.device import rest_of_device
from ridgeline.backends.cuda.layer_spec import runs_ahead
from ridgeline.backends.cuda.model.adapters import AdaptedRows, LoadedAdapter, load_adapter
from ridgeline.backends.cuda.model.forward import Inputs, Model
from ridgeline.backends.cuda.model.weights import DTYPES, Weights
from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.step.batch import Batch
from ridgeline.backends.cuda.step.cache import Cache, States
from ridgeline.backends.cuda.step.draws import Draws
from ridgeline.backends.cuda.step.graphs import Graphs, Variant
from ridgeline.backends.cuda.step.lookahead import Ahead, next_work
from ridgeline.backends.cuda.step.staged import StagedSteps
from ridgeline.backends.cuda.step.staging import Pending
from ridgeline.backends.hidden_state_cache import HiddenStateCache
from ridgeline.backends.interface import CacheMemory, Counters, MemoryUse, Setup, Traffic
from ridgeline.backends.pooling import Projections, Scorer, pooled
from ridgeline.backends.sampler.step_output import LogitsRequest, Sampled, finish
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import StepRecord
from ridgeline.core.scheduling.speculate import max_draws
from ridgeline.core.step import Sampling, Step, StepOutput, Work
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.shape.cache_groups import one_group
from ridgeline.system.machine import DeviceLost

Floats = NDArray[np.float32]
_BY_TRITON = "Triton Error [CUDA]"  # how errors of a kernel's launch begin
_STEP_TOO_LARGE = "a step: lower --max-num-batched-tokens or --kv-cache-memory"


class _Launched(NamedTuple):
    """A plain step under way: what it draws, and the same on its way to the host.

    Behind the ``num_draws`` tokens is, for each, whether its logits are finite, and then whether
    any of the step's keys or values is not finite.
    """

    picked: torch.Tensor
    pending: Pending
    num_draws: int

    def tokens(self) -> list[int] | None:
        """Wait for the tokens; return None if anything is not as it should be."""
        words, n = self.pending.get(), self.num_draws
        is_sound = min(words[: 2 * n], default=1) >= 0 and all(words[n : 2 * n]) and not words[-1]
        return words[:n] if is_sound else None


class CudaRunner:
    """Weights, blocks of keys and values, and what a step needs.

    Attributes:
        groups: of layers, each with a block table of its own.
        num_ahead: items that were computed already when they were asked for.
        num_in_vain: items that were computed ahead and never asked for.
        looks_ahead: whether it may run ahead.
    """

    lost = ""  # a step finds out, and says so itself

    def __init__(
        self,
        share: Shard,
        weights: Weights,
        setup: Setup,
        *,
        ops: Any,
        scorer: Sequence[Scorer | Projections] = (),
        pads: bool | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Allocate the cache and buffers beside the weights, on their device.

        Args:
            share: what this rank has of a model.
            weights: on a device.
            setup: with every "auto" decided.
            ops: what computes: kernels on a GPU, or the same operations in torch.
            scorer: the layers that pooled states go through, if any.
            pads: whether steps are padded as graphs need it; None: on a GPU.
            ranks: the group that has the rest of the model; None: this is the whole model.
        """
        self.arch = arch = share.arch
        self.weights, self._ops, self._setup, self._share = weights, ops, setup, share
        self.device = weights.embed.device
        self.block_size = setup.block_size
        self.num_ahead = self.num_in_vain = 0
        self.groups = setup.groups or one_group(arch)
        self.states = States(arch, setup.num_states, self.device)
        self.looks_ahead = self.runs_ahead = runs_ahead(arch)
        self.resize(setup.num_blocks)
        dtype = DTYPES[setup.dtype]
        self.model = Model(
            arch, weights, ops, dtype, setup.max_model_len, self.cache.group_of, self.states,
            ranks or Ranks(),
        )  # fmt: skip
        kinds = list(self.model.kinds.values())
        self._adapters: WeakValueDictionary[int, LoadedAdapter] = WeakValueDictionary()
        self._steps = StagedSteps(
            setup, len(self.groups), kinds, arch, self.states, self._adapters, self.device
        )
        num_draws = max_draws(setup.max_num_seqs)
        self._draws = Draws(setup.max_num_seqs + 1, num_draws, ops, self.device)
        self._poison = torch.zeros(
            setup.max_num_batched_tokens, dtype=torch.int32, device=self.device
        )
        self._scorer = scorer
        self._ahead: Ahead | None = None
        self.graphs = Graphs(self._run, self.device, setup.max_num_batched_tokens, pads)

    def resize(self, num_blocks: int) -> None:
        """Make the cache anew, with another number of blocks: what it held is lost."""
        setup = self._setup
        self.num_blocks = num_blocks
        vars(self).pop("cache", None)  # freed first: there may be no room for both
        dtype = DTYPES[setup.kv_cache_dtype]
        self.cache = Cache(self.arch, num_blocks, setup.block_size, self.groups, dtype, self.device)
        self._states = HiddenStateCache(num_blocks, setup.block_size, self.arch.hidden_size)

    # --- a step ----------------------------------------------------------------------------------

    def execute(self, step: Step) -> StepOutput:
        """Copy blocks, run the model once over all tokens, write K/V, draw.

        Raises DeviceLost if the device failed for good, and MemoryError if it has too little
        memory for this step.
        """
        with self._attempt():
            if step.copies:
                pairs = torch.tensor(step.copies, device=self.device)
                self._ops.copy_blocks(self.cache.blocks, pairs[:, 0], pairs[:, 1])
            self.states.copy(step.state_copies)
            ahead, self._ahead = self._ahead, None
            output = self._compute(step) if ahead is None else self._complete(step, ahead)
            self.states.commit(step.work)
            return output

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Compute within; if that fails, nothing that was written for it counts as sent."""
        try:
            with errors_named(), torch.inference_mode():
                yield
        except BaseException:
            self._steps.forget()
            raise

    def _complete(self, step: Step, ahead: Ahead) -> StepOutput:
        """Return a step's output, of which some may have been computed ahead."""
        places = ahead.places(step, self.block_size)
        ready = [at for at in places if at >= 0]
        self.num_ahead += len(ready)
        self.num_in_vain += len(ahead.work) - len(ready)
        if len(ready) == len(step.work):
            self._run_ahead(step, ahead.picked, places)
        drawn = _Launched(ahead.picked, ahead.pending, len(ahead.work)).tokens() if ready else []
        if drawn is None:  # the usual path says which request is at fault
            self._ahead = None
            return self._compute(step)
        if self._ahead is not None:
            self._ahead.tokens = [drawn[at] for at in places]
        tokens: list[tuple[int, ...]] = [(drawn[at],) if at >= 0 else () for at in places]
        rest = [i for i, at in enumerate(places) if at < 0]
        if not rest:
            return StepOutput(tuple(tokens))
        others = step._replace(work=tuple(step.work[i] for i in rest))
        return _merged(tokens, rest, self._compute(others, goes_on=False))

    def _compute(self, step: Step, *, goes_on: bool = True) -> StepOutput:
        """Run a step; ``goes_on`` lets the one after it start."""
        batch = self._arrange(step.work)
        if self._draws.are_plain(step.work, batch.row_of):
            output = self._compute_plain(step, batch, goes_on=goes_on)
            if output is not None:
                return output
            batch = self._arrange(step.work)  # another step may be staged now
        self._steps.send()
        hidden = self._launch(batch)

        def head(asks: list[LogitsRequest]) -> list[Sampled]:
            if not asks:
                return []
            rows = hidden[[ask.token for ask in asks]]
            return self._draws.answers(self.model.logits(rows), asks)

        def states(tokens: range) -> Floats:
            rows: Floats = hidden[list(tokens)].float().numpy(force=True)
            return rows

        output = finish(step.work, head, lambda: self._damaged(batch))
        output = self._states.compare(step, output, states)
        return pooled(step, output, states, *self._scorer)

    def _compute_plain(self, step: Step, batch: Batch, *, goes_on: bool) -> StepOutput | None:
        """Draw one token for each item that has a seed; None if anything is not finite."""
        drawing = [i for i, item in enumerate(step.work) if item.seeds]
        launched = self._start(step.work, batch, drawing)
        if goes_on and len(drawing) == len(batch.tokens):
            self._run_ahead(step, launched.picked, range(len(drawing)))
        drawn = launched.tokens()
        if drawn is None:
            self._ahead = None
            return None
        if self._ahead is not None:
            self._ahead.tokens = drawn
        tokens: list[tuple[int, ...]] = [()] * len(step.work)
        for i, token in zip(drawing, drawn, strict=True):
            tokens[i] = (token,)
        return StepOutput(tuple(tokens))

    def _run_ahead(self, step: Step, picked: torch.Tensor, places: Sequence[int]) -> None:
        """Launch what will probably be asked for next.

        Its tokens are at ``places`` of what another step draws.
        """
        setup = self._setup
        work = next_work(step, setup.block_size, setup.max_model_len) if self.runs_ahead else None
        if work is None:
            return
        batch = self._arrange(work)
        if self._draws.are_plain(work, batch.row_of):
            launched = self._start(work, batch, range(len(work)), picked, places)
            self._ahead = Ahead(work, launched.picked, launched.pending)

    def _start(
        self,
        work: tuple[Work, ...],
        batch: Batch,
        drawing: Sequence[int],
        picked: torch.Tensor | None = None,
        places: Sequence[int] = (),
    ) -> _Launched:
        """Launch the layers and the draws of the items ``drawing``.

        Their tokens may still lie on the device, at ``places`` of ``picked``.
        """
        ends = np.array([first + count for first, count, _ in batch.spans]) - 1
        ends = ends[drawing]
        there = self._steps.send(head_rows=ends, places=places)
        if picked is not None:
            there["tokens"][: len(places)] = picked[there["places"][: len(places)].long()]
        hidden = self._launch(batch)
        n = len(drawing)
        poison = self._poison[: len(batch.tokens)].amax()[None]
        if not n:
            return _Launched(poison[:0], Pending(poison), 0)
        logits = self.model.logits(hidden[there["head_rows"][:n].long()])
        rows = np.array(batch.row_of)[drawing]
        seeds = [work[i].seeds[0] for i in drawing]
        drawn, finite = self._draws.of_items(logits, rows, seeds, batch.positions[ends] + 1)
        return _Launched(drawn, Pending(torch.cat([drawn, finite, poison])), n)

    def _arrange(self, work: tuple[Work, ...]) -> Batch:
        batch, fresh = self._steps.arrange(work, self.graphs.padded)
        self._draws.note(work, fresh)
        return batch

    def _launch(self, batch: Batch) -> torch.Tensor:
        """Run the layers over what is staged; return final states of at least its tokens."""
        folds = any(len(of_kind.folds) for of_kind in batch.lists.values())
        is_single = len(batch.tokens) == len(batch.spans)
        variant = Variant(folds, single=is_single, adapted=bool(batch.adapters))
        return self.graphs.run(self.graphs.padded(len(batch.tokens)), variant)

    def _run(self, size: int, variant: Variant, is_captured: bool) -> torch.Tensor:
        self._poison[:size] = 0
        plans = self._steps.plans(variant, is_captured=is_captured)
        there, adapted = self._steps.staging.device, None
        if variant.adapted:
            adapted = AdaptedRows(self._steps.adapter_plan(size), self._share, self._ops)
        given = Inputs(
            tokens=there["tokens"][:size],
            positions=there["positions"][:size],
            table_rows=there["table_rows"][:size],
            tables=self._steps.tables,
            poison=self._poison,
            plans=plans,
            state_plan=self._steps.state_plan(size),
            adapted=adapted,
        )
        return self.model(given, self.cache)

    def _damaged(self, batch: Batch) -> list[tuple[int, int]]:
        """Return the items whose keys or values are not finite, with the first such token."""
        poison = self._poison[: len(batch.tokens)].numpy(force=True)
        if not poison.any():
            return []
        of_items = [poison[first : first + count] for first, count, _ in batch.spans]
        return [(i, int(of_item.argmax())) for i, of_item in enumerate(of_items) if of_item.any()]

    # --- the rest of a backend's interface --------------------------------------------------------

    def prompt_logits(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Return the logits after each of ``tokens``, ``[tokens, vocab]``.

        The cache holds one text, whose blocks go round the groups of layers.
        """
        count = len(self.groups)
        need = -(-(start + len(tokens)) // self.block_size)
        table, *others = (tuple(range(group, need * count, count)) for group in range(count))
        sampling = Sampling(SamplingParams(), 0, ())
        work = Work(
            (-1, 0), start, tuple(tokens), table,
            seeds=(), sampling=sampling, history=(), targets=(), state=0, others=tuple(others),
        )  # fmt: skip
        self._ahead = None
        with self._attempt():
            batch = self._arrange((work,))
            self._steps.send()
            hidden = self._launch(batch)[: len(tokens)]
            logits: Floats = self.model.logits(hidden).numpy(force=True)
            self.states.commit((work,))
        return logits

    def add_adapter(self, number: int, weights: AdapterWeights) -> LoadedAdapter:
        """Let work name an adapter by this number while what is returned is kept.

        Raises ValueError if its rank is larger than there is room for, or if the device has no
        memory for it.
        """
        max_lora_rank = self._setup.max_lora_rank
        if weights.rank > max_lora_rank:
            raise ValueError(f"rank {weights.rank}: the runner has room for {max_lora_rank}")
        dtype = DTYPES[self._setup.dtype]
        try:
            loaded = load_adapter(weights, self.arch.num_layers, dtype, self.device, self._share)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "the GPU has no memory for another adapter: leave more for them (--lora-memory)"
            ) from error
        self._adapters[number] = loaded
        return loaded

    def traffic(self, step: StepRecord, num_experts: int | None = None) -> dict[str, Traffic]:
        """Return nothing: kernels on a device are not counted."""
        return {}

    def memory(self) -> dict[str, MemoryUse]:
        """Return what every tensor takes that is kept from step to step."""
        of_weights = self.weights.by_name()
        parts: dict[str, list[Any]] = {f"weights.{name}": of_weights[name] for name in of_weights}
        parts["weights.rope"] = self.model.tables()
        parts["kv_cache"] = [self.cache.blocks]
        parts["recurrent_states"] = self.states.arrays()
        parts["scratch.attention"] = self._steps.partial_results
        parts["scratch.step"] = [
            self._steps.staging.array, self._steps.tables, self._draws.staging.array, self._poison,
        ]  # fmt: skip
        if adapters := list(self._adapters.values()):
            parts["adapters"] = [part for one in adapters for part in (one.values, one.words)]
        by_name = {name: self._memory_use(arrays) for name, arrays in parts.items()}
        if self.device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            by_name |= rest_of_device(
                str(self.device),
                sum(part.num_bytes for part in by_name.values()),
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
                total_bytes - free_bytes,
            )
        by_name["states"] = memory_use([self._states.array])
        if self._scorer:
            by_name[f"weights.{self._scorer[0].part}"] = memory_use(self._scorer[0].arrays)
        return by_name

    def _memory_use(self, tensors: Sequence[torch.Tensor]) -> MemoryUse:
        if self.device.type == "cpu":
            return memory_use(one.view(torch.uint8).numpy() for one in tensors if one.numel())
        places = {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors}
        size = sum(num_bytes for _, num_bytes in places)
        return MemoryUse(size, size, device=str(self.device))

    def timed_calls(self) -> dict[str, tuple[Any, str]]:
        """Return the methods that do the host's parts of a step, to be timed there."""
        return {
            "arranges": (self, "_arrange"),
            "sends": (self._steps, "send"),
            "launches layers": (self.graphs, "run"),
            "launches logits": (self.model, "logits"),
            "launches draws": (self._draws, "of_items"),
        }

    def cache_memory(self) -> CacheMemory:
        """Raise ValueError: a device's memory is not read by the processor."""
        raise ValueError("the cuda backend keeps its cache on the device: use --backend cpu")

    def give_back(self, *, weights: bool) -> None:
        """Raise ValueError: the device's memory is reserved for as long as the process runs."""
        raise ValueError("the cuda backend keeps its memory until it ends: use --backend cpu")

    def profile(self, announce: Callable[[], None]) -> Counters:
        """Raise ValueError: nothing counts inside kernels."""
        raise ValueError("the cuda backend counts no cycles: use --backend cpu")


def _is_alive() -> bool:
    """Return whether the device still works: what ends a context fails every call from then on."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


@contextmanager
def errors_named(too_large: str = _STEP_TOO_LARGE) -> Iterator[None]:
    """Turn torch's device errors into those that other code knows.

    ``too_large`` is what to say of something for which the device has too little memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise MemoryError(f"the GPU has too little memory for {too_large}") from error
    except RuntimeError as error:
        first, *_ = [*str(error).splitlines(), ""]
        if not isinstance(error, torch.AcceleratorError) and not first.startswith(_BY_TRITON):
            raise
        if _is_alive():  # a launch was refused, and nothing else is wrong
            raise
        raise DeviceLost(
            f"the GPU failed, and this process cannot use it again: {first}"
        ) from error


def _merged(tokens: list[tuple[int, ...]], rest: Sequence[int], output: StepOutput) -> StepOutput:
    """Return the output of a whole step; ``rest`` are the items that ``output`` is about."""
    for i, drawn in zip(rest, output.tokens, strict=True):
        tokens[i] = drawn
    by_item: Iterable[Any] = (
        {rest[i]: value for i, value in field.items()} for field in output[1:]
    )
    return StepOutput(tuple(tokens), *by_item)
