"""Pulling models: what MODEL means, and models of the hub."""

from __future__ import annotations

import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ridgeline.hub.names import SHORT_NAMES, find_model, pulled_models
from ridgeline.hub.pull import pull
from ridgeline.models.tensors import ModelFileError


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_short_name_means_the_pulled_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run `ridgeline pull smollm2` first"):
        find_model("smollm2", tmp_path)
    path = tmp_path / "models" / SHORT_NAMES["smollm2"].file_name
    path.parent.mkdir()
    path.touch()
    assert find_model("smollm2", tmp_path) == path


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "x.GGUF").touch()
    monkeypatch.chdir(tmp_path)
    for model in ("owner/name", "./smollm2", "x.GGUF", str(tmp_path / "x.GGUF")):
        assert find_model(model, tmp_path) == pull(model, tmp_path) == Path(model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a \.gguf file.*directory"):
        find_model(str(tmp_path / "model.safetensors"), tmp_path)


@pytest.mark.parametrize(
    "model",
    ["", "../x", "owner/..", "owner/../../x", "a/b/c", "/no/where.gguf", "o/n.gguf", ".a/b",
     "a\\b", "owner/na me", "owner/name\n"],
)  # fmt: skip
def test_names_that_mean_nothing_touch_nothing(model: str, tmp_path: Path) -> None:
    for function in (find_model, pull):
        with pytest.raises(ValueError, match="there is no model"):
            function(model, tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_an_unknown_name_suggests_a_near_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'smolm2': did you mean 'smollm2'"):
        pull("smolm2", tmp_path)


def test_pulled_models_lists_whole_ones_only(tmp_path: Path) -> None:
    assert pulled_models(tmp_path) == {}
    models = tmp_path / "models"
    (models / "owner/name").mkdir(parents=True)
    (models / "owner/.other.partial").mkdir()
    (models / ".SmolLM2-135M-Instruct.Q4_1.gguf.partial").touch()
    assert pulled_models(tmp_path) == {"owner/name": models / "owner/name"}
    file = models / SHORT_NAMES["smollm2"].file_name
    file.touch()
    assert pulled_models(tmp_path)["smollm2"] == file


# The hub: its library is replaced by one that writes files, as no test may need a network


def fake_hub(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], wrong: str = "") -> None:
    def sibling(name: str, data: bytes) -> Any:
        sha256 = "0" * 64 if name == wrong else hashlib.sha256(data).hexdigest()
        lfs = types.SimpleNamespace(sha256=sha256)
        return types.SimpleNamespace(
            rfilename=name, lfs=lfs if name.endswith("safetensors") else None
        )

    def model_info(model: str, *, files_metadata: bool) -> Any:
        siblings = [sibling(name, data) for name, data in files.items()]
        return types.SimpleNamespace(sha="c0ffee", siblings=siblings)

    def snapshot_download(
        model: str, *, revision: str, local_dir: Path, allow_patterns: list[str]
    ) -> None:
        assert revision == "c0ffee"
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            (local_dir / name).write_bytes(files[name])

    hub = types.SimpleNamespace(model_info=model_info, snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]


def test_a_hub_model_becomes_a_directory_of_what_an_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"config.json": b"{}", "chat_template.jinja": b"", "model-1-of-1.safetensors": b"w"}
    others = {"pytorch_model.bin": b"", "a.py": b"", "onnx/config.json": b"", "../x.json": b"",
              "consolidated.safetensors": b"w", ".hidden.json": b""}  # fmt: skip
    fake_hub(monkeypatch, wanted | others)
    path = pull("owner/name", tmp_path)
    assert path == find_model("owner/name", tmp_path) == tmp_path / "models/owner/name"
    assert files_in(path) == set(wanted)
    assert files_in(path.parent) == {"name", ".name.lock"}
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert pull("owner/name", tmp_path) == path, "a whole model needs no hub"


def test_a_damaged_hub_file_is_removed_and_the_rest_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, {"config.json": b"", "model.safetensors": b""}, wrong="model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.safetensors of o/n arrived damaged"):
        pull("o/n", tmp_path)
    assert pulled_models(tmp_path) == {}
    assert files_in(tmp_path / "models/o/.n.partial") == {"config.json", ".cache"}


def test_a_hub_model_without_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, {"config.json": b"", "model.gguf": b""})
    with pytest.raises(ValueError, match=r"no \.safetensors files.*give its \.gguf file"):
        pull("o/n", tmp_path)


def test_a_hub_that_is_out_of_reach_gives_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnreachableError(Exception):
        pass

    def model_info(*_: object, **__: object) -> None:
        raise UnreachableError("no\nroute")

    hub = types.SimpleNamespace(model_info=model_info)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'o/n' from the hub \(no route\); download it where"):
        pull("o/n", tmp_path)


def test_without_the_hub_library_there_is_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="huggingface-hub: install it, or download"):
        pull("o/n", tmp_path)


# What ships


def test_the_default_model_is_the_announced_one() -> None:
    home = Path.home() / ".cache" / "ridgeline"
    if not (home / "models" / SHORT_NAMES["smollm2"].file_name).exists():
        pytest.skip("smollm2 has not been pulled to ~/.cache/ridgeline")
    path = pull("smollm2", home)
    assert path.stat().st_size == SHORT_NAMES["smollm2"].size
    assert find_model("smollm2", home) == pulled_models(home)["smollm2"] == path
