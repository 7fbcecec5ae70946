"""Fitting the KV cache into the memory that is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.model.cost.kv_capacity import KVPlan, fit_kv_cache
from ridgeline.system.report import gib

MIB = 1024**2
GIB = 1024**3


def fit(
    available: int = 1000 * MIB,
    weights: int = 300 * MIB,
    step: int = 50 * MIB,
    wanted: int | None = None,
    model_len: int = 160,
    num_seqs: int = 4,
    most_blocks: int = 1 << 40,
) -> KVPlan:
    """Blocks of 16 tokens and 1 MiB; with the defaults 600 of them fit beside the weights."""
    return fit_kv_cache(
        available, weights, step, MIB, 16, wanted, model_len,
        lambda num_tokens: min(most_blocks, -(-num_tokens // 16)), num_seqs,
        kept_bytes=available // 20,
    )  # fmt: skip


def test_a_window_lets_more_and_longer_sequences_fit() -> None:
    assert fit(model_len=16_000, most_blocks=50) == KVPlan(200, 16_000)
    assert fit(model_len=16_000, most_blocks=50, wanted=50 * MIB) == KVPlan(50, 16_000)
    short = fit(model_len=16_000, most_blocks=50, wanted=49 * MIB)
    assert (short.num_blocks, short.max_model_len) == (49, 784)


def test_without_a_wish_the_cache_holds_all_sequences_and_no_more() -> None:
    assert fit() == KVPlan(num_blocks=40, max_model_len=160)


def test_without_a_wish_the_cache_takes_at_most_half() -> None:
    assert fit(num_seqs=1000) == KVPlan(300, 160)


def test_one_full_sequence_may_take_more_than_half() -> None:
    assert fit(model_len=500 * 16, num_seqs=8) == KVPlan(500, 8000)


def test_what_is_kept_beside_a_block_takes_its_part_of_the_room() -> None:
    sizes = (1000 * MIB, 300 * MIB, 50 * MIB, MIB, 16, None, 16_000, lambda n: -(-n // 16), 4)
    assert fit_kv_cache(*sizes).num_blocks == 650
    assert fit_kv_cache(*sizes, kept_bytes=50 * MIB).num_blocks == 600
    assert (
        fit_kv_cache(*sizes, other_bytes_per_block=MIB // 2, kept_bytes=50 * MIB).num_blocks == 400
    )


def test_a_last_partial_block_is_counted() -> None:
    assert fit(model_len=161, num_seqs=1) == KVPlan(11, 161)


def test_a_sequence_that_does_not_fit_is_shortened() -> None:
    plan = fit(model_len=16_000)
    assert (plan.num_blocks, plan.max_model_len) == (600, 9600)
    (note,) = plan.notes
    for part in (
        "600.0 MiB",
        "9,600 tokens",
        "not 16,000",
        "1,000.0 MiB available",
        "--max-model-len",
    ):
        assert part in note
    assert "\n" not in note


def test_a_wish_that_fits_is_met_to_the_block() -> None:
    assert fit(wanted=100 * MIB + 5) == KVPlan(100, 160)
    assert fit(wanted=600 * MIB) == KVPlan(600, 160)


def test_a_wish_that_does_not_fit_is_shrunk() -> None:
    plan = fit(wanted=5 * GIB)
    assert (plan.num_blocks, plan.max_model_len) == (600, 160)
    (note,) = plan.notes
    assert "600.0 MiB (9,600 tokens), not 5.00 GiB: of 1,000.0 MiB" in note
    assert note.endswith("change --kv-cache-memory")


def test_a_small_wish_shortens_sequences_and_says_what_to_raise() -> None:
    plan = fit(wanted=3 * MIB)
    assert (plan.num_blocks, plan.max_model_len) == (3, 48)
    (note,) = plan.notes
    assert "at most 48 tokens, not 160: more would not fit in --kv-cache-memory; raise it" in note


def test_the_smallest_start_is_two_blocks() -> None:
    needed = (300 + 50 + 2) * MIB * 20 // 19 + 1
    assert fit(available=needed).num_blocks == 2
    with pytest.raises(ValueError, match=r"not enough memory: 369\.\d MiB.*300\.0 MiB.*32 tokens"):
        fit(available=needed - MIB)
    assert fit(available=needed - MIB, model_len=10) == KVPlan(1, 10)


def test_a_wish_below_two_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-memory 1\.50 MiB is too little.*2\.00 MiB"):
        fit(wanted=MIB * 3 // 2)


def test_a_size_of_less_than_a_tenth_of_a_mib_is_a_number_too() -> None:
    assert [gib(size) for size in (0, 512, 40 << 10, MIB // 2, GIB)] == [
        "0 B", "512 B", "40.0 KiB", "512.0 KiB", "1.00 GiB",
    ]  # fmt: skip


@given(
    available=st.integers(0, 2 * GIB),
    weights=st.integers(0, GIB),
    wanted=st.none() | st.integers(2 * MIB, 3 * GIB),
    model_len=st.integers(1, 50_000),
    num_seqs=st.integers(1, 500),
)
def test_a_plan_always_fits_and_holds_one_sequence(
    available: int, weights: int, wanted: int | None, model_len: int, num_seqs: int
) -> None:
    try:
        plan = fit(available, weights, 50 * MIB, wanted, model_len, num_seqs)
    except ValueError:
        assert available * 0.95 - weights - 50 * MIB < 2 * MIB
        return
    assert weights + 50 * MIB + plan.num_blocks * MIB <= available
    assert wanted is None or plan.num_blocks * MIB <= wanted
    assert 0 < plan.max_model_len <= min(model_len, plan.num_blocks * 16)
    is_wish_met = wanted is None or plan.num_blocks == wanted // MIB
    assert (plan.notes == ()) == (plan.max_model_len == model_len and is_wish_met)
