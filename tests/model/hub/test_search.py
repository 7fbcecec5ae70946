"""What MODEL means: names, paths, and models that other programs have put on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.setup.home import stores as users_stores
from ridgeline.model.hub.library import HubName, parse_hub_name
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.pull import pull
from ridgeline.model.hub.search import NotPulledError, find_model
from ridgeline.model.hub.short_names import ALIASES, SHORT_NAMES, packaged

ROOM = 8 << 30


@pytest.fixture
def stores(tmp_path: Path) -> ModelStores:
    return ModelStores.of(tmp_path / "home", {}, tmp_path / "user")


def find(model: str, stores: ModelStores) -> Path:
    return find_model(model, stores, ROOM).path


def write(path: Path, data: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SHORT_NAMES, *ALIASES])
def test_a_short_name_means_the_pulled_file(name: str, stores: ModelStores) -> None:
    with pytest.raises(NotPulledError, match=f"run `ridgeline pull {name}` first"):
        find(name, stores)
    entry = packaged(name)
    assert entry is not None
    write(entry.weights(stores.home / "models"))
    assert find(name, stores) == stores.home / "models" / entry.file_name
    assert find_model(name, stores, ROOM).sampling == entry.sampling
    assert bool(entry.sampling) is not entry.is_folder  # a folder says it itself


def test_short_names_are_whole() -> None:
    for entry in SHORT_NAMES.values():
        hashes = [entry.sha256, *(part.wheel_sha256 for part in entry.parts)]
        assert all(len(digest) == 64 and int(digest, 16) for digest in hashes)
        assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("o/n", HubName("o/n", "")),
        ("o/n:Q4_K_M", HubName("o/n", "Q4_K_M")),
        ("hf.co/o/n:m-Q8_0.gguf", HubName("o/n", "m-Q8_0.gguf")),
        ("https://huggingface.co/o/n/", HubName("o/n", "")),
        ("hf://o/N-2.5_b", HubName("o/N-2.5_b", "")),
        ("o/n@v1.0", HubName("o/n", "", "v1.0")),
        ("hf.co/o/n@c0ffee:Q4_K_M", HubName("o/n", "Q4_K_M", "c0ffee")),
        ("o/n@", None),
        ("o/n@../x", None),
        ("o/n:Q4_K_M@v1", None),
        ("o", None),
        ("o/n/x", None),
        ("o/n.gguf", None),
        ("o/n:a/b", None),
        ("o/n:", None),
        ("https://example.org/o/n", None),
    ],
)
def test_names_of_the_hub(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_paths_are_taken_as_they_are(
    tmp_path: Path, stores: ModelStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "x.GGUF").touch()
    monkeypatch.chdir(tmp_path)
    for model in ("owner/name", "./smollm2", "x.GGUF", str(tmp_path / "x.GGUF")):
        assert find(model, stores) == pull(model, stores, budget_bytes=ROOM).path == Path(model)


def test_other_files_are_refused(tmp_path: Path, stores: ModelStores) -> None:
    file = write(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a \.gguf file.*directory"):
        find(str(file), stores)


@pytest.mark.parametrize(
    "model",
    ["", "owner/..", "owner/../../x", "a/b/c", "/no/where.gguf", "o/n.gguf", ".a/b", "a\\b",
     "owner/na me", "owner/name\n", "ollama:../../x", "ollama:"],
)  # fmt: skip
def test_names_that_mean_nothing_touch_nothing(model: str, stores: ModelStores) -> None:
    is_path = model.startswith("/") or model.endswith(".gguf")
    named = "there is no model '.*': no such file or directory$" if is_path else "there is no model"
    with pytest.raises(ValueError, match=named):
        find(model, stores)
    with pytest.raises(ValueError, match="there is no model"):
        pull(model, stores, budget_bytes=ROOM)
    assert not stores.home.exists()


def test_an_unknown_name_suggests_a_near_one(stores: ModelStores) -> None:
    near = "'smollm2' or 'smollm3' or 'smollm2:1.7b'"
    with pytest.raises(ValueError, match=rf"'smolm2': did you mean {near}\?"):
        find("smolm2", stores)


def test_a_name_that_is_near_one_of_those_here_suggests_it(stores: ModelStores) -> None:
    write(stores.home / "models/o/my-own-model/m-Q8_0.gguf")
    with pytest.raises(ValueError, match="did you mean 'o/my-own-model:Q8_0'"):
        find("my own modl q8", stores)


# --- what lies here already -----------------------------------------------------------------------


def test_only_whole_models_are_listed(stores: ModelStores) -> None:
    assert list(stores.all()) == []
    models = stores.home / "models"
    write(models / "o/half/config.json")
    write(models / "o/.other.partial/m-Q8_0.gguf")
    write(models / ".SmolLM2-135M-Instruct.Q4_1.gguf.partial")
    write(models / "o/parts/m-Q8_0-00001-of-00002.gguf")
    assert list(stores.all()) == []
    write(models / "o/half/model.safetensors")
    write(models / SHORT_NAMES["smollm2"].file_name)
    assert [place.name for place in stores.all()] == ["smollm2", "o/half"]


def cached(stores: ModelStores, *files: str, main: bool = True) -> Path:
    """The hub's cache with a repository o/n: names are links into its blobs."""
    folder = stores.hub_cache / "models--o--n"
    snapshot = folder / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(files):
        blob = write(folder / "blobs" / str(i), b"x" * (i + 1))
        (snapshot / file).symlink_to(blob)
    if main:
        write(folder / "refs" / "main", b"c0ffee")
    return snapshot


