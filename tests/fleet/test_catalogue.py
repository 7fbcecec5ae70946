"""Which names a router's models have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ridgeline.fleet.catalogue import Catalogue


def folder(path: Path, *names: str) -> Path:
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    return path


def test_a_folder_gives_files_and_directories_under_their_names(tmp_path: Path) -> None:
    folder(
        tmp_path,
        *("b.gguf", "big-00002-of-00002.gguf", "big-00001-of-00002.gguf", "notes.txt"),
        *("mmproj-b.gguf", "hf/config.json", "hf/model.safetensors", "empty/config.json"),
        *("A.Q4_K_M.GGUF", "upper.gguf.part"),
    )
    found = Catalogue(["smollm2", "owner/name:Q4_0"], tmp_path).models()
    assert list(found) == ["smollm2", "name:Q4_0", "A.Q4_K_M", "b", "big", "hf"]
    assert found["name:Q4_0"] == "owner/name:Q4_0"
    assert found["big"] == str(tmp_path / "big-00001-of-00002.gguf")


def test_a_folder_may_change(tmp_path: Path) -> None:
    catalogue = Catalogue(["smollm2"], tmp_path)
    assert catalogue.find("new") is None
    folder(tmp_path, "new.gguf")
    assert catalogue.find("new") == "new"
    (tmp_path / "new.gguf").unlink()
    assert catalogue.find("new") is None


def test_latest_says_nothing(tmp_path: Path) -> None:
    catalogue = Catalogue(["smollm2", "b:latest"], None)
    assert catalogue.find("smollm2:latest") == "smollm2"
    assert catalogue.find("b:latest") == "b:latest"
    assert catalogue.find("b") is None
    assert catalogue.find("smollm2:q4") is None


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two models are called 'm.gguf': a/m.gguf and b/m.gguf"):
        Catalogue(["a/m.gguf", "b/m.gguf"], None)
    folder(tmp_path, "m.gguf", "m/config.json", "m/model.safetensors")
    with pytest.raises(ValueError, match="two models are called 'm'"):
        Catalogue([], tmp_path)
    assert len(Catalogue(["x", "x"], None).models()) == 1


def test_no_folder_and_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        Catalogue(["smollm2"], tmp_path / "no")
    with pytest.raises(ValueError, match="there is no model in --models-dir"):
        Catalogue([], tmp_path)


def test_a_second_model_of_one_name_at_run_time_leaves_the_first(tmp_path: Path) -> None:
    catalogue, lines = Catalogue([], folder(tmp_path, "m.gguf", "z.gguf")), list[str]()
    catalogue.write = lines.append
    folder(tmp_path, "m/config.json", "m/model.safetensors")
    for _ in range(2):
        assert catalogue.models()["m"] == str(tmp_path / "m.gguf")
        assert list(catalogue.models()) == ["m", "z"]
    pair = f"{tmp_path / 'm.gguf'} and {tmp_path / 'm'}"
    assert lines == [f"warning: two models are called 'm': {pair}"], "once"
    (tmp_path / "m.gguf").unlink()
    assert catalogue.models()["m"] == str(tmp_path / "m")
    named = Catalogue(["a/m"], folder(tmp_path / "other", "b.gguf"))
    folder(tmp_path / "other", "m.gguf")
    assert named.models()["m"] == "a/m"


def test_a_folder_that_is_removed_at_run_time_leaves_the_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "models", "m.gguf")
    catalogue, lines = Catalogue(["smollm2"], place), list[str]()
    catalogue.write = lines.append
    place.rename(tmp_path / "away")
    assert [list(catalogue.models()) for _ in range(2)] == [["smollm2"]] * 2
    assert lines == [f"warning: --models-dir {place} cannot be read: No such file or directory"]
    (tmp_path / "away").rename(place)
    assert catalogue.find("m") == "m"


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_no_model(tmp_path: Path) -> None:
    folder(tmp_path, "m.gguf", "lost+found/config.json")
    (tmp_path / "lost+found").chmod(0)
    assert list(Catalogue([], tmp_path).models()) == ["m"]


def test_one_model_has_all_its_names() -> None:
    catalogue = Catalogue(["smollm2"], None, ["main", "other"])
    assert catalogue.models() == {"main": "smollm2"}
    assert [catalogue.find(name) for name in ("main", "other", "other:latest", "smollm2")] == [
        *["main"] * 3,
        None,
    ]
