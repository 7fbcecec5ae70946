"""Packed weights are the file's: exactly where its blocks are kept, else within a stated bound."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.formats import FORMATS, KINDS
from ridgeline.backends.cpu.layout.model_weights import proxy
from ridgeline.backends.cpu.layout.pack import PackedMatrix, pack, padded
from ridgeline.backends.cpu.layout.quantise import hadamard, to_four_bits
from ridgeline.model.files.tensors import Tensor
from tests.backends.cpu import twins

Floats = NDArray[np.float32]
HALF_STEP = 2.0**-11  # relative error of a half float
SHAPE = (40, 256)
DTYPES = ("int4", "int8", "int8-row", "bf16", "f32")  # and what they make of floats
MADE = ("w4", "w8", "r8", "bf16", "f32")


def matrix(shape: tuple[int, int] = SHAPE, seed: int = 0) -> Floats:
    """Rows of different sizes, with outliers, zeros, and a row without any value."""
    rng = np.random.default_rng(seed)
    out = rng.normal(0, 1, shape) * 10.0 ** rng.integers(-3, 2, (shape[0], 1))
    out.flat[:: shape[1] * 3 + 7] *= 20
    out[shape[0] // 2] = 0
    return out.astype(np.float32)


def encoded(dtype: str, shape: tuple[int, int] = SHAPE) -> Tensor:
    if dtype in ("Q4_K", "Q5_K", "Q6_K"):
        return random_blocks(dtype, shape)
    if dtype in MADE_OF_BLOCKS:
        return made_of_blocks(dtype, shape)
    data = gguf.quants.quantize(matrix(shape), gguf.GGMLQuantizationType[dtype])
    return Tensor("w", dtype, shape, np.ascontiguousarray(data).view(np.uint8))


def random_blocks(dtype: str, shape: tuple[int, int]) -> Tensor:
    """Blocks of any bits, but for their half floats: those are of the size that files have."""
    rng = np.random.default_rng(5)
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][1]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 256, block_bytes), np.uint8)
    halves = rng.uniform(0.0005, 0.02, (*blocks.shape[:2], 2)).astype(np.float16)
    if dtype == "Q6_K":
        blocks[:, :, -2:] = halves[:, :, :1].view(np.uint8)
    else:
        blocks[:, :, :4] = halves.view(np.uint8)
    return Tensor("w", dtype, shape, blocks.reshape(shape[0], -1))


MADE_OF_BLOCKS = {  # bytes before those of a block's weights
    "INT4": 8, "INT4_ZERO": 8, "INT4_FLOAT_ZERO": 8, "INT8": 8, "INT8_ZERO": 8, "FP8": 4, "NF4": 4,
    "MXFP4": 1, "IQ4_NL": 2,
}  # fmt: skip


def made_of_blocks(dtype: str, shape: tuple[int, int]) -> Tensor:
    """Blocks of any bits behind scales that are half floats, as ``files.encodings`` has them."""
    rng = np.random.default_rng(6)
    head, body = MADE_OF_BLOCKS[dtype], 32 if "8" in dtype else 16
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 32, head + body), np.uint8)
    count = blocks.shape[:2]
    scale = rng.normal(0, 0.01, count).astype(np.float16)
    if dtype == "MXFP4":
        blocks[:, :, 0] = rng.integers(104, 144, count)  # what half floats have
    elif dtype == "IQ4_NL":
        blocks[:, :, :2] = scale[:, :, None].view(np.uint8)
    else:
        blocks[:, :, :4] = scale.astype(np.float32)[:, :, None].view(np.uint8)
    if head == 8:
        zero = {"INT4": np.full(count, 8.0), "INT8": np.full(count, 128.0)}.get(dtype)
        if zero is None:
            zero = rng.integers(0, 17, count) + 0.25 * (dtype == "INT4_FLOAT_ZERO")
        blocks[:, :, 4:8] = zero.astype(np.float32)[:, :, None].view(np.uint8)
    if dtype == "FP8":
        blocks[:, :, 4:][blocks[:, :, 4:] & 127 == 127] = 3  # not a number
    return Tensor("w", dtype, shape, blocks.reshape(shape[0], -1))


def floats(values: Floats) -> Tensor:
    return Tensor("w", "F32", values.shape, values.view(np.uint8))


def weights(packed: PackedMatrix) -> NDArray[np.float64]:
    if packed.kind not in ("r8", "t4"):  # which have something behind the records
        records = 8 if packed.kind in twins.K_HEADS else 1
        assert packed.data.shape[2] == records * FORMATS[packed.kind].record_bytes
    return twins.weights(packed.kind, packed.data)


def inside(packed: PackedMatrix, shape: tuple[int, int] = SHAPE) -> NDArray[np.float64]:
    """Return the weights, after a look at the padding."""
    wide = weights(packed)
    assert wide.shape == (padded(shape[0]), padded(shape[1]))
    assert not wide[shape[0] :].any()
    # Padding has no activations, so 4 bits, whose levels need not have a zero, may do without.
    four_or_five = packed.kind[1] in "45"
    assert four_or_five or not wide[:, shape[1] :].any()
    return wide[: shape[0], : shape[1]]


# --- kept as they are --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("Q4_0", "s4"), ("Q4_1", "w4"), ("Q5_0", "s5"), ("Q5_1", "w5"), ("Q8_0", "w8")],
)
def test_blocks_of_32_are_the_files_own(dtype: str, kind: str) -> None:
    tensor = encoded(dtype)
    packed = pack(tensor, "auto")
    assert packed.kind == kind
    exact = inside(packed)
    file = tensor.to_f32()
    if dtype in ("Q4_1", "Q5_1"):  # d q + m, there rounded to float32
        np.testing.assert_allclose(exact, file, rtol=0, atol=1.5e-7 * np.abs(file).max())
        assert (exact.astype(np.float32) == file).all()
    else:
        assert (exact == file).all()


def test_any_q8_block_is_kept() -> None:
    """Also -128, which no quantiser writes."""
    blocks = np.zeros((32, 34), np.uint8)
    blocks[:, :2] = np.array([0.5], np.float16).view(np.uint8)
    blocks[:, 2:] = np.arange(32 * 32).reshape(32, 32) % 256
    tensor = Tensor("w", "Q8_0", (32, 32), blocks)
    assert (inside(pack(tensor, "auto"), (32, 32)) == tensor.to_f32()).all()


@pytest.mark.parametrize(("dtype", "kind"), [("Q4_K", "k4"), ("Q5_K", "k5"), ("Q6_K", "k6")])
def test_blocks_of_256_are_the_files_own(dtype: str, kind: str) -> None:
    """But for the last bit, as the file's scales times factors are rounded on the way."""
    tensor = encoded(dtype, (40, 768))
    packed = pack(tensor, "auto")
    assert packed.kind == kind
    assert packed.words[1:] == (2, 24, packed.data[0].nbytes)
    file = tensor.to_f32()
    _, scale, offset = twins.unpack(kind, packed.data)
    largest = 32 * np.repeat(np.abs(scale), 768 // scale.shape[1], axis=1)
    largest += np.repeat(np.abs(offset), 32, axis=1)
    assert (np.abs(inside(packed, (40, 768)) - file) <= largest[:40] * 2.0**-22).all()
    assert np.abs(file).max() > 1


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("INT4", "s4"), ("INT4_ZERO", "z4"), ("INT8", "w8"), ("MXFP4", "t4"), ("IQ4_NL", "t4")],
)
@pytest.mark.parametrize("wish", ["auto", "int4", "f32"])
def test_encoded_blocks_are_kept(dtype: str, kind: str, wish: str) -> None:
    """Every weight, as long as scales are half floats."""
    tensor = encoded(dtype)
    packed = pack(tensor, wish)
    if wish == "int4" and kind == "w8":
        assert packed.kind == "w4"
        return
    assert packed.kind == ("f32" if wish == "f32" else kind)
    assert (inside(packed) == tensor.to_f32()).all()
    assert np.unique(tensor.to_f32()).size > 100


