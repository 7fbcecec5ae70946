"""Models in several GGUF files: read as one, and what does not fit together is named."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.gguf.parts import part_paths
from ridgeline.model.files.tensors import ModelFileError
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf


def write_parts(folder: Path, count: int = 3, **changes: dict[str, Any]) -> list[Path]:
    """The tiny model in parts; ``part2={...}`` changes the metadata of the second."""
    weights = list(gguf_weights(CONFIG, "llama").items())
    paths = []
    for number in range(count):
        metadata = {"general.architecture": "llama", "split.no": number, "split.count": count}
        if number == 0:
            metadata |= gguf_metadata(CONFIG, "llama") | vocabulary()
            metadata["split.tensors.count"] = len(weights)
        metadata |= changes.get(f"part{number + 1}", {})
        path = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, metadata, dict(weights[number::count])))
    return paths


def test_parts_are_one_model(tmp_path: Path, tiny_gguf: Path) -> None:
    whole = load_checkpoint(tiny_gguf)
    paths = write_parts(tmp_path)
    for path in paths:
        found = load_checkpoint(path)
        assert found.path == paths[0]
        assert found.arch == whole.arch
        assert found.tensors.keys() == whole.tensors.keys()
        for name, tensor in found.tensors.items():
            np.testing.assert_array_equal(tensor.data, whole.tensors[name].data)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("m.gguf", 1),
        ("m-00001-of-00001.gguf", 1),
        ("m-1-of-2.gguf", 1),
        ("m-00002-of-00004.GGUF", 4),
        ("m-00001-of-00002.bin", 1),
    ],
)
def test_parts_are_told_by_their_names(name: str, count: int) -> None:
    paths = list(part_paths(Path("/x") / name))
    assert len(paths) == count
    assert Path("/x") / name in paths


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf is missing beside it"):
        load_checkpoint(paths[0])


def test_a_name_that_says_many_parts_costs_nothing(tmp_path: Path) -> None:
    path = write_parts(tmp_path)[0].rename(tmp_path / "m-00001-of-99999.gguf")
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=r"m-00002-of-99999\.gguf is missing beside it"):
            load_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part2": {"split.no": 2}}, r"m-00002.*it is part 3 of 3, not 2 of 3"),
        ({"part3": {"split.count": 4}}, r"m-00003.*it is part 3 of 4, not 3 of 3"),
        ({"part1": {"split.count": 2}}, r"m-00001.*one of 2 parts, but its name says 3"),
        ({"part1": {"split.tensors.count": 99}}, r"have \d+ tensors, not 99; fetch them again"),
    ],
    ids=str,
)
def test_parts_that_do_not_belong_together(
    changes: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_checkpoint(write_parts(tmp_path, **changes)[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    weights = dict(list(gguf_weights(CONFIG, "llama").items())[:1])
    metadata = {"general.architecture": "llama", "split.no": 1, "split.count": 3}
    write_gguf(paths[1], metadata, weights)
    with pytest.raises(ModelFileError, match=r"m-00002.*tensor '.*' is in another part too"):
        load_checkpoint(paths[0])


def test_a_renamed_part_says_how_parts_are_named(tmp_path: Path) -> None:
    path = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"parts are named as NAME-00001-of-00003\.gguf"):
        load_checkpoint(path)
