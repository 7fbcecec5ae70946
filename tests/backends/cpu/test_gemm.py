"""Matrix products against their numpy twin, bit for bit, on every processor at hand."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels.gemm import emit_linear, shapes
from ridgeline.backends.cpu.kernels.isa import Dot
from ridgeline.backends.cpu.layout.formats import ACT_SCALES_BYTES, FORMATS, KINDS
from ridgeline.backends.cpu.layout.pack import pack, padded
from ridgeline.backends.cpu.layout.quantise import hadamard
from ridgeline.model.files.tensors import Tensor
from tests.backends.cpu import twins
from tests.backends.cpu.machine import TARGETS, Array, Machine, at, build, prefetched, same_bits

MOST_ROWS, TILES = 300, 6
RECORDS = {"k4": 16, "k5": 8, "k6": 16, "r8": 4}  # whole blocks, or pairs; of other kinds 3
FEW = [1, 2, 3, 5, 8, 15]
GARBAGE = 77.5
MARGIN = 64  # bytes between rows that belong to nobody
NOWHERE = 0  # next address: to prefetch what is not there does no harm


# Plain dot products take long to compile, and floats have none.
CASES: list[tuple[str, ...]] = [
    (name, kind)
    for name in TARGETS
    for kind in ("w4", "w5", "s4", "s5", "z4", "t4", "k4", "k5", "k6", "w8", "r8")
    if TARGETS[name].processor.dot != Dot.PLAIN
]
CASES += [("baseline", "w8"), ("baseline", "t4")]
CASES += [(name, kind) for name in ("host", "baseline", "arm") for kind in ("f32", "bf16")]
# A GEMV reads one tile or four at once; this machine prefers one of them, both must be right.
if TARGETS["host"].processor.dot is Dot.VNNI512:
    CASES += [("host", kind, "other streams") for kind in KINDS]
if TARGETS["host"].processor.has_tiles:
    CASES.append(("host", "r8", "no tiles"))


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest) -> tuple[Machine, str]:
    name, kind, *others = request.param
    processor = TARGETS[name].processor
    if others == ["no tiles"]:
        processor = processor._replace(has_tiles=False)
    elif others:
        processor = processor._replace(streams=4 if processor.streams == 1 else 1)

    def emit(module: ir.Module) -> None:
        emit_linear(module, processor, [kind])

    return build(emit, name), kind


@cache
def packed(kind: str) -> Array:
    """Any bytes that a record may have: values at random, and one tile of the largest."""
    rng = np.random.default_rng(1)
    records = RECORDS.get(kind, 3)
    shape = (TILES, records, FORMATS[kind].record_bytes)
    if kind == "f32":
        return at(rng.normal(0, 1, (TILES, records, 1024)).astype(np.float32).view(np.uint8))
    if kind == "bf16":
        values = rng.normal(0, 1, (TILES, records, 1024)).astype(np.float32)
        return at(twins.bf16(values).view(np.uint8))
    if kind == "r8":
        data = at(rng.integers(0, 256, (TILES, FORMATS[kind].tile_bytes(records)), np.uint8))
        data[1] = 255
        data[:, -128:] = rng.normal(0, 0.1, (TILES, 32)).astype(np.float32).view(np.uint8)
        return data
    if kind == "t4":
        data = at(rng.integers(0, 256, (TILES, FORMATS[kind].tile_bytes(records)), np.uint8))
        table = rng.permutation(256)[:16].astype(np.uint8)
        table[3], table[4] = 1, 255  # the smallest and the largest, of -127 .. 127
        data[:, -64:] = np.tile(table, 4)
        scales = rng.normal(0, 0.1, (TILES, records, 32)).astype(np.float16)
        for k in range(records):
            data[:, 576 * k + 512 : 576 * (k + 1)] = scales[:, k].view(np.uint8)
        return data
    if kind == "z4":
        data = at(rng.integers(0, 256, shape, np.uint8))
        data[1] = 255
        scales = rng.normal(0, 0.1, (*shape[:2], 32)).astype(np.float16)
        data[:, :, 512:576] = scales.view(np.uint8)
        return data
    if head := twins.K_HEADS.get(kind):
        data = at(
            rng.integers(0, 256, (TILES, records // 8, 8 * FORMATS[kind].record_bytes), np.uint8)
        )
        data[1] = 255
        scales = rng.normal(0, 0.1, (TILES, records // 8, head // 2)).astype(np.float16)
        data[:, :, :head] = scales.view(np.uint8)
        return data
    data = at(rng.integers(0, 256, shape, np.uint8))
    data[1] = 255
    scales = rng.normal(0, 0.1, (*shape[:2], 64 if kind in ("w4", "w5") else 32)).astype(np.float16)
    data[:, :, -2 * scales.shape[2] :] = scales.view(np.uint8)
    return data


@cache
def activations(kind: str, num_records: int) -> tuple[Array, Array]:
    """Rows of activations with something else behind each; first the extremes."""
    rng = np.random.default_rng(2)
    size = num_records * 32
    floats = rng.normal(0, 1, (MOST_ROWS, size)).astype(np.float32)
    if kind == "f32":
        x = at(np.full((MOST_ROWS, size + MARGIN // 4), GARBAGE, np.float32))
        x[:, :size] = floats
        return x, at(np.zeros((MOST_ROWS, 1), twins.ACT_SCALES))
    if kind == "bf16":
        x = at(np.full((MOST_ROWS, size + MARGIN // 2), 0x429B, np.uint16))
        x[:, :size] = twins.bf16(floats)
        return x, at(np.zeros((MOST_ROWS, 1), twins.ACT_SCALES))
    x = at(rng.integers(-127, 128, (MOST_ROWS, size + MARGIN), np.int8))
    x[0], x[1], x[2] = 127, -127, 0
    if kind == "r8":
        return x, at(twins.row_act_scales_of(x[:, :size], np.abs(floats[:, 0])))
    act_scales = at(np.zeros((MOST_ROWS, num_records + 1), twins.ACT_SCALES))
    act_scales[:, :num_records] = twins.act_scales_of(
        x[:, :size], np.abs(floats[:, :: twins.GROUP])
    )
    return x, act_scales


@cache
def wanted(kind: str) -> NDArray[np.float32]:
    records = RECORDS.get(kind, 3)
    x, act_scales = activations(kind, records)
    return twins.linear(kind, packed(kind), x[:, : records * 32], act_scales)


def product(
    case: tuple[Machine, str], first_row: int, num_rows: int, tiles: tuple[int, int] = (0, TILES)
) -> NDArray[np.float32]:
    """Results of some rows, as many outputs as there are tiles; the rest stays garbage."""
    machine, kind = case
    records = RECORDS.get(kind, 3)
    x, act_scales = activations(kind, records)
    rows = slice(first_row, first_row + num_rows)
    y = at(np.full((num_rows, TILES * 32 + 16), GARBAGE, np.float32))
    name, (x_stride, act_scales_stride) = f"linear_{kind}", (x.strides[0], act_scales.strides[0])
    shape = (*tiles, records, num_rows)
    operand = x[rows], x_stride, act_scales[rows], act_scales_stride, y, y.strides[0]
    machine.run(name, packed(kind), *shape, *operand, NOWHERE)
    return y


def test_a_row_is_the_same_in_any_company(case: tuple[Machine, str]) -> None:
    """Whatever tile of rows computes it, the bits are those of the twin."""
    machine, kind = case
    for num_rows in range(1, 21) if machine.is_local else FEW:
        first = 0 if num_rows > 8 else num_rows % 3  # the extremes are in a few of them
        y = product(case, first, num_rows)
        assert same_bits(y[:, : TILES * 32], wanted(kind)[first : first + num_rows]), num_rows
        assert (y[:, TILES * 32 :] == GARBAGE).all()


@pytest.mark.parametrize("num_rows", [100, MOST_ROWS])
def test_many_rows(case: tuple[Machine, str], num_rows: int) -> None:
    y = product(case, 0, num_rows)
    assert same_bits(y[:, : TILES * 32], wanted(case[1])[:num_rows])


@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.parametrize("tiles", [(0, 1), (0, 3), (1, 3), (1, 6), (2, 6), (2, 2)])
def test_a_share_of_the_outputs(
    case: tuple[Machine, str], tiles: tuple[int, int], num_rows: int
) -> None:
    y = product(case, 5, num_rows, tiles)
    mine = slice(32 * tiles[0], 32 * tiles[1])
    assert same_bits(y[:, mine], wanted(case[1])[5 : 5 + num_rows, mine])
    y[:, mine] = GARBAGE
    assert (y == GARBAGE).all()


@pytest.fixture(scope="module")
def here() -> Machine:
    host = TARGETS["host"]
    return build(lambda module: emit_linear(module, host.processor, KINDS))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int8-row", "int4"])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 1), (7, 64), (31, 33), (33, 96), (64, 31), (100, 130)]
)
def test_odd_sizes(here: Machine, dtype: str, num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(num_inputs)
    matrix = rng.normal(0, 1, (num_outputs, num_inputs)).astype(np.float32)
    packed = pack(Tensor("w", "F32", matrix.shape, matrix.view(np.uint8)), dtype)
    kind, data = packed.kind, at(packed.data)
    _, num_tiles, num_records, _ = packed.words
    x, act_scales = activations(kind, padded(num_inputs) // 32)
    for num_rows in (1, 2, 13):
        y = at(np.zeros((num_rows, num_tiles * 32), np.float32))
        shape = (0, num_tiles, num_records, num_rows)
        operand = x, x.strides[0], act_scales, act_scales.strides[0], y, y.strides[0]
        here.run(f"linear_{kind}", data, *shape, *operand, NOWHERE)
        rows = x[:num_rows, : num_records * 32]  # what an odd record's pair multiplies adds nothing
        assert same_bits(y, twins.linear(kind, data, rows, act_scales[:num_rows]))
        rows = x[:num_rows, : padded(num_inputs)]
        exact = values(kind, rows, act_scales[:num_rows])[:, :num_inputs] @ matrix.T
        error = np.abs(y[:, :num_outputs] - exact) / np.abs(exact).max()
        bounds = {"f32": 1e-6, "bf16": 0.004, "int8": 0.02, "int8-row": 0.03, "int4": 0.2}
        assert error.max() < bounds[dtype]
        assert not y[:, num_outputs:].any()


@pytest.mark.parametrize(("num_rows", "streams"), [(1, 1), (1, 4), (2, 1)])
def test_what_is_read_next_is_prefetched(num_rows: int, streams: int) -> None:
    """All but the beginning of some tiles, and the beginning of what the thread reads then.

    Whatever follows in memory instead is others' work: fetching it cost one stream a twentieth.
    """
    records, first, last = 256, 1, 5  # a tile is 17 times what several rows fetch together
    processor = TARGETS["host"].processor._replace(streams=streams)
    stride = FORMATS["w8"].tile_bytes(records)
    tiles, behind = aligned((2, 8 * stride), np.uint8)
    x, act_scales = (
        aligned((num_rows, records * size), np.uint8) for size in (32, ACT_SCALES_BYTES)
    )
    y = aligned((num_rows, 8 * 32), np.float32)
    operand = [word for array in (x, act_scales, y) for word in (address(array), array.strides[0])]
    words = address(tiles), first, last, records, num_rows, *operand, address(behind)
    asked = prefetched(lambda module: emit_linear(module, processor, ["w8"]), "linear_w8", *words)

    together = streams if processor.dot is Dot.VNNI512 else 1
    ahead = -(-8192 // streams // 1088) * 1088 if num_rows == 1 else stride
    wanted = set[int]()
    for number in range(together):
        for tile in range(first, last, together):
            coming = (tiles, tile + together) if tile + together < last else (behind, 0)
            for (memory, which), low, high in (((tiles, tile), ahead, stride), (coming, 0, ahead)):
                begin = address(memory) + (which + number) * stride
                wanted |= set(range((begin + low) // 64, (begin + high) // 64))
    assert set(asked) == wanted
    assert num_rows > 1 or len(asked) == len(wanted)  # no line twice


def values(kind: str, rows: Array, act_scales: Array) -> NDArray[np.float64]:
    """What rows of activations stand for."""
    match kind:
        case "f32":
            return rows.astype(np.float64)
        case "bf16":
            return twins.widened(rows).astype(np.float64)
        case "r8":  # turning twice is multiplying by the size of a block
            size = rows.shape[1]
            scaled = rows * act_scales["scale"][:, None].astype(np.float64)
            return twins.hadamard(scaled) / min(size & -size, 512)
    scales = act_scales["scale"][:, :-1].reshape(len(rows), -1)
    return rows * scales.repeat(twins.GROUP, axis=1).astype(np.float64)


@pytest.mark.parametrize("size", [32, 96, 576, 1024, 1536])
def test_turning_both_sides_changes_no_product(size: int) -> None:
    rng = np.random.default_rng(size)
    x, weights = (rng.normal(0, 1, (8, size)).astype(np.float32) for _ in range(2))
    x[:, 3] *= 100
    rotated_x = twins.hadamard(x)
    np.testing.assert_allclose(rotated_x @ hadamard(weights).T, x @ weights.T, rtol=0, atol=2e-3)
    spread = np.abs(rotated_x).max(axis=1) / np.sqrt((rotated_x**2).mean(axis=1))
    assert (spread < np.abs(x).max(axis=1) / np.sqrt((x**2).mean(axis=1)) / 2).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [Dot.VNNI512, Dot.AVX2])
def test_every_shape_of_tile_is_used(kind: str, form: Dot) -> None:
    """The row counts above reach each: 20 rows are not a multiple of any but the last."""
    sizes, reached = [rows for rows, _ in shapes(kind, form)], set()
    for num_rows in range(1, 21):
        left = num_rows
        for size in sizes:
            reached |= {size} if left >= size else set()
            left %= size
        assert left == 0
    assert reached == set(sizes)


def test_the_twins_fma_is_the_machines() -> None:
    """Where rounding twice would show: ties of the first rounding, cancellation, tiny results."""
    rng = np.random.default_rng(4)
    a, b = (rng.normal(0, 1, 4096).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) * b
    c = np.concatenate([-exact[:1024].astype(np.float32), (exact[1024:] * 2.0**25)]).astype("f4")
    c[2048:] = np.float32(2.0) ** rng.integers(-149, 100, 2048)
    for x, y, z, got in zip(a, b, c, twins.fma(a, b, c), strict=True):
        true = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        neighbours = (np.nextafter(got, np.float32(s)) for s in (-np.inf, np.inf))
        error = abs(Fraction(float(got)) - true)
        assert all(error <= abs(Fraction(float(n)) - true) for n in neighbours)