def test_zeros_that_are_no_whole_numbers_become_offsets() -> None:
    tensor = encoded("INT4_FLOAT_ZERO")
    packed, file = pack(tensor, "auto"), tensor.to_f32()
    assert packed.kind == "w4"
    error = np.abs(inside(packed) - file).reshape(SHAPE[0], -1, 32)
    offset = np.abs(file).reshape(error.shape).max(axis=2, keepdims=True) + 0.6
    assert (error <= offset * HALF_STEP).all()


def test_the_levels_of_nf4_are_rounded() -> None:
    """To 1 / 127 of the largest, and its scale to a half float."""
    tensor = encoded("NF4")
    packed, file = pack(tensor, "auto"), tensor.to_f32()
    assert packed.kind == "t4"
    blocks = tensor.stored.reshape(SHAPE[0], -1, 20)
    largest = np.abs(blocks[:, :, :4].copy().view(np.float32))
    error = np.abs(inside(packed) - file).reshape(SHAPE[0], -1, 32)
    assert (error <= largest * (0.5 / 127 + HALF_STEP) + 127 * 2.0**-25).all()


def test_the_factors_of_iq4_xs_are_rounded_to_half_floats() -> None:
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (40, 3, 136), np.uint8)
    blocks[:, :, :2] = rng.uniform(5e-4, 2e-2, (40, 3, 1)).astype(np.float16).view(np.uint8)
    tensor = Tensor("w", "IQ4_XS", (40, 768), blocks.reshape(40, -1))
    packed, file = pack(tensor, "auto"), tensor.to_f32()
    assert packed.kind == "t4"
    assert (np.abs(inside(packed, (40, 768)) - file) <= np.abs(file) * HALF_STEP).all()
    assert np.abs(file).max() > 10


