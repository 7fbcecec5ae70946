"""The memory ledger: what a model takes on each device, line by line, and what fits beside it.

Every line says how it came about: *measured*, *from the file*, *computed* or *assumed*. Questions
the other way round (how much context, how many sequences) are answered over the same sum
(``placement``). It reads no file; it knows neither terminal nor HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ridgeline.model.cost.format_bytes import Storage
from ridgeline.model.cost.kv_capacity import KEPT_PART
from ridgeline.model.cost.shapes import GROUPS, LayerCache, Matrix, ModelShape, check_ranks

_GIB = 1 << 30
_P = ParamSpec("_P")
_R = TypeVar("_R")
MEASURED, FROM_FILE, COMPUTED, ASSUMED = "measured", "from the file", "computed", "assumed"


def _cache_by_shape(
    function: Callable[Concatenate[ModelShape, _P], _R],
) -> Callable[Concatenate[ModelShape, _P], _R]:
    """Keep what a function of a shape returns for as long as the shape lives, and no longer."""
    results: WeakKeyDictionary[ModelShape, dict[Any, _R]] = WeakKeyDictionary()

    @wraps(function)
    def lookup(shape: ModelShape, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        of_shape = results.setdefault(shape, {})
        if args not in of_shape:
            of_shape[args] = function(shape, *args, **kwargs)
        return of_shape[args]

    return lookup


class Line(NamedTuple):
    """One line: what it is, its bytes on one device, and how they are known."""

    name: str
    num_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class EngineOverheads:
    """How an engine divides a device's memory.

    Attributes:
        name: as people type it.
        of_free: its fraction is of what weights leave ("of free"), not of the whole ("of total").
        gpu_memory_utilization: the fraction that it takes unless it is told another.
        frees_windows: blocks that a sliding window has left behind are given back. Where a layer
            keeps a state, Ridgeline keeps them all the same (``place``).
        block_size: tokens in a block of the cache.
        max_num_batched_tokens: tokens of the largest step.
        max_num_seqs: rows of logits that a step may have.
        context_bytes: of driver and runtime on a device.
        context_name: what this holds.
        graphs_bytes: of captured graphs.
        in_margin: driver, graphs and what the allocator cannot use lie in what its fraction leaves
            free, and not in the fraction itself.
        looks_ahead: sequences get room for one token more than they need.
        bytes_per_logit: logits in the model's type and in f32, probabilities, and a sorted copy.
    """

    name: str
    of_free: bool = False
    gpu_memory_utilization: float = 0.9
    frees_windows: bool = True
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    context_bytes: int = _GIB // 2
    context_name: str = "driver and runtime"
    graphs_bytes: int = 3 * _GIB // 10
    in_margin: bool = False
    looks_ahead: bool = False
    bytes_per_logit: int = 22


_BUFFERS_BYTES = _GIB // 5  # of libraries, inside the fraction where the driver is not
_COLLECTIVES_BYTES = 35 * _GIB // 100  # of a rank that talks to others
_STATES = "state of sequences"  # the name of a line
_ALLOCATOR_SHARE = 0.03  # of weights and activations: what an allocator cannot use
ENGINES: Mapping[str, EngineOverheads] = {
    "ridgeline": EngineOverheads(  # on processors: see ``own_engine`` for GPUs
        "ridgeline", gpu_memory_utilization=1 - 1 / KEPT_PART, context_bytes=_GIB // 8,
        graphs_bytes=0, bytes_per_logit=5,
    ),
    "vllm": EngineOverheads("vllm", in_margin=True),
    "sglang": EngineOverheads(
        "sglang", gpu_memory_utilization=0.88, block_size=1, max_num_batched_tokens=8192
    ),
    "trtllm": EngineOverheads(
        "trtllm", of_free=True, block_size=32, max_num_batched_tokens=8192, max_num_seqs=2048
    ),
    "llamacpp": EngineOverheads(
        "llamacpp", gpu_memory_utilization=1.0, block_size=256, max_num_batched_tokens=512,
        max_num_seqs=4, graphs_bytes=0, bytes_per_logit=4,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known of a model beyond its shape, from its file or from the engine itself.

    Attributes:
        weights: bytes by group of ``shapes.GROUPS``, or by other names; None computes them.
        weights_how: how these are known.
        num_ranks: of which one takes these weights, this cache and this step.
        kv_bytes_per_token: of a block, from the backend; None computes those of all layers.
        state_bytes_per_seq: the same of recurrent layers, which counts where that does.
        step_bytes: working memory of the largest step, from the backend; None computes them.
        windows: tokens that each group of layers sees, where ``kv_bytes_per_token`` is known.
        adapters: the line of adapters, which every rank of a stage keeps whole.
    """

    weights: Mapping[str, int] | None = None
    weights_how: str = COMPUTED
    num_ranks: int = 1
    kv_bytes_per_token: int | None = None
    state_bytes_per_seq: int = 0
    step_bytes: int | None = None
    windows: tuple[int | None, ...] = (None,)
    adapters: Line | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What is asked: a load, how the model is divided, and what overrules lines.

    Attributes:
        context: tokens of each sequence.
        concurrency: sequences.
        tp: ranks that divide each layer.
        pp: stages that divide the layers.
        kv_value_bytes: of a cached value.
        engine: how memory is divided, with the settings that the flags give it.
        weights_bytes: overrules all lines of weights, on each device; so the next three do theirs.
        activation_bytes: of activations.
        overhead_bytes: of driver, graphs, collectives and allocator.
        kv_cache_bytes: what the cache gets, instead of what is left.
    """

    context: int
    concurrency: int
    tp: int = 1
    pp: int = 1
    kv_value_bytes: float
    engine: EngineOverheads
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    overhead_bytes: int | None = None
    kv_cache_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The lines of one device: of the fullest stage, where stages differ.

    Attributes:
        lines: they sum to ``total_bytes``.
        capacity_bytes: what the device has.
        budget_bytes: what the engine lets itself use of it.
        weights_bytes: of the lines of weights, adapters among them.
        kv_bytes: of the cache's lines.
        activation_bytes: of the largest step.
        overhead_bytes: of driver, graphs, collectives and allocator.
        kv_need_bytes: cache that the asked load takes; differs from ``kv_bytes`` only where the
            user fixed that.
        kv_budget_bytes: what is left for the cache.
        sequence_kv_bytes: cache of one sequence of the asked context.
        further_token_bytes: cache that a token more would take, blocks aside.
        stage: which stage it is, from 0.
    """

    lines: tuple[Line, ...]
    capacity_bytes: int
    budget_bytes: int
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    overhead_bytes: int
    kv_need_bytes: int
    kv_budget_bytes: int
    sequence_kv_bytes: int
    further_token_bytes: float
    stage: int = 0

    @property
    def total_bytes(self) -> int:
        """All lines, the margin too."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def needed_bytes(self) -> int:
        """All lines but the last: the margin stays free, and grows with the device."""
        return self.total_bytes - self.lines[-1].num_bytes

    @property
    def spare_bytes(self) -> int:
        """What stays free beyond the margin; negative where it does not fit."""
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether all of it is there, and the cache gets what the load needs."""
        return self.spare_bytes >= 0 and self.kv_need_bytes <= max(0, self.kv_budget_bytes)

    @property
    def max_concurrency_exact(self) -> float:
        """How many sequences of the asked context the cache could hold, not rounded."""
        if not self.sequence_kv_bytes:
            return 0.0
        return max(0.0, self.kv_budget_bytes / self.sequence_kv_bytes)


