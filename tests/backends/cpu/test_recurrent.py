"""Kernels of recurrent layers against their numpy twins, bit for bit, on every processor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from ridgeline.backends.cpu.kernels import ir as values
from ridgeline.backends.cpu.kernels.kernel import Kernel
from ridgeline.backends.cpu.kernels.recurrent import emit_recurrent, softplus
from ridgeline.backends.cpu.layout.recurrent import places, recurrence, vector_sizes, vectors
from ridgeline.backends.cpu.runner import segments
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work
from ridgeline.model.shape.recurrent import Conv, Delta, Ssm
from tests.backends.cpu import recurrent_twin as twin
from tests.backends.cpu.machine import TARGETS, Array, at, build, same_bits
from tests.recurrent import MIXERS

HIDDEN, EPS, F32 = 40, 1e-5, np.float32
SLOTS = 5
# Rows of two texts are mixed. The first goes on from slot 3, is kept in slot 2 after four tokens
# and ends in slot 3; the second begins, and is kept in slot 0.
SEGMENTS = ((0, 4, 3, 3), (4, 4, 3, 2), (4, 9, 3, 3), (9, 14, -1, 0))
ORDER = (3, 0, 1, 13, 5, 6, 7, 9, 8, 2, 10, 4, 11, 12)
WIDE = {
    "several columns": Delta(
        num_key_heads=1, num_value_heads=2, key_dim=40, value_dim=48, kernel=4
    ),
    "several columns, a state space": Ssm(2, 40, 24, 1, 4),
}
CASES = [("host", name) for name in MIXERS | WIDE] + [
    (target, name)
    for target in TARGETS
    for name in ("short convolution with biases", "delta rule", "state space, normed first")
    if target != "host"
]


class Case:
    """A mixer's kernels, rows of a step, and states of five slots."""

    def __init__(self, mixer: Any, target: str) -> None:
        self.mixer, self.shape = mixer, recurrence(mixer, HIDDEN)
        self.machine = build(lambda module: emit_recurrent(module, self.shape, EPS), target)
        rng = np.random.default_rng(3)
        tensors = {n: normal(rng, shape, 0.5) for n, shape in mixer.shapes(HIDDEN).items()}
        self.vectors = {k: at(v) for k, v in vectors(self.shape, tensors.__getitem__).items()}
        self.rows = at(np.full((len(ORDER), self.shape.stride // 4), 7, F32))
        used = self.is_used()
        self.rows[:, : self.shape.width] = normal(rng, (len(ORDER), self.shape.width)) * used
        self.states = at(normal(rng, (SLOTS, self.shape.state)))
        self.segments, self.order = at(np.array(SEGMENTS, np.int32)), at(np.array(ORDER, np.int32))
        self.non_finite = at(np.zeros(len(ORDER), F32))

    def is_used(self) -> Array:
        """Where a row is no padding."""
        found = np.zeros(self.shape.width, bool)
        for name, first in self.shape.columns:
            rows, _ = places(self.shape).get(name, (None, None))
            if rows is None:
                rows = np.arange(self.mixer.shapes(HIDDEN)[name][0])
            found[first : first + len(rows)] = rows >= 0
        return found

    def of_texts(self, column: int, width: int = 1) -> list[Array]:
        """Columns of both texts' tokens, in order."""
        part = self.rows[list(ORDER), column : column + width].copy()
        return [part[:9], part[9:]]

    def run(self, name: str, columns: dict[str, int], state: int, **others: int | Array) -> None:
        """Run a kernel on whole columns, and states from one of their floats on."""
        rows, shape = self.rows.reshape(-1), self.shape
        step = (
            shape.stride, self.order, self.segments, len(SEGMENTS),
            self.states.reshape(-1)[state:], shape.state * 4,
        )  # fmt: skip
        first = (*(rows[column:] for column in columns.values()), *others.values())
        self.machine.run(name, *first, *step, self.non_finite)

    def convolve(self) -> None:
        """The convolution of all channels."""
        shape, rows = self.shape, self.rows.reshape(-1)
        nothing = np.zeros(shape.width, F32)
        bias, in_bias = (self.vectors.get(n, nothing) for n in ("conv_bias", "in_bias"))
        weights = self.vectors["conv"].reshape(-1)
        for channel in range(0, shape.channels, 16):
            self.machine.run(
                "convolve", rows[shape.conv_at + channel :], shape.stride, self.order,
                self.segments, len(SEGMENTS), self.states.reshape(-1)[channel:], shape.state * 4,
                weights[channel:], bias[channel:], in_bias[shape.conv_at + channel :],
                self.non_finite,
            )  # fmt: skip

    def kept(self, before: Array, first: Array, saved: Array, second: Array) -> Array:
        """What slots have behind the step, by what both texts leave and what is saved."""
        before = before.copy()
        for slot, value in ((3, first), (2, saved), (0, second)):
            before[slot] = value
        return before


def normal(rng: np.random.Generator, shape: tuple[int, ...], spread: float = 1.0) -> Array:
    return rng.normal(0, spread, shape).astype(F32)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join(case))
def fresh(request: pytest.FixtureRequest) -> Case:
    target, name = request.param
    return Case((MIXERS | WIDE)[name], target)


@pytest.fixture
def case(fresh: Case) -> Case:
    """A case whose rows and states nobody has changed: those that were are put back."""
    again = Case.__new__(Case)
    vars(again).update(vars(fresh))
    for name in ("rows", "states", "non_finite"):
        setattr(again, name, at(getattr(fresh, name)))
    return again


def test_the_convolution(case: Case) -> None:
    shape, count, before = case.shape, case.mixer.kernel, case.states.copy()
    windows = before[:, : shape.window].reshape(SLOTS, count - 1, shape.channels)
    channels, weights = shape.channels, case.vectors["conv"].reshape(count, shape.channels)
    bias, in_bias = case.vectors.get("conv_bias"), case.vectors.get("in_bias")
    gates = isinstance(case.mixer, Conv)

    def loaded(part: int) -> list[Array]:
        column = shape.conv_at + part * channels
        found = case.of_texts(column, channels)
        return found if in_bias is None else [x + in_bias[column:][:channels] for x in found]

    x = loaded(0)
    if gates:
        x = [a * b for a, b in zip(x, loaded(2), strict=True)]
    behind = loaded(1) if gates else []
    made, ends = zip(
        twin.convolve(windows[3], x[0], weights, bias),
        twin.convolve(np.zeros_like(windows[0]), x[1], weights, bias),
        strict=True,
    )
    _, saved = twin.convolve(windows[3], x[0][:4], weights, bias)
    wanted = [a * b for a, b in zip(behind, made, strict=True)] if gates else map(twin.silu, made)
    untouched = case.rows.copy()
    case.convolve()
    for got, want in zip(case.of_texts(shape.conv_at, channels), wanted, strict=True):
        assert same_bits(got, want)
    kept = case.kept(windows, ends[0], saved, ends[1])
    assert same_bits(case.states[:, : shape.window].reshape(kept.shape), kept)
    assert same_bits(case.states[:, shape.window :], before[:, shape.window :])
    case.rows[:, shape.conv_at : shape.conv_at + channels] = 0
    untouched[:, shape.conv_at : shape.conv_at + channels] = 0
    assert same_bits(case.rows, untouched)


def test_memories(case: Case) -> None:
    """Of the last head, whose keys, or B and C, are the last key head's or group's."""
    shape, mixer = case.shape, case.mixer
    if isinstance(mixer, Conv):
        return
    head, size = shape.num_heads - 1, shape.rows * shape.head_width
    first = shape.window + head * size
    value_at = shape.output_at + head * shape.head_width
    before = case.states.copy()
    blocks = before[:, first : first + size].reshape(SLOTS, -1, shape.rows, 16)
    memories = blocks.transpose(0, 2, 1, 3).reshape(SLOTS, shape.rows, -1)
    rates = case.vectors["rates"][head]
    values = case.of_texts(value_at, shape.head_width)
    starts = [memories[3], np.zeros_like(memories[0])]
    if isinstance(mixer, Delta):
        columns = dict(shape.columns)
        q_at = (mixer.num_key_heads - 1) * shape.rows
        k_at, beta, decay = q_at + shape.output_at // 2, columns["beta"], columns["decay"]
        case.machine.run("unit", case.rows.reshape(-1)[q_at:], shape.stride, case.order, len(ORDER))
        q, k = (case.of_texts(column, shape.rows) for column in (q_at, k_at))
        gates = [case.of_texts(column + head) for column in (beta, decay)]

        def twins(i: int, memory: Array, count: int) -> tuple[Array, Array]:
            gate = [part[i][:count, 0] for part in gates]
            return twin.delta(memory, q[i][:count], k[i][:count], values[i][:count], *gate, rates)

        arguments = {"q": q_at, "v": value_at, "gates": beta + head}
        name = "delta"
    else:
        shared = (shape.channels - shape.output_width) // 2
        b_at = shape.output_at + shape.output_width + (mixer.num_groups - 1) * shape.rows
        pace_at = shape.conv_at + shape.channels + head
        b, c = (case.of_texts(column, shape.rows) for column in (b_at, b_at + shared))
        pace = case.of_texts(pace_at)
        factor = mixer.in_scale * mixer.part_scales[4]

        def twins(i: int, memory: Array, count: int) -> tuple[Array, Array]:
            parts = (part[i][:count] for part in (values, b, c))
            return twin.scan(memory, *parts, pace[i][:count, 0], factor, rates)

        arguments, name = {"x": value_at, "b": b_at, "pace": pace_at}, "scan"
    made, ends = zip(*(twins(i, memory, 9) for i, memory in enumerate(starts)), strict=True)
    _, saved = twins(0, memories[3], 4)
    case.run(name, arguments, first, rates=rates)
    for got, want in zip(case.of_texts(value_at, shape.head_width), made, strict=True):
        assert same_bits(got, want)
    kept = case.kept(memories, ends[0], saved, ends[1])
    blocks = kept.reshape(SLOTS, shape.rows, -1, 16).transpose(0, 2, 1, 3).reshape(SLOTS, size)
    assert same_bits(case.states[:, first : first + size], np.ascontiguousarray(blocks))
    assert same_bits(case.states[:, :first], before[:, :first])
    assert same_bits(case.states[:, first + size :], before[:, first + size :])
    assert not case.non_finite.any()


def test_queries_and_keys_have_length_1(case: Case) -> None:
    shape, mixer = case.shape, case.mixer
    if not isinstance(mixer, Delta):
        return
    before = case.rows.copy()
    case.machine.run("unit", case.rows.reshape(-1), shape.stride, case.order, len(ORDER))
    for at_column, is_query in ((0, True), (shape.output_at // 2, False)):
        column = slice(at_column, at_column + shape.rows)
        want = twin.unit(before[:, column], mixer.key_dim, is_query=is_query)
        assert same_bits(case.rows[:, column], want)
        exact = np.linalg.norm(want.astype(np.float64), axis=1)
        assert exact == pytest.approx(mixer.key_dim**-0.5 if is_query else 1.0, rel=1e-5)


def test_what_memories_give_is_gated(case: Case) -> None:
    shape, mixer = case.shape, case.mixer
    if isinstance(mixer, Conv):
        return
    scale, out = case.vectors.get("gated_scale"), at(np.full(shape.output_width + 16, 7, F32))
    bias = case.vectors.get("in_bias", np.zeros(shape.width, F32))
    row = case.rows[5]
    x, gate = (
        row[column : column + shape.output_width] for column in (shape.output_at, shape.gate_at)
    )
    count = shape.num_heads * shape.head_width
    is_delta = isinstance(mixer, Delta)
    groups = mixer.num_value_heads if is_delta else mixer.num_groups
    if not is_delta and mixer.bias:
        gate = gate + bias[: shape.output_width]
    want = twin.gate_heads(
        x[:count], gate[:count], None if scale is None else scale[:count], groups=groups,
        size=mixer.value_dim if is_delta else mixer.inner_size // groups, eps=EPS,
        norm_first=is_delta or mixer.norm_first,
        factors=(1, 1) if is_delta else (mixer.in_scale * mixer.part_scales[0], mixer.out_scale),
    )  # fmt: skip
    case.machine.run(
        "gate_heads", x, row[shape.gate_at :], x if scale is None else scale,
        bias[shape.gate_at :], out,
    )  # fmt: skip
    assert same_bits(out[:count], want)
    assert not out[count : shape.output_width].any()
    assert (out[shape.output_width :] == 7).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_noted(case: Case, bad: float) -> None:
    """Whatever of a token is damaged; the other text is as before."""
    shape, mixer = case.shape, case.mixer
    columns = [shape.output_at]
    if isinstance(mixer, Delta):
        columns = [0, shape.output_at, *(dict(shape.columns)[name] for name in ("beta", "decay"))]
    elif isinstance(mixer, Ssm):
        columns = [
            shape.output_at,
            shape.output_at + shape.output_width,
            shape.conv_at + shape.channels,
        ]
    rows, states = case.rows.copy(), case.states.copy()
    for column in columns:
        case.rows[:], case.states[:], case.non_finite[:] = rows, states, 0
        case.rows[ORDER[11], column] = bad
        case.convolve()
        if isinstance(mixer, Delta):
            case.machine.run("unit", case.rows.reshape(-1), shape.stride, case.order, len(ORDER))
            beta = dict(shape.columns)["beta"]
            places_of = {"q": 0, "v": shape.output_at, "gates": beta}
            case.run("delta", places_of, shape.window, rates=case.vectors["rates"][0])
        elif isinstance(mixer, Ssm):
            b = shape.output_at + shape.output_width
            places_of = {"x": shape.output_at, "b": b, "pace": shape.conv_at + shape.channels}
            case.run("scan", places_of, shape.window, rates=case.vectors["rates"][0])
        assert case.non_finite[ORDER[11]] == 1
        assert not case.non_finite[list(ORDER[:11])].any()


def test_softplus() -> None:
    kernel = Kernel("some", ("x", "out"))

    def emit(module: ir.Module) -> None:
        fn = kernel.begin(module)
        x, out = fn.args
        fn.store(softplus(fn.load(x, values.vec(values.F32, 16), 4)), out, 4)
        fn.finish()

    machine = build(emit)
    for low, high in pairwise((-80.0, -20.0, -5.0, -1e-3, 1e-3, 3.0, 20.0, 90.0)):
        x, out = at(np.linspace(low, high, 16).astype(F32)), at(np.zeros(16, F32))
        machine.run("some", x, out)
        assert same_bits(out, twin.softplus(x))
        np.testing.assert_allclose(out, np.logaddexp(x.astype(np.float64), 0), rtol=3e-7)


@pytest.mark.parametrize("name", MIXERS | WIDE)
def test_vectors_have_the_size_that_is_said(name: str) -> None:
    mixer = (MIXERS | WIDE)[name]
    shape = recurrence(mixer, HIDDEN)
    tensors = {n: np.ones(s, F32) for n, s in mixer.shapes(HIDDEN).items()}
    found = {k: v.size for k, v in vectors(shape, tensors.__getitem__).items()}
    assert found == vector_sizes(shape)


def test_segments_of_a_step() -> None:
    sampling = Sampling(SamplingParams(), 0, ())

    def item(start: int, count: int, state: int, save: tuple[tuple[int, int], ...] = ()) -> Work:
        tokens = tuple(range(count))
        return Work((0, 0), start, tokens, (0,), (), sampling, (), (), state=state, save=save)

    found = segments((item(4, 5, 3, ((2, 7), (5, 8))), item(0, 3, 1), item(0, 2, 2, ((2, 0),))))
    assert found == [
        (0, 2, 3, 3),
        (2, 2, 3, 7),
        (2, 5, 3, 3),
        (5, 5, 3, 8),
        (5, 8, -1, 1),
        (8, 10, -1, 2),
        (10, 10, 2, 0),
    ]