@pytest.mark.parametrize(("dtype", "byte"), [("MXFP4", 103), ("MXFP4", 144), ("INT4", 0)])
def test_scales_that_are_no_half_floats_are_refused(dtype: str, byte: int) -> None:
    tensor = encoded(dtype)
    blocks = tensor.stored.reshape(SHAPE[0], SHAPE[1] // 32, -1)
    blocks[3, 2, :4] = np.array([1e6], np.float32).view(np.uint8)
    if dtype == "MXFP4":
        blocks[3, 2, 0] = byte
        blocks[3, 2, 1:] = 1
    with pytest.raises(ValueError, match=r"'w' has a scale of .* which is no half float: use"):
        pack(tensor, "auto")
    assert (inside(pack(tensor, "f32")) == tensor.to_f32()).all()
    blocks[3, 2, 1:] = 0x88  # minus zero: no scale is needed
    if dtype == "MXFP4":
        assert (inside(pack(tensor, "auto")) == tensor.to_f32()).all()


# --- quantised again ---------------------------------------------------------------------------


def group_scale(values: Floats, levels: int) -> NDArray[np.float64]:
    """Largest magnitude of each group of 32 over ``levels``, for each value."""
    groups = np.zeros((len(values), padded(values.shape[1])))
    groups[:, : values.shape[1]] = np.abs(values)
    largest = groups.reshape(len(values), -1, 32).max(axis=2)
    return np.repeat(largest / levels, 32, axis=1)[:, : values.shape[1]]


def assert_eight_bits(packed: PackedMatrix, values: Floats) -> None:
    """Half a step, and what rounding the scale to a half float costs the largest."""
    assert packed.kind == "w8"
    error = np.abs(inside(packed, values.shape) - values)
    step = group_scale(values, 127)
    assert (error <= step * (0.5 + 127 * HALF_STEP) + 127 * 2.0**-25).all()
    assert error.mean() < 0.3 * step.mean()


@pytest.mark.parametrize(
    ("dtype", "wish"),
    [*((dtype, wish) for dtype in ("F32", "F16", "BF16", "FP8", "INT8_ZERO")
       for wish in ("auto", "int8")),
     ("Q6_K", "int8"), ("INT4_ZERO", "int8"), ("NF4", "int8")],
)  # fmt: skip
def test_everything_else_gets_eight_bits(dtype: str, wish: str) -> None:
    tensor = encoded(dtype) if dtype != "F32" else floats(matrix())
    assert_eight_bits(pack(tensor, wish), tensor.to_f32())


@pytest.mark.parametrize("dtype", ["Q5_1", "Q5_K"])
def test_int8_widens_five_bits(dtype: str) -> None:
    tensor = encoded(dtype)
    assert_eight_bits(pack(tensor, "int8"), tensor.to_f32())


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q4_K"])
def test_int8_widens_four_bits(dtype: str) -> None:
    tensor = encoded(dtype)
    assert_eight_bits(pack(tensor, "int8"), tensor.to_f32())


def test_int8_keeps_eight_bits_and_moves_five() -> None:
    tensor = encoded("Q8_0")
    assert (pack(tensor, "int8").data == pack(tensor, "auto").data).all()
    tensor = encoded("Q5_0")
    packed = pack(tensor, "int8")
    assert packed.kind == "w8"
    assert (inside(packed) == tensor.to_f32()).all()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8_0", "Q5_0", "Q6_K"])
def test_int4_is_at_most_half_of_an_even_step_off_in_a_block(dtype: str) -> None:
    tensor = encoded(dtype) if dtype != "F32" else floats(matrix())
    packed, values = pack(tensor, "int4"), tensor.to_f32()
    assert packed.kind == "w4"
    groups = values.reshape(SHAPE[0], -1, 32)
    low, high = groups.min(axis=2), groups.max(axis=2)
    rounding = (np.abs(low) + (high - low)) * HALF_STEP * 1.01 + 15 * 2.0**-24
    error = (inside(packed) - values).reshape(groups.shape)
    assert (np.sqrt(np.square(error).mean(axis=2)) <= (high - low) / 30 + rounding).all()


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q4_K"])
def test_int4_keeps_four_bits(dtype: str) -> None:
    tensor = encoded(dtype)
    assert (pack(tensor, "int4").data == pack(tensor, "auto").data).all()


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q4_0", "Q6_K"])
def test_f32_is_exact(dtype: str) -> None:
    tensor = encoded(dtype) if dtype != "F32" else floats(matrix())
    packed = pack(tensor, "f32")
    assert packed.kind == "f32"
    assert (inside(packed) == tensor.to_f32()).all()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q4_1", "Q8_0", "Q6_K"])
def test_one_scale_for_a_row_that_was_turned(dtype: str) -> None:
    tensor = encoded(dtype) if dtype != "F32" else floats(matrix())
    packed = pack(tensor, "int8-row")
    assert packed.kind == "r8"
    values = hadamard(tensor.to_f32()).astype(np.float64)
    error = np.abs(weights(packed)[: SHAPE[0]] - values)
    assert (error <= np.abs(values).max(axis=1, keepdims=True) / 127 * 0.5001).all()
    assert not weights(packed)[SHAPE[0] :].any()


@pytest.mark.parametrize("size", [32, 96, 576, 1536])
def test_turning_twice_gives_the_matrix_back(size: int) -> None:
    """Up to the size of a block, which is divided by once too often then."""
    values = matrix((5, size))
    block = min(size & -size, 512)
    np.testing.assert_allclose(hadamard(hadamard(values)) * block, values, rtol=0, atol=2e-4)
    assert (hadamard(values)[:, :block] != values[:, :block]).any()


@pytest.mark.parametrize("size", [32, 576, 1024])
def test_turned_weights_have_the_same_bits_on_every_processor(size: int) -> None:
    """A product with a Hadamard matrix would not: what a BLAS rounds differs by processor."""
    values = matrix((300, size))
    block = min(size & -size, 512)
    assert (hadamard(values) == twins.hadamard(values) / np.float32(block)).all()


def test_bf16_is_exact_for_bf16_and_the_nearest_for_others() -> None:
    tensor = encoded("BF16")
    packed = pack(tensor, "bf16")
    assert packed.kind == "bf16"
    assert (inside(packed) == tensor.to_f32()).all()
    values = matrix()
    error = np.abs(inside(pack(floats(values), "bf16")) - values)
    assert (error <= np.abs(values) * 2.0**-8).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 40), (31, 257), (100, 31)])