@pytest.mark.parametrize("main", [True, False])
def test_the_hubs_cache_is_read_where_it_lies(stores: ModelStores, main: bool) -> None:
    snapshot = cached(stores, "config.json", "model.safetensors", main=main)
    assert find("o/n", stores) == snapshot
    (place,) = stores.all()
    assert (place.name, place.owner, place.size) == ("o/n", "hub cache", 3)


def test_a_revision_in_the_hubs_cache_is_a_branch_or_a_commit(stores: ModelStores) -> None:
    newest = cached(stores, "m-Q8_0.gguf")
    old = newest.with_name("0ld")
    write(old / "m-Q8_0.gguf")
    write(newest.parents[1] / "refs" / "v1", b"0ld\n")
    for name in ("o/n@v1", "o/n@0ld", "o/n@v1:Q8_0"):
        assert find(name, stores) == old / "m-Q8_0.gguf"
    assert find("o/n", stores) == find("o/n@main", stores) == newest / "m-Q8_0.gguf"
    for name in ("o/n@v2", "o/n@v1:Q4_0"):
        with pytest.raises(NotPulledError):
            find(name, stores)


def test_ggufs_in_the_hubs_cache(stores: ModelStores) -> None:
    snapshot = cached(stores, "m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf")
    assert find("o/n:Q4_0", stores) == snapshot / "m-Q4_0.gguf"
    assert find("o/n", stores) == snapshot / "m-Q8_0.gguf"
    assert "best of 2" in find_model("o/n", stores, ROOM).note
    with pytest.raises(NotPulledError):
        find("o/n:Q5_0", stores)