def check_division(shape: ModelShape, tp: int, pp: int) -> None:
    """Raise ValueError unless the model can be divided among the ranks and stages."""
    check_ranks(shape, tp)
    if pp > len(shape.layers):
        raise ValueError(f"--pipeline-parallel-size {pp}, but there are {len(shape.layers)} layers")


def make_ledger(
    shape: ModelShape, storage: Storage, sizes: Sizes, capacity_bytes: int, memory: EngineMemory
) -> Ledger:
    """Return the ledger of the fullest stage.

    Raises ValueError if the model cannot be divided so.
    """
    check_division(shape, memory.tp, memory.pp)
    stages = [
        _stage(shape, storage, sizes, capacity_bytes, memory, number, part)
        for number, part in enumerate(split_layers(len(shape.layers), memory.pp))
    ]
    return min(stages, key=lambda ledger: ledger.kv_budget_bytes - ledger.kv_need_bytes)


@lru_cache(maxsize=256)
def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return which layers each stage has, as evenly as they go; stages in the middle get more.

    The first stage has the embedding as well, and the last one the head.
    """
    sizes = [num_layers // num_stages] * num_stages
    inner = sorted(range(num_stages), key=lambda i: -min(i, num_stages - 1 - i))
    for i in inner[: num_layers % num_stages]:
        sizes[i] += 1
    ends = [sum(sizes[: i + 1]) for i in range(num_stages)]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def _stage(
    shape: ModelShape, storage: Storage, sizes: Sizes, capacity: int, memory: EngineMemory,
    number: int, part: range,
) -> Ledger:  # fmt: skip
    caches = _caches(shape, part)
    lines = _weights(shape, storage, sizes, memory, number)
    if sizes.adapters is not None:
        size = sizes.adapters.num_bytes * len(part) / len(shape.layers)
        lines.append(sizes.adapters._replace(num_bytes=round(size)))
    weights = sum(line.num_bytes for line in lines)
    activations = _activations(shape, storage, sizes, memory, part, is_last=number == memory.pp - 1)
    overhead, in_margin_bytes = _overhead(memory, weights + activations.num_bytes)
    overhead_bytes = sum(line.num_bytes for line in overhead)
    fixed_bytes = weights + activations.num_bytes + overhead_bytes - in_margin_bytes

    engine, share = memory.engine, memory.engine.gpu_memory_utilization
    if engine.of_free:
        free = max(0, capacity - fixed_bytes)
        budget = min(capacity, fixed_bytes + int(free * share))  # weights alone may be too much
        name = f"margin ({1 - share:.0%} of what is free)"
    else:
        budget = max(0, min(int(capacity * share), capacity - in_margin_bytes))
        rest = "rest of the " if engine.in_margin else ""
        name = f"margin ({rest}{1 - share:.0%} of the device)"
    kv = _kv_lines(sizes, memory, caches, memory.concurrency)
    need = sum(line.num_bytes for line in kv)
    kv_budget = budget - fixed_bytes
    if memory.kv_cache_bytes is not None:
        kv, kv_budget = [Line("KV cache", memory.kv_cache_bytes, ASSUMED)], memory.kv_cache_bytes
    sequence = sum(line.num_bytes for line in _kv_lines(sizes, memory, caches, 1))
    margin_bytes = max(0, capacity - budget - in_margin_bytes)
    return Ledger(
        lines=(*lines, *kv, activations, *overhead, Line(name, margin_bytes, COMPUTED)),
        capacity_bytes=capacity,
        budget_bytes=budget,
        weights_bytes=weights,
        kv_bytes=sum(line.num_bytes for line in kv),
        activation_bytes=activations.num_bytes,
        overhead_bytes=overhead_bytes,
        kv_need_bytes=need,
        kv_budget_bytes=kv_budget,
        sequence_kv_bytes=sequence,
        further_token_bytes=_further_token(sizes, memory, caches),
        stage=number,
    )


# --- weights -----------------------------------------------------------------------------------


def weights_by_group(
    storage: Storage, matrices: list[tuple[str, Matrix]], num_ranks: int = 1
) -> dict[str, int]:
    """Return the bytes on one rank, by group; scales are a group of their own."""
    bytes_by_group = dict.fromkeys((*GROUPS, "scales"), 0.0)
    for name, matrix in matrices:
        encoding, ways = storage.of(name, matrix), min(num_ranks, matrix.ways)
        bytes_by_group[matrix.group] += encoding.values_bytes(matrix) / ways
        bytes_by_group["scales"] += encoding.scales_bytes(matrix) / ways
    return {group: round(size) for group, size in bytes_by_group.items() if size}


def _weights(
    shape: ModelShape, storage: Storage, sizes: Sizes, memory: EngineMemory, number: int
) -> list[Line]:
    if memory.weights_bytes is not None:
        return [Line("weights", memory.weights_bytes, ASSUMED)]
    if sizes.weights is not None and (memory.tp, memory.pp) == (sizes.num_ranks, 1):
        return [Line(f"weights, {n}", size, sizes.weights_how) for n, size in sizes.weights.items()]
    computed = _stage_weights(shape, storage, memory.tp, memory.pp, number)
    if sizes.weights is None:
        return [Line(f"weights, {name}", size, COMPUTED) for name, size in computed.items()]
    share = sum(computed.values()) / sum(_stage_weights(shape, storage, 1, 1, 0).values())
    size = round(sum(sizes.weights.values()) * share)
    return [Line(f"weights, {share:.1%} of them", size, sizes.weights_how)]


@_cache_by_shape  # a plan asks hundreds of times, for the same few divisions
def _stage_weights(
    shape: ModelShape, storage: Storage, tp: int, pp: int, number: int
) -> Mapping[str, int]:
    """Return the bytes of one stage's weights on one rank, by group."""
    is_first, is_last = number == 0, number == pp - 1
    matrices = [
        (f"model.layers.{i}.{matrix.name}", matrix)
        for i in split_layers(len(shape.layers), pp)[number]
        for matrix in shape.layers[i].matrices
    ]
    if is_first:
        matrices += [(f"model.{matrix.name}", matrix) for matrix in shape.embedding]
    if is_last:
        matrices += [(matrix.name, matrix) for matrix in shape.end]
        if shape.is_tied and not is_first:  # a stage of its own needs a copy
            matrices += [(f"model.{matrix.name}", matrix) for matrix in shape.embedding]
    return weights_by_group(storage, matrices, tp)


