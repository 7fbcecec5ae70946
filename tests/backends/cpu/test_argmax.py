"""The likeliest token: ties, padding, parts, and logits that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from ridgeline.backends.cpu.kernels.argmax import ARGMAX_BYTES, BoundPruning, emit_head
from tests.backends.cpu import twins
from tests.backends.cpu.machine import Array, Machine, at, build

ENTRY = np.dtype([("value", "<f4"), ("non_finite", "<f4"), ("place", "<i8")])


@pytest.fixture(scope="module", params=["host", "arm"])
def machine(request: pytest.FixtureRequest) -> Machine:
    def emit(module: ir.Module) -> None:
        emit_head(module, 0.0)

    return build(emit, request.param)


@pytest.fixture(scope="module")
def here() -> Machine:
    return build(lambda module: emit_head(module, 0.0))


def argmax(
    machine: Machine, logits: Array, cuts: tuple[int, ...] = (), *, backwards: bool = False
) -> Array:
    """Fold the parts between cuts, each with something larger behind it."""
    entry = np.zeros((), ENTRY)
    entry["value"] = -np.inf
    assert entry.nbytes == ARGMAX_BYTES
    ends = (*cuts, len(logits))
    parts = list(zip((0, *cuts), ends, strict=True))
    for low, high in reversed(parts) if backwards else parts:
        part = np.full(high - low + 16, 99, np.float32)
        part[: high - low] = logits[low:high]
        machine.run("argmax", at(part), high - low, low, entry)
    return entry


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 100, 257])
def test_the_likeliest_at_any_size(machine: Machine, size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 1, size).astype(np.float32)
    entry = argmax(machine, logits)
    assert ~entry["place"] == logits.argmax()
    assert entry["value"] == logits.max()
    assert entry["non_finite"] == 0


@given(
    logits=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.5, 3.0]), min_size=30, max_size=120),
    cuts=st.lists(st.integers(1, 7), max_size=3, unique=True),
)
def test_of_equals_the_first(here: Machine, logits: list[float], cuts: list[int]) -> None:
    """Also across parts, which begin at multiples of 16 as tiles do, in whatever order."""
    values = np.float32(logits)
    places = tuple(sorted(16 * cut for cut in cuts if 16 * cut < len(logits)))
    for backwards in (False, True):
        entry = argmax(here, values, places, backwards=backwards)
        assert (~entry["place"], entry["value"]) == (values.argmax(), values.max())


def test_the_ends_of_the_range(machine: Machine) -> None:
    lowest = np.full(40, np.finfo(np.float32).min)
    assert ~argmax(machine, lowest)["place"] == 0
    lowest[39] = np.finfo(np.float32).max
    entry = argmax(machine, lowest, (32,))
    assert (~entry["place"], entry["non_finite"]) == (39, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_logit_flags_the_row(machine: Machine, bad: float) -> None:
    logits = np.zeros(70, np.float32)
    for place in (0, 15, 16, 69):
        flagged = logits.copy()
        flagged[place] = bad
        for backwards in (False, True):
            entry = argmax(machine, flagged, (32,), backwards=backwards)
            assert np.isnan(entry["non_finite"])
            assert entry["value"] == np.inf  # before what any other thread found
    assert argmax(machine, logits, (32,))["non_finite"] == 0


def test_the_best_before_stays_unless_it_is_beaten(here: Machine) -> None:
    entry = np.zeros((), ENTRY)
    entry["value"], entry["place"] = 2.0, ~7
    here.run("argmax", at(np.float32([2.0] * 16)), 16, 100, entry)
    assert (entry["value"], ~entry["place"]) == (2.0, 7)
    here.run("argmax", at(np.float32([1.0] * 9 + [2.5] * 7)), 12, 100, entry)
    assert (entry["value"], ~entry["place"]) == (2.5, 109)
    entry["non_finite"] = np.nan
    here.run("argmax", at(np.float32([3.0] * 16)), 16, 100, entry)
    assert np.isnan(entry["non_finite"])  # never forgotten
    assert entry["value"] == np.inf


@pytest.mark.parametrize("size", [32, 96, 576])
def test_a_row_is_at_most_this_long(machine: Machine, size: int) -> None:
    """Also after it was quantised, which makes a row longest where all but one round up."""
    worst = np.tile(np.float32([127.0] + [1.5001] * 15), size // 16)
    for x in (worst, np.random.default_rng(size).normal(0, 3, size).astype(np.float32)):
        out = np.zeros(1, np.float32)
        machine.run("length", at(x), size, out)
        assert out[0] == pytest.approx(1.02 * np.linalg.norm(x.astype(np.float64)), rel=1e-5)
        values, scale = twins.to_bytes(x.reshape(-1, twins.GROUP))
        assert np.linalg.norm(values * scale[:, None].astype(np.float64)) < out[0]


def test_the_length_of_what_is_no_row(here: Machine) -> None:
    x = np.ones(64, np.float32)
    for bad, wanted in ((np.nan, np.nan), (np.inf, np.inf), (1e30, np.inf)):
        x[40] = bad
        out = np.zeros(1, np.float32)
        here.run("length", at(x), 64, out)
        assert out[0] == pytest.approx(wanted, nan_ok=True)


def test_pruning_is_tried_again_after_a_rest() -> None:
    pruning = BoundPruning()
    tried = []
    for _ in range(300):
        tried.append(pruning.is_due())
        if tried[-1]:
            pruning.note(1.0 if len(tried) < 100 else 0.02)
    assert tried[:3] == [True] * 3
    assert not any(tried[3:66])
    assert tried[66:69] == [True] * 3
    assert all(tried[-160:])


def test_a_doubtful_step_now_and_then_is_no_reason() -> None:
    pruning = BoundPruning()
    for i in range(200):
        assert pruning.is_due()
        pruning.note(1.0 if i % 16 == 0 else 0.05)
