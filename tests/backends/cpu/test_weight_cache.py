"""Packed weights on disk: what is read is what was packed, and what is damaged is packed again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

import gguf as gguf_package
import numpy as np
import pytest
from safetensors.numpy import save_file

import ridgeline
from ridgeline.backends.cpu.layout import model_weights as weights
from ridgeline.backends.cpu.layout import weight_cache
from ridgeline.backends.cpu.layout.weight_cache import PackedArray
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.model.files.tensors import Checkpoint, Tensor
from ridgeline.system.machine import write_whole
from tests.model.files.tiny import (
    CONFIG,
    gguf_metadata,
    gguf_weights,
    hf_weights,
    vocabulary,
    write_gguf,
)
from tests.tiny import PLAIN, changed, checkpoint, random_arrays

ARRAYS = {
    "layers.0.q": PackedArray("w4", np.arange(2 * 3 * 640, dtype=np.uint8).reshape(2, 3, 640)),
    "norm": PackedArray("", np.linspace(0, 1, 33, dtype=np.float32)),
    "embedding": PackedArray("", np.ones((5, 7), np.float16)),
}


def _write(path: Path, arrays: Iterable[tuple[str, PackedArray]]) -> bool:
    return weight_cache.write(path.parent, lambda: path.name, arrays) is not None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "key.weights"
    assert _write(path, ARRAYS.items())
    return path


def test_what_is_read_is_what_was_written(path: Path) -> None:
    found = weight_cache.read(path)
    assert list(found) == list(ARRAYS)
    for name, (kind, data) in ARRAYS.items():
        assert found[name].kind == kind
        np.testing.assert_array_equal(found[name].data, data)
        assert found[name].data.dtype == data.dtype
        assert found[name].data.ctypes.data % 64 == 0
    assert [file.name for file in path.parent.iterdir()] == ["key.weights"]


def test_arrays_stay_in_the_file(path: Path) -> None:
    """Which is what makes a start short: nothing is copied. Nobody here may write there."""
    found = weight_cache.read(path)
    content = bytearray(path.read_bytes())
    for name in ("norm", "embedding"):
        place = content.find(ARRAYS[name].data.tobytes())
        content[place : place + 8] = bytes(8)
    path.write_bytes(content)
    assert found["norm"].data[:2].tolist() == [0, 0]
    assert found["embedding"].data[0, :4].tolist() == [0, 0, 0, 0]
    assert not found["norm"].data.flags.writeable


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of some blocks, the last of which is not whole."""
    path = tmp_path_factory.mktemp("large") / "key.weights"
    values = np.random.default_rng(1).integers(0, 256, 2_500_000, np.uint8)
    assert _write(path, {**ARRAYS, "head": PackedArray("w8", values.reshape(2, -1))}.items())
    return path


def _index_changed(content: bytes, name: str, place: int, value: object) -> bytes:
    length = int.from_bytes(content[-8:], "little")
    index = json.loads(content[-8 - length : -8])
    index[name][place] = value
    text = json.dumps(index).encode()
    return content[: -8 - length] + text + len(text).to_bytes(8, "little")


