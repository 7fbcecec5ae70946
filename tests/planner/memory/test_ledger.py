"""The ledger's invariants, over shapes, devices and settings at random."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ridgeline.model.cost.format_bytes import (
    Storage,
    storage_of_config,
    storage_of_dtype,
)
from ridgeline.model.cost.shapes import ModelShape
from ridgeline.model.files.counting import shape_of_config
from ridgeline.planner import plan
from ridgeline.planner.memory.ledger import (
    ENGINES,
    EngineMemory,
    Ledger,
    Sizes,
    check_division,
    held_tokens,
    make_ledger,
    split_layers,
)
from ridgeline.planner.memory.placement import max_concurrency, max_context
from tests.model.cost.matrix_bytes import stored_bytes
from tests.model.cost.published_configs import PUBLISHED

NAMES = sorted(PUBLISHED)
FEW = settings(max_examples=60, deadline=None)


@cache
def model(name: str) -> tuple[ModelShape, Storage]:
    config = PUBLISHED[name]["config"]
    return shape_of_config(config), storage_of_config(config)


def memory_of(**changes: object) -> EngineMemory:
    values: dict[str, object] = {
        "context": 4096,
        "concurrency": 1,
        "kv_value_bytes": 2,
        "engine": ENGINES["vllm"],
    }
    return EngineMemory(**(values | changes))  # type: ignore[arg-type]


def ledger_of(name: str, capacity: int, asked: EngineMemory) -> Ledger:
    return make_ledger(*model(name), Sizes(), capacity, asked)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, EngineMemory]:
    name = draw(st.sampled_from(NAMES))
    capacity = draw(st.integers(1 << 30, 2 << 40))
    engine = replace(
        ENGINES[draw(st.sampled_from(sorted(ENGINES)))],
        block_size=draw(st.sampled_from([1, 16, 32])),
        max_num_batched_tokens=draw(st.integers(1, 16384)),
        gpu_memory_utilization=draw(st.sampled_from([0.5, 0.9, 0.95, 1.0])),
    )
    asked = memory_of(
        context=draw(st.integers(1, 1 << 20)),
        concurrency=draw(st.integers(1, 2000)),
        tp=2 ** draw(st.integers(0, 4)),
        pp=draw(st.integers(1, 6)),
        kv_value_bytes=draw(st.sampled_from([1, 2, 4])),
        engine=engine,
    )
    try:
        check_division(model(name)[0], asked.tp, asked.pp)
    except ValueError:
        assume(False)
    return name, capacity, asked


@FEW
@given(cases())
def test_lines_sum_to_the_total_and_to_what_they_are_part_of(
    case: tuple[str, int, EngineMemory],
) -> None:
    ledger = ledger_of(*case)
    assert ledger.total_bytes == sum(line.num_bytes for line in ledger.lines)
    used = ledger.weights_bytes + ledger.kv_bytes + ledger.activation_bytes + ledger.overhead_bytes
    margin = ledger.lines[-1].num_bytes
    assert used + margin == ledger.total_bytes
    in_margin = sum(
        line.num_bytes
        for line in ledger.lines
        if case[2].engine.in_margin
        and line.name.startswith(("driver and runtime", "captured", "allocator"))
    )
    assert margin == max(0, ledger.capacity_bytes - ledger.budget_bytes - in_margin)
    assert all(line.num_bytes >= 0 for line in ledger.lines)
    assert {line.how for line in ledger.lines} <= {"computed", "assumed"}
    assert ledger.fits == (ledger.total_bytes <= ledger.capacity_bytes)


@FEW
@given(cases(), st.integers(1, 10**5), st.integers(1, 100))
def test_the_total_grows_with_context_sequences_and_width(
    case: tuple[str, int, EngineMemory], more_tokens: int, more_sequences: int
) -> None:
    name, capacity, asked = case
    ledger = ledger_of(*case)
    batched = asked.engine.max_num_batched_tokens + more_tokens
    for changes in (
        {"context": asked.context + more_tokens},
        {"concurrency": asked.concurrency + more_sequences},
        {"kv_value_bytes": asked.kv_value_bytes * 2},
        {"engine": replace(asked.engine, max_num_batched_tokens=batched)},
    ):
        larger = ledger_of(name, capacity, replace(asked, **changes))  # type: ignore[arg-type]
        assert larger.kv_need_bytes >= ledger.kv_need_bytes
        assert larger.total_bytes >= ledger.total_bytes
        assert not (larger.fits and not ledger.fits)
    shape, _ = model(name)
    sizes = [
        stored_bytes(storage_of_dtype(width, shape), shape.matrices())
        for width in ("int4", "int8", "bf16", "f32")
    ]
    assert sizes == sorted(sizes)


@FEW
@given(cases())
def test_the_longest_context_fits_and_one_block_more_does_not(
    case: tuple[str, int, EngineMemory],
) -> None:
    name, capacity, asked = case

    def with_context(tokens: int) -> Ledger:
        return ledger_of(name, capacity, replace(asked, context=tokens))

    longest = max_context(lambda other: ledger_of(name, capacity, other), asked)
    grows = with_context(2 << 40).kv_need_bytes > with_context(1 << 40).kv_need_bytes
    if longest is None:
        assert not grows
        assert with_context(1 << 40).fits
        return
    assert longest % asked.engine.block_size == 0
    assert not with_context(longest + asked.engine.block_size).fits
    if longest:
        assert with_context(longest).fits


@FEW
@given(cases())
def test_the_most_sequences_fit_and_one_more_does_not(case: tuple[str, int, EngineMemory]) -> None:
    name, capacity, asked = case
    most = max_concurrency(lambda other: ledger_of(name, capacity, other), asked)
    if most:
        assert ledger_of(name, capacity, replace(asked, concurrency=most)).fits
    assert not ledger_of(name, capacity, replace(asked, concurrency=most + 1)).fits


@FEW
@given(cases())
def test_dividing_never_makes_a_device_fuller_but_for_what_talking_takes(
    case: tuple[str, int, EngineMemory],
) -> None:
    name, capacity, asked = case
    alone = ledger_of(name, capacity, replace(asked, tp=1, pp=1))
    divided = ledger_of(name, capacity, asked)
    assert divided.kv_bytes <= alone.kv_bytes
    assert divided.activation_bytes <= alone.activation_bytes
    # Of a tied embedding the last stage needs a copy.
    assert divided.weights_bytes <= alone.weights_bytes + len(divided.lines)
    assert ("collectives" in {line.name for line in divided.lines}) == (asked.tp * asked.pp > 1)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_and_one_stage_are_the_whole_model(name: str) -> None:
    ledger = ledger_of(name, 1 << 42, memory_of(tp=1, pp=1))
    shape, storage = model(name)
    assert ledger.weights_bytes == pytest.approx(stored_bytes(storage, shape.matrices()), abs=8)
    assert ledger.stage == 0
    assert ledger.further_token_bytes <= PUBLISHED[name]["kv_bytes_per_token"]


def test_ranks_beyond_the_heads_keep_copies_and_a_latent_cache_is_whole_on_each() -> None:
    def kv(name: str, tp: int) -> int:
        return ledger_of(name, 1 << 42, memory_of(tp=tp)).kv_bytes

    whole = kv("qwen3-235b-a22b", 1)  # 4 key and value heads
    assert [whole / kv("qwen3-235b-a22b", tp) for tp in (2, 4, 8, 16)] == [2, 4, 4, 4]
    assert kv("deepseek-v3", 1) == kv("deepseek-v3", 8)


def weights_of(name: str, **changes: object) -> dict[str, int]:
    lines = ledger_of(name, 1 << 42, memory_of(**changes)).lines
    return {n.removeprefix("weights, "): size for n, size, _ in lines if n.startswith("weights")}


def test_ranks_divide_matrices_and_copy_norms_routers_and_heads_that_are_too_few() -> None:
    whole, half = weights_of("llama-3.1-8b"), weights_of("llama-3.1-8b", tp=2)
    assert half.pop("norms") == whole.pop("norms") == 2 * 65 * 4096
    assert half == {name: size // 2 for name, size in whole.items()}
    # Of 64 heads each of 8 ranks has 8, and one of the 4 heads of keys and values.
    per_layer = 2 * 8 * 128 * 4096 + 2 * 128 * 4096
    assert weights_of("qwen3-235b-a22b", tp=8)["attention"] == 2 * 94 * per_layer
    experts = 128 * 3 * 4096 * 1536 // 8 + 128 * 4096  # and the router, on each rank
    assert weights_of("qwen3-235b-a22b", tp=8)["experts"] == 2 * 94 * experts
    # What makes the latents is on each rank; what reads them is divided by heads. One byte each.
    latents = 7168 * (1536 + 512 + 64)
    readers = 128 * (1536 * 192 + 512 * 256 + 128 * 7168) // 16
    assert weights_of("deepseek-v3", tp=16)["attention"] == 61 * (latents + readers)


def test_a_tied_embedding_is_on_the_last_stage_too() -> None:
    last = ledger_of("gemma-2-9b", 1 << 42, memory_of(pp=2))
    assert last.stage == 1
    assert weights_of("gemma-2-9b", pp=2)["embedding"] == 4 * 256000 * 3584
    assert "head" not in weights_of("gemma-2-9b", pp=2)


def test_activations_are_divided_but_for_the_residual_stream() -> None:
    def activations(tp: int) -> int:
        return ledger_of("llama-3.1-8b", 1 << 40, memory_of(tp=tp)).activation_bytes

    residual = 2 * 2048 * 4096 * 2
    logits = 256 * 128256 * 22  # more than a layer's 3 x 14,336 values for 2,048 rows
    assert logits > 2048 * 3 * 14336 * 2
    assert activations(1) == residual + logits
    assert activations(4) == residual + logits // 4


def test_a_state_is_divided_and_does_not_grow() -> None:
    def state(**changes: object) -> int:
        lines = ledger_of("jamba-v0.1", 1 << 42, memory_of(**changes)).lines
        return sum(size for name, size, _ in lines if name == "state of sequences")

    one = 28 * 8192 * (16 + 3) * 4  # 28 of 32 layers, in f32
    assert state() == state(context=100_000) == one
    assert state(concurrency=5) == 5 * one
    assert state(tp=4) == one // 4


def test_a_state_beside_attention_has_a_line_of_its_own() -> None:
    """Falcon-H1: each of 36 layers has 24 heads of 64 x 128, and a convolution of 1,792 inputs."""
    lines = {line.name: line for line in ledger_of("falcon-h1-0.5b", 1 << 42, memory_of()).lines}
    state = lines["state of sequences"]
    assert state.num_bytes == 36 * 4 * (24 * 64 * 128 + 3 * (24 * 64 + 2 * 128))
    assert state.how == "assumed"
    attention = lines["KV cache, full attention"]
    assert attention.num_bytes == 4096 * PUBLISHED["falcon-h1-0.5b"]["kv_bytes_per_token"]
    assert attention.how == "computed"
    assert model("falcon-h1-0.5b")[0].kinds == ("gqa", "state")


def test_the_fullest_stage_decides() -> None:
    """The last stage has as many layers as the first, and the head instead of the embedding."""
    sparse = ledger_of("deepseek-v3", 1 << 40, memory_of(pp=2))  # its dense layers stand first
    assert sparse.stage == 1
    alone = ledger_of("deepseek-v3", 1 << 40, memory_of())
    assert sparse.weights_bytes > alone.weights_bytes / 2
    # of 11, 11 and 10 layers
    thirds = ledger_of("llama-3.1-8b", 1 << 42, memory_of(pp=3, concurrency=64))
    assert thirds.stage == 0
    assert thirds.kv_bytes == 64 * 4096 * 131072 * 11 // 32
    halves = ledger_of("llama-3.1-8b", 1 << 40, memory_of(pp=2))
    assert "weights, head" in {line.name for line in halves.lines}
    whole = ledger_of("llama-3.1-8b", 1 << 40, memory_of())
    assert whole.weights_bytes / 2 <= halves.weights_bytes < whole.weights_bytes * 0.6


@given(st.integers(1, 200), st.data())
def test_layers_are_split_evenly_and_in_order(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    parts = split_layers(num_layers, num_stages)
    assert [i for part in parts for i in part] == list(range(num_layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) == min(sizes[0], sizes[-1])


def test_stages_at_the_ends_have_fewer_layers() -> None:
    assert [len(part) for part in split_layers(10, 4)] == [2, 3, 3, 2]
    assert [len(part) for part in split_layers(61, 4)] == [15, 16, 15, 15]


def test_a_window_bounds_what_is_held_where_blocks_are_given_back() -> None:
    cache = model("gemma-3-1b")[0].layers[0].cache  # 512 tokens
    assert held_tokens(cache.window, memory_of(context=100)) == 112
    assert held_tokens(cache.window, memory_of(context=100_000)) == 528
    ours = ENGINES["ridgeline"]
    keeps = replace(ours, frees_windows=False)
    assert held_tokens(cache.window, memory_of(context=100_000, engine=ours)) == 528
    assert held_tokens(cache.window, memory_of(context=100_000, engine=keeps)) == 100_000
    freed = ledger_of("gemma-3-1b", 1 << 40, memory_of(context=32_768, engine=ours))
    kept = ledger_of("gemma-3-1b", 1 << 40, memory_of(context=32_768, engine=keeps))
    assert freed.kv_bytes < kept.kv_bytes / 5


def test_engines_read_the_same_fraction_differently() -> None:
    rest = {"weights_bytes": 10 << 30, "activation_bytes": 1 << 30, "overhead_bytes": 1 << 30}
    total = ledger_of("phi-4", 80 << 30, memory_of(**rest))
    free = ledger_of("phi-4", 80 << 30, memory_of(engine=ENGINES["trtllm"], **rest))
    assert total.kv_budget_bytes == int((80 << 30) * 0.9) - (12 << 30)
    assert free.kv_budget_bytes == int((68 << 30) * 0.9)


def test_what_is_too_much_is_the_same_under_either_rule_where_weights_alone_are() -> None:
    capacity = 22 << 30
    free = ledger_of("phi-4", capacity, memory_of(engine=ENGINES["trtllm"]))
    assert free.weights_bytes > capacity
    assert free.lines[-1].num_bytes == 0  # no margin of what is not there
    assert free.kv_budget_bytes == capacity - free.total_bytes + free.kv_bytes < 0
    assert -free.spare_bytes == free.total_bytes - capacity > free.weights_bytes - capacity


def test_sizes_overrule_lines_and_a_cache_of_its_own_size_is_what_there_is() -> None:
    asked = memory_of(kv_cache_bytes=4 << 30, concurrency=8, context=4096)
    ledger = ledger_of("phi-4", 80 << 30, asked)
    assert ledger.kv_bytes == ledger.kv_budget_bytes == 4 << 30
    assert not ledger.fits  # eight sequences of 4,096 tokens take 6.25 GiB
    assert ledger_of("phi-4", 80 << 30, replace(asked, concurrency=5)).fits


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (3, 1, "--tensor-parallel-size 3 does not divide 32 heads"),
        (1, 33, "--pipeline-parallel-size 33, but there are 32 layers"),
    ],
)
def test_what_cannot_be_divided_so_is_refused(tp: int, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger_of("llama-3.1-8b", 1 << 40, memory_of(tp=tp, pp=pp))
    with pytest.raises(ValueError, match="one must divide the other"):
        ledger_of("phi-4", 1 << 40, memory_of(tp=4))  # 40 heads, 10 of keys and values


def test_nothing_of_a_shape_is_kept_when_its_plan_is_gone() -> None:
    found = plan(PUBLISHED["llama-3.1-8b"]["config"], on="l4")
    assert found.placements
    shape = weakref.ref(found.spec.shape)
    del found
    gc.collect()
    assert shape() is None