def test_odd_sizes_are_padded_with_zeros(dtype: str, shape: tuple[int, int]) -> None:
    values = matrix(shape)
    got = inside(pack(floats(values), dtype), shape)
    step = group_scale(values, {"f32": 1 << 24, "bf16": 128, "int8": 127, "int4": 7}[dtype])
    most = 1.0 if dtype == "int4" else 0.57  # where the ends of a block may be cut
    assert (np.abs(got - values) <= step * most + 1e-5).all()


def test_tiny_and_zero_weights_stay_tiny() -> None:
    """Scales that are no half floats any more become zero, not infinite."""
    values = np.full((32, 64), 1e-9, np.float32)
    values[1] = 0
    for dtype in ("int8", "int4"):
        assert (np.abs(weights(pack(floats(values), dtype))) < 1e-7).all()


# --- places ------------------------------------------------------------------------------------

PLACES = np.array([5, -1, 0, 39, -1, 7, 5, -1])


@pytest.mark.parametrize(
    "dtype", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0", "Q6_K", "F16", "INT4_ZERO", "MXFP4"]
)
@pytest.mark.parametrize("wish", ["auto", "f32", "bf16", "int8-row", "int4"])
def test_rows_go_where_they_are_wanted(dtype: str, wish: str) -> None:
    tensor = encoded(dtype)
    whole, got = weights(pack(tensor, wish)), weights(pack(tensor, wish, PLACES))
    assert got.shape == (32, SHAPE[1])
    for place, row in enumerate(PLACES):
        assert (got[place] == (whole[row] if row >= 0 else 0)).all()
    assert not got[len(PLACES) :].any()