@pytest.mark.parametrize(
    "damage",
    {
        "empty": lambda c: b"",
        "shorter than its head": lambda c: c[:7],
        "cut in the middle": lambda c: c[: len(c) // 2],
        "cut by one": lambda c: c[:-1],
        "longer": lambda c: c + b"\0",
        "nonsense": lambda c: np.random.default_rng(2).bytes(10_000),
        "a block that was never written": lambda c: c[: 1 << 20] + bytes(1 << 20) + c[2 << 20 :],
        "the beginning was never written": lambda c: bytes(1 << 20) + c[1 << 20 :],
        "the end was never written": lambda c: c[:-4096] + bytes(4096),
        "a shape": lambda c: _index_changed(c, "head", 2, [1, 1_250_000]),
        "a negative shape": lambda c: _index_changed(c, "head", 2, [-1]),
        "a place": lambda c: _index_changed(c, "norm", 3, 0),
        "a type": lambda c: _index_changed(c, "head", 1, "<f8"),
        "a kind": lambda c: _index_changed(c, "head", 0, "x"),
        "a huge index": lambda c: c[:-8] + (1 << 63).to_bytes(8, "little"),
        "a deep index": lambda c: c[:-100_008] + b"[" * 100_000 + (100_000).to_bytes(8, "little"),
    }.items(),
    ids=lambda damage: damage[0],
)
def test_a_damaged_file_is_not_used(
    large: Path, tmp_path: Path, damage: tuple[str, Callable[[bytes], bytes]]
) -> None:
    damaged = tmp_path / large.name
    damaged.write_bytes(damage[1](large.read_bytes()))
    with pytest.raises(ValueError, match="damaged"):
        weight_cache.read(damaged)


def test_no_bit_of_a_file_may_change(large: Path, tmp_path: Path) -> None:
    """Only what fills the first page, which nobody reads, may."""
    content, rng = large.read_bytes(), np.random.default_rng(3)
    index_at = len(content) - 8 - int.from_bytes(content[-8:], "little")
    of_tail = [index_at - 1, index_at, len(content) - 1]
    places = [0, 31, 32, 39, 4096, *of_tail, *rng.integers(4096, len(content), 50).tolist()]
    damaged = tmp_path / large.name
    for place in places:
        changed_ = bytearray(content)
        changed_[place] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(changed_)
        with pytest.raises(ValueError, match="damaged"):
            weight_cache.read(damaged)


def test_a_file_of_another_model_is_not_used(large: Path, tmp_path: Path) -> None:
    shutil.copy(large, tmp_path / "other.weights")
    with pytest.raises(ValueError, match="of another model"):
        weight_cache.read(tmp_path / "other.weights")


def test_the_digest_of_all_arrays_is_in_the_file(large: Path) -> None:
    """It depends on what is in them, and is no business of the file's name."""
    content = large.read_bytes()
    tail_at = int.from_bytes(content[32:40], "little")
    assert content[tail_at : tail_at + 32] == hashlib.sha256(content[4096:tail_at]).digest()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        weight_cache.read(tmp_path / "absent")
    with pytest.raises(OSError, match="directory"):
        weight_cache.read(tmp_path)


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, order = tmp_path / "key.weights", []
    fsync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        order.append("folder" if is_folder else os.fstat(descriptor).st_size)
        fsync(descriptor)

    def renamed(old: str, new: Path) -> None:
        order.append("name")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    _write(path, ARRAYS.items())
    assert order == [path.stat().st_size, "name", "folder"]


def test_a_directory_that_cannot_be_written_is_only_slower(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not _write(tmp_path / "file" / "key.weights", ARRAYS.items())
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_file_is_not_there_nor_is_part_of_it(path: Path) -> None:
    """Packing a large model takes long enough for somebody to press Ctrl-C."""
    before = path.read_bytes()

    def interrupted(file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [before]


def _on_disk(model: Checkpoint, path: Path) -> Checkpoint:
    """Return a model as if it had been read from a file there."""
    path.write_bytes(b"as good as any")
    return replace(model, path=path, contents=FileDigests({path.name: path}))


def _name(path: Path, dtype: str) -> str:
    contents = hashlib.sha256(path.read_bytes()).hexdigest()
    return weight_cache.file_name(weight_cache.place_of(path, dtype), contents)


def test_the_name_follows_contents_place_and_dtype(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    first = _name(model, "auto")
    assert _name(model, "auto") == first
    assert _name(model, "int8") != first
    model.write_bytes(b"two")
    assert _name(model, "auto") != first
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.gguf").write_bytes(b"one")
    assert _name(tmp_path / "other" / "model.gguf", "auto") != first


@pytest.mark.parametrize("layout", ["GGUF", "directory"])
def test_all_code_that_a_tensor_passes_is_in_the_name(layout: str, tmp_path: Path) -> None:
    """Whoever mends a wrong permutation must not find the old weights again."""
    if layout == "GGUF":
        metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
        model = load_checkpoint(
            write_gguf(tmp_path / "m.gguf", metadata, gguf_weights(CONFIG, "llama"))
        )
    else:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "tokenizer.json").write_text('{"model": {}}')
        save_file(hf_weights(CONFIG), tmp_path / "model.safetensors")
        model = load_checkpoint(tmp_path)
    o = model.tensors["layers.0.o"]
    # Padded heads move its columns, so its blocks are decoded: by the gguf package.
    foreign = Tensor("o", "IQ4_NL", o.shape, np.zeros((o.shape[0], 18), np.uint8))
    model = replace(model, tensors=dict(model.tensors) | {"layers.0.o": foreign})
    sizes, passed = weights.model_sizes(model.arch, "auto", "int8"), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        passed.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        load_checkpoint(model.path)
        dict(weights._pack_all(model, sizes, "auto", lambda done, total: None))
    finally:
        sys.setprofile(before)
    ours, gguf = Path(ridgeline.__file__).parent, Path(gguf_package.__file__).parent
    passed_files = {Path(name) for name in passed if Path(name).is_relative_to(ours)}
    assert {path.name for path in passed_files} >= {"layers.py", "tensors.py", "pack.py"}
    assert gguf / "quants.py" in set(map(Path, passed))
    assert passed_files | {gguf / "quants.py"} <= set(weight_cache.sources())


def test_facts_of_physics_that_models_are_bound_by_are_in_the_name() -> None:
    """Of families that no tensor above belongs to, too."""
    ours = Path(ridgeline.__file__).parent
    wanted, left = set[Path](), set((ours / "model" / "files").rglob("*.py"))
    while left:
        path = left.pop()
        names = re.findall(r"^from ridgeline\.model\.cost\.(\w+) import", path.read_text(), re.M)
        new = {ours / "model" / "cost" / f"{name}.py" for name in names} - wanted
        wanted |= new
        left |= new
    assert len(wanted) > 1
    assert wanted <= set(weight_cache.sources())


def test_the_name_follows_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    sources = weight_cache.sources()
    copies = [tmp_path / f"{i}.py" for i in range(len(sources))]
    for source, copy in zip(sources, copies, strict=True):
        shutil.copy(source, copy)
    monkeypatch.setattr(weight_cache, "sources", lambda: copies)
    names = {_name(model, "auto")}
    for copy in copies:
        with copy.open("a") as file:
            file.write("# a fix")
        names.add(_name(model, "auto"))
    monkeypatch.setattr(np, "__version__", "1.0")
    names.add(_name(model, "auto"))
    assert len(names) == len(copies) + 2


def test_what_is_out_of_date_goes_and_nothing_else(tmp_path: Path) -> None:
    model, other = tmp_path / "model[1].gguf", tmp_path / "elsewhere" / "model[1].gguf"
    other.parent.mkdir()
    cache, names = tmp_path / "packed", []
    for path, dtype, content in (
        (model, "auto", b"one"), (model, "int8", b"one"), (other, "auto", b"one"),
        (model, "auto", b"other"),
    ):  # fmt: skip
        path.write_bytes(content)
        names.append(_name(path, dtype))
        _write(cache / names[-1], ARRAYS.items())
    assert sorted(file.name for file in cache.iterdir()) == sorted(names[1:])


def test_only_models_worth_it_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = _on_disk(checkpoint(PLAIN), tmp_path / "tiny.gguf"), tmp_path / "packed"
    sizes, packs = weights.model_sizes(PLAIN, "int8", "int8"), []
    pack_all = weights._pack_all
    monkeypatch.setattr(weights, "_pack_all", lambda *args: packs.append(1) or pack_all(*args))

    def load() -> weights.Weights:
        return weights.load_weights(model, sizes, "int8", 64, cache, lambda done, total: None)

    load()
    assert not cache.exists()
    monkeypatch.setattr(weights, "_WORTH_KEEPING_BYTES", model.nbytes)
    first, again = load(), load()
    assert len(packs) == 2
    assert first.is_mapped
    assert again.is_mapped
    assert first.arrays.keys() == again.arrays.keys()
    for name, (kind, data) in first.arrays.items():
        assert (kind, data.tobytes()) == (
            again.arrays[name].kind,
            again.arrays[name].data.tobytes(),
        )


def test_a_damaged_file_is_named_once_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _on_disk(checkpoint(PLAIN), tmp_path / "tiny.gguf")
    monkeypatch.setattr(weights, "_WORTH_KEEPING_BYTES", 1)
    sizes, said = weights.model_sizes(PLAIN, "int8", "int8"), list[str]()

    def load() -> bytes:
        found = weights.load_weights(
            model, sizes, "int8", 64, tmp_path / "packed", lambda done, total: None, said.append
        )
        assert found.is_mapped
        return b"".join(data.tobytes() for _, data in found.arrays.values())

    good = load()
    assert not said
    (path,) = (tmp_path / "packed").glob("*.weights")
    content = path.read_bytes()
    path.write_bytes(content[:5000] + b"damage" + content[5006:])
    assert load() == good
    assert said == [
        f"{path} cannot be used, so the weights are packed again: it is damaged at byte 4,096 or "
        "behind"
    ]
    assert path.read_bytes() == content
    assert load() == good
    assert len(said) == 1


def test_what_cannot_be_kept_is_packed_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packed").write_text("in the way")
    model = _on_disk(checkpoint(PLAIN), tmp_path / "tiny.gguf")
    monkeypatch.setattr(weights, "_WORTH_KEEPING_BYTES", 1)
    sizes = weights.model_sizes(PLAIN, "int8", "int8")
    found = weights.load_weights(
        model, sizes, "int8", 64, tmp_path / "packed", lambda done, total: None
    )
    assert not found.is_mapped
    assert found.arrays["embedding"].data.any()


def test_packing_needs_no_memory_for_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix goes to the file when it is packed: a model may be larger than memory."""
    arch = changed(PLAIN, windows=(None,) * 24)
    model = _on_disk(checkpoint(arch), tmp_path / "tiny.gguf")
    monkeypatch.setattr(weights, "_WORTH_KEEPING_BYTES", 1)
    sizes = weights.model_sizes(arch, "f32", "int8")
    tracemalloc.start()
    found = weights.load_weights(model, sizes, "f32", 64, tmp_path, lambda done, total: None)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < sum(data.nbytes for _, data in found.arrays.values()) / 3


@pytest.mark.parametrize("dtype", ["f32", "bf16", "auto", "int8-row", "int4"])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_numpy_says_nothing_of_damaged_weights(value: float, dtype: str) -> None:
    """The answers' own error is one line. A warning (here an error) would be two, with a path."""
    arch = changed(PLAIN, qkv_bias=True)
    sizes = weights.model_sizes(arch, dtype, "int8")
    for name in arch.matrix_shapes():
        arrays = random_arrays(arch)
        arrays[name].reshape(-1)[3] = value
        damaged = checkpoint(arch, arrays)
        weights.load_weights(damaged, sizes, dtype, 64, None, lambda done, total: None)
