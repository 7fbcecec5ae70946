"""The GGUF reader: what is written comes back, and no lie in a file costs memory or time."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.engine.setup.home import default_home
from ridgeline.model.files.families import model_from_gguf
from ridgeline.model.files.gguf import file as gguf_module
from ridgeline.model.files.gguf.file import parse_gguf, read_gguf
from ridgeline.model.files.tensors import ModelFileError
from tests.lines_run import at_most_lines

REAL = default_home() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# fmt: off
TYPES = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "MXFP4",
]
# fmt: on


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def array(kind: int, length: int, items: bytes) -> bytes:
    return u32(kind) + u64(length) + items


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    lengths = b"".join(u64(d) for d in dims)
    return text(name) + u32(len(dims)) + lengths + u32(kind) + u64(offset)


def build(
    keys: list[bytes] = [],  # noqa: B006 - never changed
    infos: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    counts = u64(len(infos) if num_tensors is None else num_tensors)
    counts += u64(len(keys) if num_keys is None else num_keys)
    head = b"GGUF" + u32(version) + counts + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


def test_every_kind_of_metadata_comes_back(tmp_path: Path) -> None:
    scalars: dict[str, Any] = {
        "uint8": 200, "int8": -7, "uint16": 65535, "int16": -3, "uint32": 2**32 - 1,
        "int32": -(2**31), "float32": 0.5, "bool": True, "string": "grüße", "uint64": 2**63,
        "int64": -(2**63), "float64": 1e300,
    }  # fmt: skip
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "any")
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("strings", ["a", "", "ü" * 300])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.25, -1.5])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata, tensors = read_gguf(path)
    assert {k: metadata[k] for k in scalars} == scalars
    assert {k: type(metadata[k]) for k in scalars} == {k: type(v) for k, v in scalars.items()}
    assert metadata["strings"] == ["a", "", "ü" * 300]
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert metadata["floats"].tolist() == [0.25, -1.5]
    assert metadata["bools"].tolist() == [True, False]
    assert metadata["bools"].dtype == np.bool_
    assert tensors == {}


@pytest.mark.parametrize("kind", TYPES)
def test_every_tensor_type_comes_back(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(3)
    # Below 0x70 no two bytes are an infinite half-precision scale.
    data = rng.integers(0, 0x70, (2, 3, 512 // block * block_bytes), dtype=np.uint8)
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "any")
    writer.add_tensor("first", np.ones(5, np.float32))
    writer.add_tensor("w", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    tensors = read_gguf(path)[1]
    tensor = tensors["w"]
    assert (tensor.dtype, tensor.shape) == (kind, (2, 3, 512))
    assert tensor.data.dtype == np.uint8
    assert not tensor.data.flags.writeable
    assert not tensor.data.flags.owndata
    np.testing.assert_array_equal(tensor.data, data.reshape(6, -1))
    wanted = gguf.quants.dequantize(data.reshape(6, -1), number).reshape(2, 3, 512)
    np.testing.assert_array_equal(tensor.to_f32(), wanted)
    vector = tensors["first"].rows(slice(1, 3))
    assert vector.shape == (2,)
    assert vector.to_f32().tolist() == [1.0, 1.0]


def test_two_versions_and_a_larger_alignment() -> None:
    aligned = key("general.alignment", 4, u32(64))
    ones = np.ones(16, "<f4").tobytes()
    head = build([aligned], [info("a", [16]), info("b", [16], offset=64)], version=2)
    head += bytes(-len(head) % 64)
    tensors = parse_gguf(head + ones + 2 * ones, "x")[1]
    assert tensors["a"].to_f32().tolist() == [1.0] * 16
    assert tensors["b"].to_f32().tolist() == [1.0] * 16


HOSTILE: dict[str, tuple[bytes, str]] = {
    "keys": (build(num_keys=2**64 - 1), "metadata keys"),
    "keys that could fit": (build(num_keys=2**20, data=bytes(2**24)), "metadata keys"),
    "tensors": (build(num_tensors=2**63), "tensors"),
    "a key's length": (build([u64(2**63) + b"k"]), "key 0"),
    "a length one past the end": (b"GGUF" + u32(3) + u64(0) + u64(1) + u64(9) + b"12345678", "key"),
    "a string's length": (build([key("s", 8, u64(2**60))]), "'s'"),
    "an array of numbers": (build([key("a", 9, array(4, 2**60, b""))]), "'a'"),
    "an array whose bytes wrap": (build([key("a", 9, array(10, 2**61, b""))]), "'a'"),
    "an array of strings": (build([key("a", 9, array(8, 2**60, b""))]), "'a'"),
    "many empty strings": (build([key("a", 9, array(8, 3 << 20, bytes(24 << 20)))]), "'a'"),
    "a nested array": (build([key("a", 9, array(9, 1, array(4, 1, u32(1))))]), "arrays"),
    "an unknown element type": (build([key("a", 9, array(99, 1, u32(1)))]), "99"),
    "an unknown value type": (build([key("a", 13, u32(1))]), "13"),
    "a key twice": (build([key("a", 4, u32(1)), key("a", 4, u32(1))]), "'a' appears twice"),
    "no UTF-8": (build([key("a", 8, text(b"\xff\xfe"))]), "UTF-8"),
    "alignment 0": (build([key("general.alignment", 4, u32(0))]), "alignment"),
    "alignment 3": (build([key("general.alignment", 4, u32(3))]), "alignment"),
    "alignment 48": (build([key("general.alignment", 4, u32(48))]), "alignment"),
    "alignment 2**31": (build([key("general.alignment", 4, u32(2**31))]), "alignment"),
    "alignment as text": (build([key("general.alignment", 8, text("32"))]), "alignment"),
    "no dimensions": (build([], [info("t", [])]), "'t' has 0 dimensions"),
    "many dimensions": (build([], [info("t", [1] * 5)]), "'t' has 5 dimensions"),
    "2**32 dimensions": (build([], [text("t") + u32(2**32 - 1) + bytes(64)]), "'t'"),
    "a huge dimension": (build([], [info("t", [2**63])], bytes(64)), "'t'"),
    "a product that wraps": (build([], [info("t", [2**32, 2**32])], bytes(64)), "'t'"),
    "an empty tensor": (build([], [info("t", [4, 0])], bytes(64)), "'t' of shape"),
    "an unknown type": (build([], [info("t", [4], kind=200)], bytes(64)), "number 200"),
    "an unsupported type": (build([], [info("t", [4], kind=28)], bytes(64)), "F64"),
    "half a block": (build([], [info("t", [16, 2], kind=2)], bytes(64)), "whole blocks"),
    "an offset past the end": (build([], [info("t", [4], offset=2**40)], bytes(64)), "'t'"),
    "an end past the end": (build([], [info("t", [4], offset=64)], bytes(64)), "cut short"),
    "an offset that wraps": (build([], [info("t", [4], offset=2**64 - 32)], bytes(64)), "'t'"),
    "a crooked offset": (build([], [info("t", [4], offset=8)], bytes(64)), "alignment"),
    "overlap": (
        build([], [info("a", [16]), info("b", [8], offset=32)], bytes(128)),
        "'a' and 'b' overlap",
    ),
    "the same bytes": (build([], [info("a", [8]), info("b", [8])], bytes(128)), "overlap"),
    "a tensor twice": (
        build([], [info("t", [8]), info("t", [8], offset=32)], bytes(128)),
        "'t' appears twice",
    ),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    "version 1": (build(version=1), "version 1"),
    "version 9": (build(version=9), "version 9"),
    "another format": (b"PK\x03\x04" + bytes(64), "not a GGUF"),
    "nothing but the magic": (b"GGUF", "version"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_hostile_file_is_refused_at_once(lie: str, tmp_path: Path) -> None:
    content, named = HOSTILE[lie]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught, at_most_lines(50_000):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("element", [4, 8], ids=["numbers", "strings"])
def test_a_sparse_file_cannot_back_a_lie(element: int, tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(build([key("a", 9, array(element, 2**28, b""))]))
    os.truncate(path, 1 << 32)
    with pytest.raises(ModelFileError, match="'a' claims"), at_most_lines(50_000):
        read_gguf(path)
    path.write_bytes(build([key("a", 8, u64(2**31))]))
    os.truncate(path, 1 << 32)
    with pytest.raises(ModelFileError, match="'a' reaches past"), at_most_lines(50_000):
        read_gguf(path)


def test_a_vocabulary_is_read_quickly() -> None:
    words = b"".join(text(f"word{i}") for i in range(150_000))
    scores = np.arange(150_000, dtype="<f4")
    content = build(
        [
            key("words", 9, array(8, 150_000, words)),
            key("s", 9, array(6, 150_000, scores.tobytes())),
        ]
    )
    with at_most_lines(150_000):
        metadata, _ = parse_gguf(content, "x")
    assert metadata["words"][149_999] == "word149999"
    np.testing.assert_array_equal(metadata["s"], scores)


ODD = ["a", "Ġthe", "\0", "a\0", "\0b", "", "\0" * 7, "\0" * 9, "x" * 255, "y" * 256, "ü" * 200]
WORDS = st.one_of(st.sampled_from(ODD), st.text(max_size=4))
# Seen without its third byte, the length is 3, and what follows looks like another string.
FALSE_FRIEND = ("\0bc" + "\2" + "\0" * 7 + "hi").ljust(65536 + 3, "z")


@given(words=st.lists(WORDS, max_size=80), window=st.integers(1, 700), many=st.integers(1, 9))
@example(words=[FALSE_FRIEND, "a"], window=64 << 10, many=1)
def test_strings_read_together_are_the_strings(words: list[str], window: int, many: int) -> None:
    content = build([key("words", 9, array(8, len(words), b"".join(map(text, words))))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_module, "_WINDOW_BYTES", window)
        patch.setattr(gguf_module, "_MANY", many)
        assert parse_gguf(content, "x")[0]["words"] == words


@given(words=st.lists(st.binary(max_size=5), min_size=1, max_size=40), cut=st.integers(0, 300))
def test_strings_read_together_take_nothing_on_trust(words: list[bytes], cut: int) -> None:
    """As one by one: the same strings, or the same words about the same one of them."""
    whole = build([key("words", 9, array(8, len(words), b"".join(map(text, words))))])
    for content in (whole, whole[: max(40, len(whole) - cut)]):
        outcomes = []
        for many in (1, 1 << 20):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gguf_module, "_MANY", many)
                try:
                    outcomes.append(str(parse_gguf(content, "x")[0]))
                except ModelFileError as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def _outcome(content: bytes) -> str:
    """Load a damaged file down to the decoded rows; anything but an error of ours is a failure."""
    try:
        metadata, raw = parse_gguf(content, "fuzz")
        for tensor in model_from_gguf(metadata, raw, "fuzz")[1].values():
            assert tensor.to_f32().shape == tensor.shape
    except ModelFileError:
        return "refused"
    return "loaded"


def test_a_file_cut_anywhere_is_refused(tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    assert _outcome(content) == "loaded"
    for cut in [*range(0, 6000, 13), *range(6000, len(content) - 32, 997)]:
        assert _outcome(content[:cut]) == "refused", cut


def test_flipped_bits_are_survived(tiny_gguf: Path) -> None:
    content = np.frombuffer(tiny_gguf.read_bytes(), np.uint8)
    header_bytes = content.tobytes().rindex(b".weight") + 40
    assert header_bytes > 2000
    rng = np.random.default_rng(11)
    outcomes = []
    for _ in range(4000):
        damaged = content.copy()
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(header_bytes)] ^= 1 << rng.integers(8)
        outcomes.append(_outcome(damaged.tobytes()))
    assert outcomes.count("refused") > 300
    assert outcomes.count("loaded") > 200  # a key that nobody knows is refused


def test_a_real_file_has_the_shapes_of_its_architecture() -> None:
    if not REAL.is_file():
        pytest.skip(f"{REAL} is missing; fetch it with: ridgeline pull smollm2")
    metadata, raw = read_gguf(REAL)
    arch, tensors = model_from_gguf(metadata, raw, str(REAL))
    first = arch.layers[0].mixer
    assert (arch.num_layers, arch.hidden_size) == (30, 576)
    assert (first.num_heads, first.num_kv_heads) == (9, 3)
    assert arch.tied_embeddings
    assert {name: t.shape for name, t in tensors.items()} == arch.matrix_shapes()
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert np.isfinite(tensors["layers.29.down"].to_f32()).all()