@pytest.mark.parametrize(
    "dtype", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0", "Q6_K", "F16", "INT4_ZERO", "MXFP4"]
)
@pytest.mark.parametrize("wish", ["auto", "f32", "bf16", "int8-row", "int4"])
@pytest.mark.parametrize("places", [None, np.array([33, -1, 2, *range(90, 40, -1), -1, 5])])
def test_pieces_are_the_whole(
    dtype: str, wish: str, places: NDArray[np.intp] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = encoded(dtype, (100, 256))
    whole = pack(tensor, wish, places)
    monkeypatch.setattr("ridgeline.backends.cpu.layout.pack._WEIGHTS_AT_ONCE", 1)
    pieces = pack(tensor, wish, places)
    assert pieces.kind == whole.kind
    np.testing.assert_array_equal(pieces.data, whole.data)
    tensor = tensor.reordered(np.roll(np.arange(100), 7))
    np.testing.assert_array_equal(
        pack(tensor, wish, places).data[0], _at_once(tensor, wish, places)
    )


def _at_once(tensor: Tensor, wish: str, places: NDArray[np.intp] | None) -> NDArray[np.uint8]:
    """The first tile, packed alone."""
    rows = (np.arange(100) if places is None else places)[:32]
    return pack(tensor, wish, rows).data[0]


@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "F32"])
@pytest.mark.parametrize("wish", ["auto", "f32", "int8"])
def test_columns_go_where_they_are_wanted(dtype: str, wish: str) -> None:
    tensor = encoded(dtype) if dtype != "F32" else floats(matrix())
    values = tensor.to_f32()
    columns = np.concatenate([np.arange(3, 40), [-1, -1, 255, -1, 0]])
    wanted = np.where(columns < 0, 0, values[:, columns])
    got = inside(pack(tensor, wish, columns=columns), wanted.shape)
    if wish == "f32":
        assert (got == wanted).all()
    else:
        assert_eight_bits(pack(tensor, wish, columns=columns), wanted)
    assert not got[:, columns < 0].any()


