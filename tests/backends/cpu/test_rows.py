"""Norms, gates and quantising against their numpy twins, bit for bit, on every processor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llvmlite import ir

from ridgeline.backends.cpu.kernels.rows import emit_rows
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from tests.backends.cpu import twins
from tests.backends.cpu.machine import TARGETS, Array, Machine, at, build, same_bits
from tests.tiny import PLAIN

NUM_CHANNELS, EPS = 570, 1e-5
SIZES = [32, 96, 576]
RNG = np.random.default_rng(8)


@pytest.fixture(scope="module", params=TARGETS)
def machine(request: pytest.FixtureRequest) -> Machine:
    def emit(module: ir.Module) -> None:
        sizes = model_sizes(replace(PLAIN, hidden_size=NUM_CHANNELS), "f32", "f32")
        emit_rows(module, sizes, EPS, ("groups", "rows", "bf16"))

    return build(emit, request.param)


def numbers(size: int, spread: float = 1.0) -> Array:
    return at((RNG.normal(0, spread, size)).astype(np.float32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [1e-12, 1.0, 1e9])
def test_norm(machine: Machine, size: int, spread: float) -> None:
    x, weight = numbers(size, spread), numbers(size)
    x[size - 6 :] = weight[size - 6 :] = 0
    out = at(np.full(size + 16, 7, np.float32))
    machine.run("norm", x, weight, 0, out, size)
    assert same_bits(out[:size], twins.norm(x[None], weight, NUM_CHANNELS, EPS)[0])
    assert (out[size:] == 7).all()
    exact = x / np.sqrt((x.astype(np.float64) ** 2).sum() / NUM_CHANNELS + EPS) * weight
    np.testing.assert_allclose(out[:size], exact, rtol=1e-6)


def test_norm_of_zeros_is_zeros(machine: Machine) -> None:
    zeros, out = at(np.zeros(32, np.float32)), at(np.ones(32, np.float32))
    machine.run("norm", zeros, numbers(32), 0, out, 32)
    assert not out.any()


@pytest.mark.parametrize("size", SIZES)
def test_add_and_copy(machine: Machine, size: int) -> None:
    y = numbers(size)
    x = numbers(size + 16)
    before = x.copy()
    machine.run("add", x, y, size)
    assert same_bits(x[:size], before[:size] + y)
    machine.run("copy", x, y, size)
    assert same_bits(x[:size], y)
    assert same_bits(x[size:], before[size:])


@pytest.mark.parametrize("size", SIZES)
def test_gate(machine: Machine, size: int) -> None:
    gate, up = numbers(size, 4), numbers(size)
    gate[:8] = [0, -0.0, 87, -87, 1e4, -1e4, 88.5, -88.5]
    out = at(np.zeros(size, np.float32))
    machine.run("gate", gate, up, 0, 0, out, size)
    assert same_bits(out, twins.gate(gate, up))
    wide = gate.astype(np.float64)
    exact = wide / (1 + np.exp(-wide.clip(-700))) * up
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-33)
    out_in_place = at(gate)
    machine.run("gate", out_in_place, up, 0, 0, out_in_place, size)
    assert same_bits(out_in_place, out)


@pytest.mark.parametrize("size", SIZES)
def test_quantise(machine: Machine, size: int) -> None:
    num_groups = size // twins.GROUP
    spread = (10.0 ** RNG.integers(-20, 20, num_groups)).repeat(twins.GROUP)
    x = at((numbers(size) * spread).astype(np.float32))
    x[: twins.GROUP] = 0
    got, act_scales = quantise(machine, x)
    wanted, scale = twins.to_bytes(x.reshape(num_groups, -1))
    assert same_bits(got, wanted.ravel())
    assert same_bits(act_scales, twins.act_scales_of(got[None], scale)[0])
    again = wanted * act_scales["scale"].reshape(-1, 1)
    error = np.abs(again - x.reshape(num_groups, -1)).max(axis=1)
    assert (error <= np.abs(x).reshape(num_groups, -1).max(axis=1) / 253).all()


def quantise(machine: Machine, x: Array) -> tuple[Array, Array]:
    out = at(np.full(len(x), 99, np.int8))
    act_scales = at(np.ones(len(x) // 32, twins.ACT_SCALES))
    machine.run("quantise_groups", x, out, act_scales, len(x), 0)
    return out, act_scales


@pytest.mark.parametrize("size", [*SIZES, 1024, 1536])
def test_quantise_a_row(machine: Machine, size: int) -> None:
    x = numbers(size)
    x[5] = 40  # what a rotation is for
    got, act_scales, scratch = quantise_row(machine, x)
    wanted, scale = twins.to_bytes(twins.hadamard(x)[None])
    assert same_bits(got, wanted[0])
    assert same_bits(act_scales, twins.row_act_scales_of(wanted, scale))
    assert same_bits(scratch, twins.hadamard(x))
    block = min(size & -size, 512)
    again = twins.hadamard(got * act_scales["scale"].astype(np.float64)) / block
    assert np.abs(again - x).max() < 0.5 * float(act_scales["scale"][0])


def quantise_row(machine: Machine, x: Array) -> tuple[Array, Array, Array]:
    out, act_scales = at(np.full(len(x), 99, np.int8)), at(np.zeros(1, twins.ROW_ACT_SCALES))
    scratch = at(np.zeros(len(x), np.float32))
    machine.run("quantise_rows", x, out, act_scales, len(x), scratch)
    return out, act_scales, scratch


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_finite_scale(machine: Machine, bad: float) -> None:
    x = numbers(96)
    x[70] = bad
    assert not np.isfinite(quantise_row(machine, x)[1]["scale"]).any()


@pytest.mark.parametrize("size", SIZES)
def test_round_to_bf16(machine: Machine, size: int) -> None:
    x = numbers(size, 1e3)
    x[:6] = [0, -0.0, np.inf, -np.inf, np.nan, 1.00390625]  # the last is a tie
    out = at(np.zeros(size, np.uint16))
    machine.run("quantise_bf16", x, out, 0, size, 0)
    assert same_bits(out, twins.bf16(x))
    assert np.isnan(twins.widened(out)[4])
    assert twins.widened(out)[5] == 1.0
    np.testing.assert_allclose(twins.widened(out)[6:], x[6:], rtol=2.0**-8)


def test_bytes_round_to_even_and_reach_both_ends(machine: Machine) -> None:
    x = np.zeros(32, np.float32)
    x[:8] = [127, -127, 0.5, 1.5, -0.5, -2.5, 126.5, 3]
    got, act_scales = quantise(machine, at(x))
    assert got[:8].tolist() == [127, -127, 0, 2, 0, -2, 126, 3]
    assert not got[8:].any()
    assert act_scales["scale"][0].tolist() == [1, 0]
    assert act_scales["total"][0] == got.sum()


def test_next_to_nothing_becomes_nothing(machine: Machine) -> None:
    """127 over it would be infinite."""
    x = at(np.float32([1e-38, -3e-39, 1e-45, 0] * 8))
    got, act_scales = quantise(machine, x)
    assert not got.any()
    assert not act_scales["total"].any()
    assert (np.abs(act_scales["scale"]) < 1e-30).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_wherever_it_is(machine: Machine, bad: float) -> None:
    """One such activation must not vanish when its neighbours are rounded to bytes."""
    for place in range(0, 32, 1 if machine.is_local else 11):
        x = numbers(64)
        x[place] = bad
        _, act_scales = quantise(machine, x)
        assert not np.isfinite(act_scales["scale"][0, place // twins.GROUP])
        assert not np.isfinite(act_scales["total"][0])
        assert np.isfinite(act_scales["scale"][1]).all()
        row, out = numbers(576), at(np.zeros(576, np.float32))
        row[place * 18] = bad
        machine.run("norm", row, at(np.ones(576, np.float32)), 0, out, 576)
        assert not np.isfinite(out[place * 18])