def test_shards_that_are_missing_are_pulled(stores: ModelStores) -> None:
    snapshot = cached(stores, "config.json", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    write(snapshot / "model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(NotPulledError):
        find("o/n", stores)
    write(snapshot / "model-2.safetensors")
    assert find("o/n", stores) == snapshot


def test_a_link_to_nothing_is_no_model(stores: ModelStores) -> None:
    snapshot = cached(stores, "m-Q8_0.gguf")
    (snapshot / "m-Q8_0.gguf").resolve().unlink()
    assert list(stores.all()) == []


@pytest.mark.parametrize("folder", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studios_folder_is_read_where_it_lies(
    folder: str, tmp_path: Path, stores: ModelStores
) -> None:
    file = write(tmp_path / "user" / folder / "o/n-GGUF/n-Q4_K_M.gguf")
    assert find("o/n-GGUF", stores) == find("O/N-gguf:Q4_K_M", stores) == file
    (place,) = stores.all()
    assert (place.name, place.owner) == ("o/n-GGUF:Q4_K_M", "lm studio")


def test_the_environment_names_the_folders(tmp_path: Path) -> None:
    user = tmp_path / "user"
    environ = {"HF_HOME": "/hf", "OLLAMA_MODELS": "/ollama"}
    found = ModelStores.of(tmp_path, environ, user)
    assert (found.hub_cache, found.ollama) == (Path("/hf/hub"), (Path("/ollama"),))
    assert ModelStores.of(tmp_path, {"HF_HUB_CACHE": "/c"} | environ, user).hub_cache == Path("/c")
    assert ModelStores.of(tmp_path, {}, user).hub_cache == user / ".cache/huggingface/hub"
    assert users_stores().home


# --- Ollama ---------------------------------------------------------------------------------------


def pulled_by_ollama(
    stores: ModelStores,
    name: str,
    params: dict[str, Any] | None = None,
    model: bytes = b"GGUF",
    store: int = 0,
) -> Path:
    """A manifest below manifests/, and its blobs."""
    folder = stores.ollama[store]
    blobs = folder / "blobs"
    layers = []
    parts = {"model": model} | ({"params": json.dumps(params).encode()} if params else {})
    for i, (kind, data) in enumerate(parts.items()):
        digest = f"{len(name):02x}{i:02x}".ljust(64, "0")
        write(blobs / f"sha256-{digest}", data)
        kind = f"application/vnd.ollama.image.{kind}"
        layers.append({"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)})
    write(folder / "manifests" / name, json.dumps({"layers": layers}).encode())
    return blobs / layers[0]["digest"].replace(":", "-")


def test_ollamas_models_are_found_by_their_names_there(stores: ModelStores) -> None:
    blob = pulled_by_ollama(
        stores,
        "registry.ollama.ai/library/llama3.2/latest",
        {"temperature": 0.6, "repeat_penalty": 1.1, "stop": ["<|eot|>"], "num_ctx": 4096},
    )
    for name in ("llama3.2", "ollama:llama3.2", "llama3.2:latest", "ollama:llama3.2:latest"):
        found = find_model(name, stores, ROOM)
        assert found.path == blob
        wanted = {"temperature": 0.6, "repetition_penalty": 1.1, "stop": ["<|eot|>"]}
        assert found.sampling == wanted
    with pytest.raises(ValueError, match=r"'llama3\.2:last': did you mean 'llama3\.2:latest'"):
        find("llama3.2:last", stores)


def test_ollamas_service_has_a_folder_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / ".ollama/models"
    folders = ModelStores.of(tmp_path, {}, tmp_path).ollama
    assert folders == (own, Path("/usr/share/ollama/.ollama/models"))
    stores = replace(ModelStores.of(tmp_path, {}, tmp_path), ollama=(own, tmp_path / "service"))
    name = "registry.ollama.ai/library/{}/latest"
    of_service = pulled_by_ollama(stores, name.format("a"), store=1)
    pulled_by_ollama(stores, name.format("both"), store=1)
    of_user = pulled_by_ollama(stores, name.format("both"))
    assert (find("a", stores), find("both", stores)) == (of_service, of_user)
    assert [place.path for place in stores.all()] == [of_user, of_service]


def test_ollamas_models_of_others(stores: ModelStores) -> None:
    pulled_by_ollama(stores, "registry.ollama.ai/someone/m/7b")
    pulled_by_ollama(stores, "hf.co/o/n-GGUF/Q4_0")
    names = [place.name for place in stores.all()]
    assert names == ["ollama:hf.co/o/n-GGUF:Q4_0", "ollama:someone/m:7b"]
    assert all(find(name, stores) for name in names)


def test_a_model_of_ollamas_with_an_adapter_is_not_taken_for_its_base(stores: ModelStores) -> None:
    name = "registry.ollama.ai/library/tuned/1b"
    blob = pulled_by_ollama(stores, name)
    file = stores.ollama[0] / "manifests" / name
    layers = json.loads(file.read_text())["layers"]
    adapter = {"mediaType": "application/vnd.ollama.image.adapter", "digest": f"sha256:{'c' * 64}"}
    write(stores.ollama[0] / "blobs" / f"sha256-{'c' * 64}", b"GGUF")
    file.write_text(json.dumps({"layers": [*layers, adapter]}))
    assert not list(stores.all())
    (problem,) = stores.problems
    assert f"serve {blob.name} with --lora NAME=" in problem
    assert problem.endswith(f"sha256-{'c' * 64})")


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "it is no JSON object"),
        ("{}", "'layers'"),
        ('{"layers": [{"mediaType": 7}]}', "'digest'"),
        ('{"layers": []}', "it names no model file"),
        (
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model",'
            ' "digest": "sha256:../../../etc/passwd"}]}',
            "is not a sha256 digest",
        ),
        (
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model",'
            f' "digest": "sha256:{"a" * 64}"}}]}}',
            "is missing",
        ),
        (" " * (1 << 21), "it is too large"),
    ],
)
def test_a_damaged_manifest_is_one_line(manifest: str, reason: str, stores: ModelStores) -> None:
    pulled_by_ollama(stores, "registry.ollama.ai/library/good/1b")
    write(stores.ollama[0] / "manifests/registry.ollama.ai/library/bad/1b", manifest.encode())
    assert [place.name for place in stores.all()] == ["ollama:good:1b"]
    (problem,) = stores.problems
    assert problem.startswith("ollama:bad:1b: its manifest ")
    assert reason in problem
    assert "\n" not in problem


def test_a_tilde_that_no_shell_saw_is_the_home_directory(
    tmp_path: Path, stores: ModelStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a unit's file or TOML spells it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "my models" / "m.gguf")
    assert find("~/my models/m.gguf", stores) == file
    assert find("~/my models", stores) == file.parent
    for missing in ("~/nothing.gguf", "~nobody-of-this-name/m.gguf"):
        with pytest.raises(ValueError, match="there is no model"):
            find(missing, stores)