# --- cache -------------------------------------------------------------------------------------


def held_tokens(window: int | None, memory: EngineMemory) -> int:
    """Return the tokens of one sequence that a layer with this window holds, in whole blocks."""
    size = memory.engine.block_size
    blocks = -(-memory.context // size)
    if window is not None and memory.engine.frees_windows:
        blocks = min(blocks, -(-(window - 1) // size) + 1)
    return blocks * size


def _layer_kv_bytes(cache: LayerCache, memory: EngineMemory) -> float:
    """Return what a layer keeps of the tokens of one sequence on one rank."""
    values = held_tokens(cache.window, memory) * cache.values_per_token(memory.tp)
    return values * memory.kv_value_bytes


def _layer_state_bytes(cache: LayerCache, memory: EngineMemory) -> float:
    """Return what a layer keeps of one sequence beside its tokens: in f32, divided as heads are."""
    return 4 * cache.state_values / min(memory.tp, cache.num_heads)


def layer_bytes(cache: LayerCache, memory: EngineMemory) -> float:
    """Return all that a layer keeps of one sequence on one rank."""
    kept = 0.0 if cache.kind == "state" else _layer_kv_bytes(cache, memory)
    return kept + _layer_state_bytes(cache, memory)


@_cache_by_shape  # bisections ask thousands of times, and most layers are alike
def _caches(shape: ModelShape, part: range) -> tuple[tuple[LayerCache, int], ...]:
    """Return the different caches of these layers, and how many layers have each."""
    return tuple(Counter(shape.layers[i].cache for i in part).items())


def _kv_lines(
    sizes: Sizes, memory: EngineMemory, caches: tuple[tuple[LayerCache, int], ...], num_seqs: int
) -> list[Line]:
    if sizes.kv_bytes_per_token is not None:
        num_tokens = sum(held_tokens(window, memory) for window in sizes.windows)
        size = num_tokens * sizes.kv_bytes_per_token * num_seqs
        state = sizes.state_bytes_per_seq * num_seqs
        lines = [Line("KV cache", size, COMPUTED)]
        return [*lines, Line(_STATES, state, COMPUTED)] if state else lines
    bytes_by_name: dict[str, float] = {}
    for cache, count in caches:  # some have a state beside their attention
        layer_sizes: dict[str, float] = {}
        if cache.kind != "state":
            layer_sizes[f"KV cache, {cache.kind}"] = _layer_kv_bytes(cache, memory)
        if cache.state_values or cache.kind == "state":
            layer_sizes[_STATES] = _layer_state_bytes(cache, memory)
        for name, of_layer in layer_sizes.items():
            bytes_by_name[name] = bytes_by_name.get(name, 0.0) + count * of_layer
    return [
        Line(name, round(of_seq * num_seqs), ASSUMED if name == _STATES else COMPUTED)
        for name, of_seq in bytes_by_name.items()
        if of_seq or len(bytes_by_name) == 1
    ]


def _further_token(
    sizes: Sizes, memory: EngineMemory, caches: tuple[tuple[LayerCache, int], ...]
) -> float:
    """Return the bytes that one token more takes; layers whose window is full take none."""
    frees = memory.engine.frees_windows
    if sizes.kv_bytes_per_token is not None:
        full = [frees and window and window <= memory.context for window in sizes.windows]
        return sizes.kv_bytes_per_token * (len(full) - sum(map(bool, full)))
    return sum(
        count * cache.values_per_token(memory.tp) * memory.kv_value_bytes
        for cache, count in caches
        if not (frees and cache.window and cache.window <= memory.context)
    )


# --- activations and framework -----------------------------------------------------------------


def _activations(
    shape: ModelShape, storage: Storage, sizes: Sizes, memory: EngineMemory, part: range,
    *, is_last: bool,
) -> Line:  # fmt: skip
    """Return the working memory of the largest step: the most that is alive at once.

    The residual stream is whole on each rank, everything else is divided. Behind the layers the
    logits of the rows that need them take its place.
    """
    engine, max_num_batched_tokens = memory.engine, memory.engine.max_num_batched_tokens
    name = f"activations ({max_num_batched_tokens:,} tokens)"
    if memory.activation_bytes is not None:
        return Line("activations", memory.activation_bytes, ASSUMED)
    if sizes.step_bytes is not None:
        return Line(name, sizes.step_bytes, COMPUTED)
    value = max(2.0, storage.plain.bits / 8)
    residual = 2 * max_num_batched_tokens * shape.hidden_size * value
    divided = max_num_batched_tokens * _widest(shape, part) * value
    if is_last:
        logits = min(max_num_batched_tokens, max(engine.max_num_seqs, memory.concurrency))
        divided = max(divided, logits * shape.vocab_size * engine.bytes_per_logit)
    return Line(name, round(residual + divided / memory.tp), COMPUTED)


@_cache_by_shape
def _widest(shape: ModelShape, part: range) -> int:
    """Return the most values of a token that one of these layers computes at once."""
    layers = (shape.layers[i] for i in part)
    return max(max(layer.attention_values, layer.mlp_values) for layer in layers)


def _overhead(memory: EngineMemory, used_bytes: int) -> tuple[list[Line], int]:
    """Return what is neither weights nor cache, and how much of it lies in the margin."""
    if memory.overhead_bytes is not None:
        return [Line("driver, graphs and the like", memory.overhead_bytes, ASSUMED)], 0
    engine = memory.engine
    lines = [Line(engine.context_name, engine.context_bytes, ASSUMED)]
    if engine.graphs_bytes:
        lines.append(Line("captured graphs", engine.graphs_bytes, ASSUMED))
        lines.append(Line("allocator (3 %)", round(_ALLOCATOR_SHARE * used_bytes), ASSUMED))
    in_margin = sum(line.num_bytes for line in lines) if engine.in_margin else 0
    if engine.in_margin:
        lines.append(Line("buffers of libraries", _BUFFERS_BYTES, ASSUMED))
    if memory.tp * memory.pp > 1:
        lines.append(Line("collectives", _COLLECTIVES_BYTES, ASSUMED))
    return lines, in_margin
