"""The CPU backend's ``core.step.Runner``: a step becomes arrays, one compiled call, and tokens.

It keeps weights, the paged cache and scratch memory, and nothing about requests.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned, memory_use, release
from ridgeline.backends.cpu.batch import Batch, arrange
from ridgeline.backends.cpu.buffers import NOTHING_YET, Buffers, HiddenRows
from ridgeline.backends.cpu.kernels.argmax import DRAWN, GREEDY, BoundPruning
from ridgeline.backends.cpu.kernels.clock import CycleCounters
from ridgeline.backends.cpu.kernels.compile import Kernels, host_target, load_kernels
from ridgeline.backends.cpu.kernels.threads import ADAPTIVE_ROWS, AdaptiveThreads, Workers
from ridgeline.backends.cpu.layout.lora import PackedAdapter, pack_adapter
from ridgeline.backends.cpu.layout.model_sizes import has_unlike_records, model_sizes
from ridgeline.backends.cpu.layout.model_weights import load_weights
from ridgeline.backends.cpu.layout.sampling_table import Draws
from ridgeline.backends.cpu.layout.shapes import TOKENS, KernelConfig
from ridgeline.backends.cpu.measure.traffic import step_traffic
from ridgeline.backends.hidden_state_cache import HiddenStateCache
from ridgeline.backends.inputs import EmbeddingNorm, FirstInputs
from ridgeline.backends.interface import BackendContext, CacheMemory, MemoryUse, Setup, Traffic
from ridgeline.backends.pooling import pooled, pooling_head
from ridgeline.backends.sampler.step_output import LogitsRequest, Pick, Sampled, answered, finish
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import StepRecord
from ridgeline.core.step import Sampling, Step, StepOutput, Work
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import one_group
from ridgeline.system.machine import give_back

_BATCHED = (
    *("positions", "text_lengths", "items"),
    *("blocks", "block_bounds", "output_begins"),
)


class CpuRunner:
    """A ``core.step.Runner`` on compiled kernels. ``close()``, or dropping it, ends its threads."""

    lost = ""

    def __init__(
        self,
        checkpoint: Checkpoint,
        setup: Setup,
        *,
        kernel_cache: Path,
        weights_cache: Path | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        announce: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Pack weights, load (or compile) kernels, start the workers.

        Args:
            checkpoint: the model.
            setup: its block size is a multiple of 16.
            kernel_cache: directory for compiled kernels.
            weights_cache: directory for packed weights; None packs them each time.
            progress: told how many of how many bytes of the file are packed.
            announce: called before a compilation.
            say: told in a line what is wrong with a file that was kept.
        """
        self.arch = arch = checkpoint.arch
        self.num_blocks, self.block_size = setup.num_blocks, setup.block_size
        self.sizes = sizes = model_sizes(
            arch, setup.dtype, setup.kv_cache_dtype, setup.max_lora_rank,
            has_tiles=host_target().processor.has_tiles,
        )  # fmt: skip
        self.weights = load_weights(
            checkpoint, sizes, setup.dtype, setup.max_model_len, weights_cache, progress, say
        )
        give_back()
        kinds = self.weights.kinds
        kernels = load_kernels(sizes, kinds, arch.norm_eps, kernel_cache, announce)
        self._kernel_cache = kernel_cache
        self._threads = setup.threads
        groups = setup.groups or one_group(arch)
        self._windows = tuple(group.window for group in groups)
        self._has_unlike_records = has_unlike_records(sizes, groups)
        self._slots = Slots(sizes, setup.num_states)
        self._done: ComputedStep | None = None
        self._buffers = Buffers(arch, sizes, self.weights, replace(setup, groups=groups))
        states = self._slots.states
        self._buffers.put(states=address(states), state_stride=states.strides[0])
        self.cache = self._buffers.cache
        self._args_address = address(self._buffers.args)
        self._draws = Draws(sizes.vocab_size)
        self._states = HiddenStateCache(setup.num_blocks, setup.block_size, arch.hidden_size)
        self._adapters: WeakValueDictionary[int, PackedAdapter] = WeakValueDictionary()
        self._scorer = pooling_head(checkpoint)
        self._embed_norm = EmbeddingNorm(checkpoint) if arch.embed_norm else None
        positions = self.weights.positions if arch.position_rows else None
        self._first_inputs = FirstInputs(arch, positions, self._embed_norm)
        self._inputs = checkpoint.tensors.get("inputs")
        self._adaptive_threads = AdaptiveThreads(setup.threads)
        self._pruning = {GREEDY: BoundPruning(), DRAWN: BoundPruning()}
        self._start(kernels)

    def _start(self, kernels: Kernels) -> None:
        """Start the workers in these kernels."""
        self._kernels, self._run = kernels, kernels.function("run", 1)
        self._norm_rows = kernels.function("norm_rows", 4)
        workers = Workers(kernels.function("worker", 2), self._args_address, self._threads)
        # The workers must be gone before their code and memory are, also when Python ends.
        owners, sync = (kernels, self._buffers, self._slots), address(self._buffers.scratch["sync"])
        self.close = weakref.finalize(
            self, _stop, workers, self._run, self._args_address, sync, owners
        )

    def profile(self, announce: Callable[[], None] = lambda: None) -> CycleCounters:
        """Change to kernels that count where time goes; return the counters from now on.

        They give the same answers, a little slower. No step may be running. The counters end with
        the runner.
        """
        self.close()
        self._buffers.scratch["sync"][:] = 0
        sizes, eps = replace(self.sizes, profiled=True), self.arch.norm_eps
        kernels = load_kernels(sizes, self.weights.kinds, eps, self._kernel_cache, announce)
        self._counters = CycleCounters(kernels.function("clock", 1), self._threads)
        self._buffers.put(counters=self._counters.address)
        self._start(kernels)
        return self._counters

    def add_adapter(self, number: int, weights: AdapterWeights) -> PackedAdapter:
        """Let work name an adapter by this number while what is returned is kept."""
        packed = self._adapters[number] = pack_adapter(weights, self.arch, self.sizes)
        return packed

    def traffic(self, step: StepRecord, num_experts: int | None = None) -> dict[str, Traffic]:
        """Return the bytes read and operations done in a step, by kind."""
        return step_traffic(self.arch, self.sizes, self.weights, step, num_experts)

    def memory(self) -> dict[str, MemoryUse]:
        """Return what every array takes, and by how much the process grew for the kernels."""
        weights, grown_bytes = self.weights, self._kernels.grown_bytes
        packed, tables = weights.packed().items(), weights.tables().items()
        by_name = {f"weights.{k}": memory_use(v, is_mapped=weights.is_mapped) for k, v in packed}
        by_name |= {f"weights.{k}": memory_use(v) for k, v in tables}
        by_name |= {name: memory_use(arrays) for name, arrays in self._buffers.arrays().items()}
        if self._embed_norm is not None:
            by_name["weights.embed_norm"] = memory_use(self._embed_norm.arrays)
        if self._scorer:
            by_name[f"weights.{self._scorer[0].part}"] = memory_use(self._scorer[0].arrays)
        by_name["scratch.draws"] = memory_use(self._draws.arrays)
        by_name["states"] = memory_use([self._states.array])
        by_name["recurrent_states"] = memory_use([self._slots.states])
        if self._inputs is not None:
            by_name["weights.inputs_table"] = memory_use([self._inputs.stored], is_mapped=True)
        if adapters := list(self._adapters.values()):
            by_name["adapters"] = memory_use(array for one in adapters for array in one.arrays)
        return by_name | {"kernels": MemoryUse(grown_bytes, grown_bytes)}

    def cache_memory(self) -> CacheMemory:
        """Return the memory of the cache and of states, and how they are laid out."""
        # What a block holds is the same whether steps have room for adapters or not.
        sizes = replace(self.sizes, profiled=False, max_lora_rank=0)
        layout = f"{self.block_size} {self._windows} {sizes}"
        blocks = self.cache.reshape(self.num_blocks, self.cache[0].size)
        return CacheMemory(blocks, [self._slots.states] if self.sizes.recurrence else [], layout)

    def give_back(self, *, weights: bool) -> None:
        """Give back the cache, the states and scratch memory; with ``weights`` those of a file."""
        self._done = None
        release(self._buffers.lasting_a_step())
        release([self.cache, self._slots.states, self._states.array])
        if weights and self.weights.is_mapped:
            release((a for part in self.weights.packed().values() for a in part), is_mapped=True)
        if weights and self._inputs is not None:
            release([self._inputs.stored], is_mapped=True)

    def rows(self, step: Step, given: HiddenRows | None) -> HiddenRows:
        """Run these layers alone, of a model that is divided: rows in, rows out.

        ``given`` is what the stage before this one gives; None begins with the tokens.
        """
        self._copy(step)
        # Each token has an output: else it would not go through the last of the layers.
        work = tuple(item._replace(targets=item.tokens) for item in step.work)
        batch = self._prepare(work, given)
        self._draws.begin()
        self._head([], [])
        order, buffers = batch.row_of_token, self._buffers
        return HiddenRows(buffers.x[order, : self.arch.hidden_size], buffers.non_finite[order])

    def _copy(self, step: Step) -> None:
        if step.copies:
            old, new = map(list, zip(*step.copies, strict=True))
            self.cache[new] = self.cache[old]
        self._slots.copy(step.state_copies)

    def execute(self, step: Step, given: HiddenRows | None = None) -> StepOutput:
        """Copy blocks, run the model once over all tokens, write K/V, sample.

        ``given`` is what the layers before these have made of the tokens, if there are any.
        """
        self._copy(step)
        batch = self._done.part(step.work) if self._done else None
        if batch is not None:  # of a step that failed; its other half may follow
            return self._results(step, batch)
        self._done = None
        batch = self._prepare(step.work, given)
        try:
            return self._results(step, batch)
        except BaseException:
            if self.sizes.recurrence and not self._buffers.get("does_layers"):
                self._done = ComputedStep(step.work, batch)
            raise

    def _results(self, step: Step, batch: Batch) -> StepOutput:
        """Run the model if it is still to be run; return what is asked of a step's tokens."""
        damaged = partial(self._damaged, step.work, batch)
        output = finish(step.work, partial(self._answers, batch=batch), damaged)
        output = self._states.compare(step, output, partial(self._hidden, batch=batch))
        scale = self.arch.logit_scale  # of the final norm's weights
        return pooled(
            step, output, lambda tokens: self._hidden(tokens, batch) / scale, *self._scorer
        )

    def _prepare(self, work: tuple[Work, ...], given: HiddenRows | None = None) -> Batch:
        """Put a step's work into the kernels' arguments."""
        few = sum(len(item.tokens) for item in work) <= ADAPTIVE_ROWS
        threads = self._adaptive_threads.size if few else self._threads
        records = self.block_size // TOKENS
        sizes = self.sizes
        batch = arrange(
            work, threads, sizes.together, records, self._windows,
            row_block=sizes.row_block, mixed_rows=sizes.mixed_rows,
        )  # fmt: skip
        if self._has_unlike_records:
            self._clear_begun(work)
        buffers = self._buffers
        if given is None:
            self._embed(work, batch)
        else:
            buffers.x[: len(batch.tokens), self.arch.hidden_size :] = 0
            buffers.x[batch.row_of_token, : self.arch.hidden_size] = given.x
            buffers.non_finite[batch.row_of_token] = given.non_finite
        if self._inputs is not None:  # as they lie in the file: it is larger than all the rest
            own = self._inputs.rows(np.array(batch.tokens)).to_f32()
            size = self.arch.input_size
            places = buffers.inputs[: len(own)].reshape(len(own), self.arch.num_layers, -1)
            places[:, :, :size] = own.reshape(len(own), -1, size)
            places[:, :, size:] = 0
        for name in _BATCHED:
            if values := getattr(batch, name):  # few rows have neither bounds nor blocks
                buffers.by_row[name][: len(values)] = values
        for group, begins in enumerate(batch.sequences):
            buffers.sequences[group, : len(begins)] = begins
        self._adapt(batch)
        if self.sizes.recurrence:
            buffers.by_row["order"][: len(batch.tokens)] = batch.row_of_token
            buffers.put_segments(segments(work))
        buffers.put_tables(batch.tables)
        buffers.put(does_layers=1, num_rows=len(batch.tokens), threads=threads)
        return batch

    def _embed(self, work: tuple[Work, ...], batch: Batch) -> None:
        """Put what the first layer reads into a step's rows."""
        buffers = self._buffers
        buffers.non_finite[: len(batch.tokens)] = 0
        for row, token in enumerate(batch.tokens):  # an array of indices costs more, for one most
            buffers.x[row] = self.weights.embedding[token]
        rows = buffers.x[: len(batch.tokens)]
        self._first_inputs.make(rows, batch.positions, work, batch.row_of_token)

    def _clear_begun(self, work: tuple[Work, ...]) -> None:
        """Put zeros into the blocks that are begun: they may hold records of another form."""
        size = self.block_size
        begun = [
            table[position // size]
            for item in work
            for table in (item.table, *item.others)
            for position in range(item.start, item.start + len(item.tokens))
            if position % size == 0
        ]
        self.cache[begun] = 0

    def _adapt(self, batch: Batch) -> None:
        """Say which rows have an adapter, and where it is; requests keep those of their work."""
        used = [number for number in dict.fromkeys(batch.adapters) if number]
        self._buffers.put(num_adapted=len(used))
        if used:
            places = {number: address(self._adapters[number].words) for number in used} | {0: 0}
            rows = self._buffers.by_row["adapters"]
            rows[: len(batch.tokens)] = [places[number] for number in batch.adapters]

    def prompt_logits(
        self,
        tokens: Sequence[int],
        start: int = 0,
        before: Callable[[Work], HiddenRows] | None = None,
    ) -> NDArray[np.float32]:
        """Return the logits after each of ``tokens``, ``[tokens, vocabulary]``.

        For measuring, not for serving: the cache holds one text in its first blocks, which
        ``tokens`` continue at position ``start``. ``before`` returns what the layers before these
        make of it, if there are any.
        """
        size = -(-(start + len(tokens)) // self.block_size)
        blocks, *others = (
            tuple(range(group, len(self._windows) * size, len(self._windows)))
            for group in range(len(self._windows))
        )
        nothing = Sampling(SamplingParams(), start + len(tokens), ())
        targets = tuple(tokens)  # any id will do: it asks for every row
        item = Work(
            (0, 0), start, tuple(tokens), blocks,
            seeds=(), sampling=nothing, history=(), targets=targets, state=0, others=tuple(others),
        )  # fmt: skip
        batch = self._prepare((item,), before(item) if before else None)
        self._draws.begin()
        self._head(batch.row_of_token, list(range(len(tokens))))
        return self._buffers.logits[: len(tokens), : self.arch.vocab_size].copy()

    # --- results -------------------------------------------------------------------------------

    def _answers(self, asks: list[LogitsRequest], batch: Batch) -> list[Sampled]:
        """Run the step; draw, or rank what is known, behind some tokens of the batch."""
        rows = [batch.row_of_token[ask.token] for ask in asks]
        answers = self._drawn(asks, rows, [_is_greedy(ask) for ask in asks])
        # A mask seldom rules out the likeliest token. Where it does, logits are needed after all.
        again = [
            i
            for i, (ask, answer) in enumerate(zip(asks, answers, strict=True))
            if _is_greedy(ask) and not ask.draws[0].allows(answer.picks[0][0] or 0)
        ]
        if again:
            few = [asks[i] for i in again], [rows[i] for i in again], [False] * len(again)
            for i, answer in zip(again, self._drawn(*few), strict=True):
                answers[i] = answer
        return answers

    def _drawn(
        self, asks: list[LogitsRequest], rows: list[int], is_greedy: list[bool]
    ) -> list[Sampled]:
        """Answer asks for these rows of the step; for greedy ones without making their logits."""
        draws = self._draws
        draws.begin()
        logits_rows = [
            -1 if greedy else self._enter(ask) for ask, greedy in zip(asks, is_greedy, strict=True)
        ]
        best = self._head(rows, logits_rows)
        results = iter(draws.results())
        answers: list[Sampled] = []
        for ask, row, (likeliest, is_finite) in zip(asks, logits_rows, best, strict=True):
            is_plain = ask.is_plain and row >= 0
            count = 1 if is_plain else len(ask.draws) or 1
            greedy: list[Pick] = [(likeliest, None)] * count
            answer = Sampled(list(islice(results, count)) if row >= 0 else greedy, is_finite)
            if is_plain and is_finite:
                answer = answered(self._buffers.logits[row, : self.arch.vocab_size], ask)
            answers.append(answer)
        return answers

    def _enter(self, ask: LogitsRequest) -> int:
        """Enter a draw or a rank; return its row of logits."""
        if not ask.draws or ask.is_plain:
            return self._draws.rank(ask.target, ask.num_top or 0)
        return self._draws.add(ask.draws, ask.num_top)

    def _hidden(self, tokens: range, batch: Batch) -> NDArray[np.float32]:
        """Return the final states of tokens that have an output, normed."""
        weights = self.weights
        x = self._buffers.x[batch.row_of_token[tokens.start : tokens.stop]]  # a copy
        norm, bias = address(weights.final_norm), address(weights.final_norm_bias)
        self._norm_rows(address(x), norm, bias, len(x))
        return x[:, : self.arch.hidden_size]

    def _damaged(self, items: tuple[Work, ...], batch: Batch) -> Iterator[tuple[int, int]]:
        """Yield the items whose keys or values are not finite, with the first such token."""
        non_finite = self._buffers.non_finite
        if any(non_finite[: len(batch.tokens)].tolist()):
            for i, work in enumerate(items):
                rows_of = batch.row_of_token[batch.ends[i] - len(work.tokens) : batch.ends[i]]
                if (of_item := non_finite[rows_of]).any():
                    yield i, int(of_item.astype(bool).argmax())

    def _head(self, rows: list[int], logits_rows: list[int]) -> list[tuple[int, bool]]:
        """Run the step, then the head on these rows of it, then ``_draws``.

        ``logits_rows`` says where the logits of each go; -1 means nowhere. Returns each row's
        likeliest token and whether its logits are finite.
        """
        count, buffers = len(rows), self._buffers
        needed = max(logits_rows, default=-1) + 1
        buffers.hold_logits(needed)
        threads = buffers.get("threads")
        best = buffers.by_row["argmax"][: count * threads]
        best[:] = NOTHING_YET
        buffers.by_row["head_rows"][:count] = rows
        buffers.by_row["logits_rows"][:count] = logits_rows
        draws = self._draws
        prunes = self._prunes(count, needed)
        buffers.by_row["proxy_argmax"][:] = NOTHING_YET
        buffers.put(num_head_rows=count, prunes=prunes, num_drawn_rows=draws.num_rows)
        if draws.num_rows:
            table, firsts = draws.write()
            buffers.put(draws=table, draw_firsts=firsts)
        buffers.scratch["shares"][:] = 0
        begin_s = time.perf_counter()
        self._run(self._args_address)
        num_rows = buffers.get("num_rows")
        if num_rows <= ADAPTIVE_ROWS and buffers.get("does_layers"):
            self._adaptive_threads.note(num_rows, time.perf_counter() - begin_s)
        buffers.put(does_layers=0)
        if prunes and count and self.weights.head is not None:
            first = self.arch.num_layers * threads
            exact = sum(buffers.exact[first : first + threads].tolist())
            self._pruning[prunes].note(exact / len(self.weights.head.data))
        # Lists, as in ``batch``; of what threads found the greatest is the answer.
        shares = [iter(best.tolist())] * threads
        greatest = map(max, zip(*shares, strict=True))
        return [(~place, not non_finite) for _, non_finite, place in greatest]

    def _prunes(self, num_rows: int, num_logits: int) -> int:
        """Return how the head is pruned, of which rows want logits: see ``emit.argmax``."""
        way = 0 if num_logits else GREEDY
        if num_rows == num_logits == 1 and self._draws.is_bounded and not self.arch.logit_softcap:
            way = DRAWN
        return way if way and self.weights.prunes(num_rows) and self._pruning[way].is_due() else 0


def load_runner(checkpoint: Checkpoint, setup: Setup, context: BackendContext) -> CpuRunner:
    """Return a runner over all layers of a checkpoint, which keeps its files at home."""
    home = context.home()
    return CpuRunner(
        checkpoint,
        setup,
        kernel_cache=home / "kernels",
        weights_cache=home / "packed",
        progress=context.progress,
        announce=context.announce,
        say=context.say,
    )


def _is_greedy(ask: LogitsRequest) -> bool:
    """Whether the likeliest token is enough to know."""
    return bool(ask.draws) and ask.num_top is None and ask.draws[0].is_plain_greedy


def _stop(
    workers: Workers, run: Callable[..., None], args: int, sync: int, owners: tuple[object, ...]
) -> None:
    workers.stop(run, args, sync)
    del owners


class Slots:
    """States of recurrent layers by slot, all layers of one together: see ``layout.recurrent``.

    Attributes:
        states: ``[slots, floats]``, f32; no float where no layer keeps a state.
    """

    def __init__(self, sizes: KernelConfig, num_slots: int) -> None:
        """Reserve memory for at least one slot: for texts that no engine reads."""
        self.states: NDArray[np.float32] = aligned(
            (max(num_slots, 1), sizes.state_ends[-1]), np.float32
        )

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy states, from and to; all are read before one is written."""
        if pairs and self.states.size:
            old, new = map(list, zip(*pairs, strict=True))
            self.states[new] = self.states[old]


def segments(work: tuple[Work, ...]) -> list[tuple[int, int, int, int]]:
    """Return what kernels do with the tokens of a step, which are numbered in the order of work.

    First token and end, the slot that has the state before them (-1 for zeros), and the one that
    keeps it. A state to be saved is copied by a segment without tokens.
    """
    cuts = []
    first = 0
    for item in work:
        source, begin = item.state if item.start else -1, 0
        for end, slot in (*item.save, (len(item.tokens), item.state)):
            if end > begin:
                cuts.append((first + begin, first + end, source, item.state))
                source = item.state
            if slot != item.state:
                cuts.append((first + end, first + end, source, slot))
            begin = end
        first += len(item.tokens)
    return cuts


@dataclass(frozen=True, eq=False, slots=True)
class ComputedStep:
    """A step whose layers were computed, and which then failed: its work, and its rows.

    A step writes states where they are, so it cannot be computed again. What it left in the rows
    can be answered from again, though, which is all that a repeated step needs.
    """

    work: tuple[Work, ...]
    batch: Batch

    def part(self, work: tuple[Work, ...]) -> Batch | None:
        """Return the rows of some of its items, in their order; None if one is another."""
        ends = [0, *accumulate(len(item.tokens) for item in self.work)]
        rows = self.batch.row_of_token
        row_of_token: list[int] = []
        for item in work:
            if item not in self.work:
                return None
            place = self.work.index(item)
            row_of_token += rows[ends[place] : ends[place + 1]]
        of_items = list(accumulate(len(item.tokens) for item in work))
        return replace(self.batch, row_of_token=row_of_token, ends=of_items)