def test_both_at_once() -> None:
    values = matrix()
    rows, columns = np.array([2, -1, 1]), np.array([-1, 9, 8])
    got = weights(pack(floats(values), "f32", rows, columns))
    assert got.shape == (32, 32)
    assert got[0, 1] == values[2, 9]
    assert got[2, 2] == values[1, 8]
    assert np.count_nonzero(got) == 4


@pytest.mark.parametrize(("kind", "wish"), list(zip(MADE, DTYPES, strict=True)))
def test_words_for_the_plan(kind: str, wish: str) -> None:
    packed = pack(floats(matrix((70, 33))), wish)
    assert packed.words == (KINDS.index(kind), 3, 2, packed.data[0].nbytes)


def test_a_proxy_is_as_far_off_as_it_says() -> None:
    """Products differ by the distance times the length of x, and hardly less along the error."""
    head = pack(floats(matrix((70, 256))), "int8")
    found = proxy(head)
    assert found is not None
    estimate, distance = found
    own, common = np.split(weights(estimate), [len(distance)])
    lost = weights(head) - own - common[0]
    assert estimate.kind == "s5"
    assert not common[1:].any()
    assert distance == pytest.approx(np.linalg.norm(lost, axis=1), rel=0.01, abs=1e-3)
    x = np.concatenate([lost, matrix((9, 256), seed=1)]).astype(np.float32)
    values, scale = twins.to_bytes(x.reshape(len(x), -1, twins.GROUP))
    length = np.linalg.norm(values * scale[..., None].astype(np.float64), axis=(1, 2))
    values = values.reshape(x.shape)
    act_scales = twins.act_scales_of(values, scale)
    exact, about = (twins.linear(m.kind, m.data, values, act_scales) for m in (head, estimate))
    apart = np.abs(exact - about[:, : len(distance)] - about[:, [len(distance)]])
    most = length[:, None] * distance
    assert (apart <= most).all()
    along = np.arange(70)[distance[:70] > 1e-3]
    assert len(along) > 40
    assert (apart[along, along] > 0.97 * most[along, along]).all()


def test_a_proxy_takes_off_what_all_have_in_common() -> None:
    same, rows = np.random.default_rng(1).normal(0, 100, (2, 1, 256)), matrix((64, 256))
    alike, different = rows + same[0], rows + same[0] * np.where(np.arange(64) % 2, 1, -1)[:, None]
    distances = []
    for values in (alike, different):
        found = proxy(pack(floats(values.astype(np.float32)), "int8"))
        assert found is not None
        distances.append(np.median(found[1]))
    assert distances[0] < 0.1 * distances[1]


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_no_proxy_of_what_is_not_finite(scale: float) -> None:
    head = pack(floats(matrix()), "int8")
    head.data[1, 3, 1024:1026] = np.float16([scale]).view(np.uint8)
    assert proxy(head) is None


def test_four_bits_have_less_error_than_steps_from_the_least_to_the_largest() -> None:
    """In no block more, and in all together a tenth less; what 16 even steps hold is kept."""
    weights = np.random.default_rng(3).standard_normal((300, 128)).astype(np.float32)
    weights[0] = 0.0
    weights[1] = np.tile(np.arange(16, dtype=np.float32) * 0.5 - 3, 8)
    q, scale, offset = to_four_bits(weights)
    blocks = weights.reshape(300, 4, 32)

    def errors(
        steps: NDArray[np.float32], d: NDArray[np.float16], m: NDArray[np.float16]
    ) -> NDArray[np.float32]:
        wide = steps.astype(np.float32) * d.astype(np.float32)[..., None]
        return np.square(wide + m.astype(np.float32)[..., None] - blocks).sum(axis=2)

    low, high = blocks.min(axis=2), blocks.max(axis=2)
    d, m = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    unit = np.where(d == 0, 1, d.astype(np.float32))[..., None]
    plain = np.rint((blocks - m.astype(np.float32)[..., None]) / unit).clip(0, 15)
    found, before = errors(q.reshape(300, 4, 32), scale, offset), errors(plain, d, m)
    assert (found <= before * 1.0001).all()
    assert found.sum() < 0.9 * before.sum()
    assert not found[:2].any()
    assert q.max() <= 15
