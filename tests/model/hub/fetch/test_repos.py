"""Models of the hub, through its own library, from a hub on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.pull import pull
from ridgeline.model.hub.quantisations import needed_bytes
from ridgeline.model.hub.search import NotPulledError, find_model
from tests.model.hub.loopback import COMMIT, Hub, Repo, running_hub
from tests.waiting import started

GGUF = bytes(range(256)) * 4000
ROOM = 8 << 30


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    with running_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.delenv("HF_TOKEN")
        yield hub


@pytest.fixture
def stores(tmp_path: Path) -> ModelStores:
    return ModelStores.of(tmp_path / "home", {}, tmp_path / "user")


def fetch(model: str, stores: ModelStores, **options: Any) -> Path:
    return pull(model, stores, **({"budget_bytes": ROOM} | options)).path


def tree(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def quantised(*tags: str) -> Repo:
    return Repo(
        {"README.md": b"x"} | {f"m-{tag}.gguf": GGUF[: -i or None] for i, tag in enumerate(tags)}
    )


def test_the_best_quantisation_that_fits_is_fetched_and_said(hub: Hub, stores: ModelStores) -> None:
    hub.repos["o/n"] = quantised("Q8_0", "Q4_K_M", "Q2_K")
    lines: list[str] = []
    seen: list[tuple[int, int]] = []
    path = fetch(
        "hf.co/o/n", stores, announce=lines.append, progress=lambda *pair: seen.append(pair)
    )
    assert path == stores.home / "models/o/n/m-Q8_0.gguf"
    assert path.read_bytes() == GGUF
    assert lines == [
        "o/n: Q8_0 (1 MB) is the best of 3 for 8.59 GB of free memory; 1 MB to fetch; "
        "to run it needs about 538 MB of memory"
    ]
    assert seen == sorted(seen)
    assert seen[-1] == (len(GGUF), len(GGUF))
    assert tree(stores.home / "models") == {"o/n/m-Q8_0.gguf", "o/.n.lock"}
    num_asked = len(hub.asked)
    assert fetch("o/n", stores) == find_model("o/n", stores, ROOM).path == path
    assert len(hub.asked) == num_asked, "what is here needs no hub"


def test_sizes_that_the_hub_leaves_out_are_those_of_the_tree(hub: Hub, stores: ModelStores) -> None:
    hub.repos["o/n"] = quantised("Q8_0", "Q4_K_M")
    hub.repos["o/n"].files["q2/m-Q2_K.gguf"] = GGUF[:2000]
    hub.repos["o/n"].has_bare_names = True
    lines: list[str] = []
    path = fetch("o/n", stores, announce=lines.append, budget_bytes=needed_bytes(2000))
    assert path == stores.home / "models/o/n/q2/m-Q2_K.gguf"
    assert "Q2_K (2 kB) is the best of 3 for" in lines[0]
    assert f"GET /api/models/o/n/tree/{COMMIT}" in hub.asked
    hub.repos["o/n"].announced["m-Q8_0.gguf"] = {"sha256": "0" * 64}
    with pytest.raises(ModelFileError, match="has another file"):
        fetch("o/n:Q8_0", stores)


@pytest.mark.parametrize(
    "model", ["o/n:Q4_K_M", "o/n:q4_k_m", "https://huggingface.co/o/n:m-Q4_K_M.gguf"]
)
def test_a_named_quantisation_is_fetched_beside_others(
    model: str, hub: Hub, stores: ModelStores
) -> None:
    hub.repos["o/n"] = quantised("Q8_0", "Q4_K_M")
    first = fetch("o/n", stores)
    path = fetch(model, stores)
    assert path.name == "m-Q4_K_M.gguf"
    assert fetch("o/n", stores) == first, "the best of what is here"
    assert fetch("o/n:Q4_K_M", stores) == path
    assert [place.name for place in stores.all()] == ["o/n:Q8_0", "o/n:Q4_K_M"]
    with pytest.raises(ValueError, match="there is no 'Q5_0'; there are Q8_0, Q4_K_M"):
        fetch("o/n:Q5_0", stores)


def test_a_revision_is_fetched_and_kept_apart(hub: Hub, stores: ModelStores) -> None:
    hub.repos["o/n"] = quantised("Q8_0", "Q4_K_M")
    old = Repo({"m-Q8_0.gguf": GGUF[::-1], "README.md": b"y"}, commit="0ld" + "1" * 37)
    hub.repos["o/n"].revisions["v1"] = old
    newest, asked = fetch("o/n", stores), len(hub.asked)
    path = fetch("o/n@v1", stores)
    assert path == stores.home / "models/o/n@v1/m-Q8_0.gguf"
    assert path.read_bytes() == GGUF[::-1]
    assert newest.read_bytes() == GGUF
    assert f"HEAD /o/n/resolve/{old.commit}/m-Q8_0.gguf" in hub.asked[asked:]
    asked = len(hub.asked)
    assert fetch("hf.co/o/n@v1:Q8_0", stores) == find_model("o/n@v1", stores, ROOM).path == path
    assert fetch("o/n", stores) == newest
    assert len(hub.asked) == asked, "what is here needs no hub"
    assert [place.name for place in stores.all()] == ["o/n:Q8_0", "o/n@v1:Q8_0"]
    by_commit = fetch(f"o/n@{old.commit}", stores)
    assert by_commit.read_bytes() == GGUF[::-1]
    with pytest.raises(ValueError, match="o/n has no such revision: give a branch, a tag or a com"):
        fetch("o/n@v2", stores)


def test_a_directory_of_a_revision(hub: Hub, stores: ModelStores) -> None:
    hub.repos["o/n"] = Repo({"config.json": b"{}", "model.safetensors": GGUF})
    other = {"config.json": b"{ }", "model.safetensors": GGUF[::-1]}
    hub.repos["o/n"].revisions["v1"] = Repo(other, commit="0ld" + "1" * 37)
    path = fetch("o/n@v1", stores)
    assert path == find_model("o/n@v1", stores, ROOM).path == stores.home / "models/o/n@v1"
    assert (path / "config.json").read_bytes() == b"{ }"  # which the hub keeps elsewhere
    assert (path / "model.safetensors").read_bytes() == GGUF[::-1]
    with pytest.raises(NotPulledError):
        find_model("o/n", stores, ROOM)


def test_what_does_not_fit_is_not_fetched(hub: Hub, stores: ModelStores) -> None:
    hub.repos["o/n"] = quantised("Q8_0", "Q4_K_M")
    with pytest.raises(ValueError, match=r"o/n: the smallest, Q4_K_M, needs about 538 MB"):
        fetch("o/n", stores, budget_bytes=1 << 20)
    assert not hub.ranges


def test_parts_arrive_together(hub: Hub, stores: ModelStores) -> None:
    parts = [f"Q4_0/m-Q4_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub.repos["o/n"] = Repo({parts[0]: GGUF, parts[1]: GGUF[::-1], "m-Q8_0.gguf": GGUF})
    path = fetch("o/n:Q4_0", stores)
    assert path == stores.home / "models/o/n" / parts[0]
    assert path.with_name("m-Q4_0-00002-of-00002.gguf").read_bytes() == GGUF[::-1]
    assert find_model("o/n:Q4_0", stores, ROOM).path == path
    path.with_name("m-Q4_0-00002-of-00002.gguf").unlink()
    with pytest.raises(NotPulledError):
        find_model("o/n:Q4_0", stores, ROOM)


def test_a_safetensors_repository_becomes_a_directory_of_what_an_engine_reads(
    hub: Hub, stores: ModelStores
) -> None:
    wanted = {"config.json": b"{}", "chat_template.jinja": b"", "model-1-of-1.safetensors": GGUF,
              "additional_chat_templates/tool_use.jinja": b""}  # fmt: skip
    others = {"pytorch_model.bin": b"", "a.py": b"", "onnx/config.json": b"", "../x.json": b"",
              "consolidated.safetensors": GGUF, ".a.json": b"", "m-Q8_0.gguf": GGUF}  # fmt: skip
    hub.repos["o/n"] = Repo(wanted | others)
    path = fetch("o/n", stores)
    assert path == find_model("o/n", stores, ROOM).path == stores.home / "models/o/n"
    assert tree(path) == set(wanted)
    assert fetch("o/n:Q8_0", stores).name == "m-Q8_0.gguf"


def test_what_safetensors_need_is_said_and_a_gguf_that_fits_is_preferred(
    hub: Hub, stores: ModelStores
) -> None:
    weights = {"config.json": b"{}", "model.safetensors": GGUF}
    hub.repos["o/n"] = Repo(weights | {"m-Q8_0.gguf": GGUF[:1000]})
    hub.repos["o/large"] = Repo(weights | {"m-Q8_0.gguf": GGUF[::-1]})
    hub.repos["o/gguf"] = quantised("Q8_0")
    room = needed_bytes(2000)
    said: list[str] = []
    fetched = fetch("o/n", stores, budget_bytes=room, announce=said.append)
    assert fetched.name == "m-Q8_0.gguf"
    assert fetch("o/large", stores, budget_bytes=room, announce=said.append).name == "large"
    assert fetch("o/gguf", stores, budget_bytes=room, announce=said.append).name == "m-Q8_0.gguf"
    assert said == [
        "o/n: Q8_0 (1 kB) fits 537 MB of free memory; its safetensors need 538 MB; 1 kB to fetch; "
        "to run it needs about 537 MB of memory",
        "o/large: its safetensors; 1 MB to fetch; to run it needs about 538 MB of memory, and "
        "537 MB is free",
        "o/gguf: m-Q8_0.gguf; 1 MB to fetch; to run it needs about 538 MB of memory, and 537 MB "
        "is free",
    ]


def test_a_missing_shard_is_fetched_again(hub: Hub, stores: ModelStores) -> None:
    weights = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.dumps({"weight_map": {"a": weights[0], "b": weights[1]}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index}
    hub.repos["o/n"] = Repo(files | dict.fromkeys(weights, GGUF))
    path = fetch("o/n", stores)
    (path / weights[1]).unlink()
    with pytest.raises(NotPulledError):
        find_model("o/n", stores, ROOM)
    assert fetch("o/n", stores) == path
    assert tree(path) == {*files, *weights}


def test_a_cut_download_goes_on_where_it_stopped(hub: Hub, stores: ModelStores) -> None:
    hub.repos["o/n"] = quantised("Q8_0")
    hub.cuts = [300_000] + [0] * 6
    with pytest.raises(ValueError, match=r"cannot download .*m-Q8_0\.gguf .*resumes where it"):
        fetch("o/n", stores)
    assert list(stores.all()) == []
    hub.cuts, hub.ranges[:] = [], []
    seen: list[tuple[int, int]] = []
    assert fetch("o/n", stores, progress=lambda *p: seen.append(p)).read_bytes() == GGUF
    ((_, begun),) = hub.ranges
    assert begun == "bytes=300000-"
    assert seen[0][0] >= 300_000


@pytest.mark.parametrize(
    "told", [{"sha256": "0" * 64}, {"size": len(GGUF) + 5}, {"size": 10}], ids=str
)
def test_a_hub_that_lies_is_not_believed(
    told: dict[str, Any], hub: Hub, stores: ModelStores
) -> None:
    hub.repos["o/n"] = quantised("Q8_0")
    hub.repos["o/n"].announced["m-Q8_0.gguf"] = told
    with pytest.raises(ModelFileError, match=r"has another file|that should have"):
        fetch("o/n", stores)
    assert list(stores.all()) == []


@pytest.mark.parametrize("name", ["m-Q8_0.gguf", "config.json"])
def test_an_answer_without_an_end_is_read_up_to_what_was_announced(
    name: str, hub: Hub, stores: ModelStores
) -> None:
    files = {"config.json": b"{}", "model.safetensors": GGUF}
    hub.repos["o/n"] = quantised("Q8_0") if name.endswith("gguf") else Repo(files)
    hub.is_endless = True
    with pytest.raises(
        ModelFileError, match=r"sends more than the .* bytes that the file should have"
    ):
        fetch("o/n", stores)
    left = sum(file.stat().st_size for file in stores.home.rglob("*") if file.is_file())
    assert left <= len(GGUF)


@pytest.mark.parametrize("sent", [b'{"a":2}', b'{"a":1}   ', b"{}"])
def test_a_small_file_that_is_not_the_announced_one_is_refused(
    sent: bytes, hub: Hub, stores: ModelStores
) -> None:
    files = {"config.json": b'{"a":1}', "tokenizer_config.json": b"", "model.safetensors": GGUF}
    repo = hub.repos["o/n"] = Repo(files, sent={"config.json": sent})
    with pytest.raises(ModelFileError, match=r"has another file|that should have"):
        fetch("o/n", stores)
    assert list(stores.all()) == []
    repo.announced["config.json"] = {"blobId": None, "size": len(sent)}
    assert (fetch("o/n", stores) / "config.json").read_bytes() == sent, "no checksum is known"


def test_a_file_too_large_for_the_disk_is_refused_before_it_is_fetched(
    hub: Hub, stores: ModelStores
) -> None:
    hub.repos["o/n"] = quantised("Q8_0")
    hub.repos["o/n"].announced["m-Q8_0.gguf"] = {"size": 1 << 60}
    with pytest.raises(
        ValueError, match=r"^o/n needs [\d,.]+ GB, but [\d,.]+ [GM]B are free in .*RIDGELINE_HOME"
    ):
        fetch("o/n", stores)
    assert not hub.ranges


def test_a_gated_repository_names_the_way_in(
    hub: Hub, stores: ModelStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/n"] = quantised("Q8_0")
    hub.repos["o/n"].is_gated = True
    with pytest.raises(ValueError, match=r"o/n is gated: accept its terms .* HF_TOKEN"):
        fetch("o/n", stores)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch("o/n", stores).read_bytes() == GGUF
    assert hub.logins["/api/models/o/n"] == f"Bearer {hub.token}"
    assert hub.logins["/cdn/o/n/m-Q8_0.gguf"] is None, "another host"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "has no repository 'o/n', or it is private"),
        ({"config.json": b"{}"}, "o/n has neither .gguf files nor safetensors"),
        ({"mmproj-F16.gguf": GGUF}, "nor safetensors that run here"),
    ],
)
def test_a_repository_without_a_model(
    files: dict[str, bytes] | None, message: str, hub: Hub, stores: ModelStores
) -> None:
    if files is not None:
        hub.repos["o/n"] = Repo(files)
    with pytest.raises(ValueError, match=message):
        fetch("o/n", stores)


def test_a_hub_that_is_out_of_reach_gives_the_way_out(
    hub: Hub, stores: ModelStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"cannot get o/n from the hub .*; download it where"):
        fetch("o/n", stores)


def settings(hub: Hub, home: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return environ | {"HF_ENDPOINT": hub.url, "RIDGELINE_HOME": str(home), "HOME": str(home)}


def run(hub: Hub, home: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environ = settings(hub, home) | changes
    command = [str(Path(sys.executable).parent / "ridgeline"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_the_commands_with_the_settings_of_the_hubs_library(hub: Hub, tmp_path: Path) -> None:
    hub.repos["o/n"] = quantised("Q8_0", "Q4_K_M")
    hub.repos["o/n"].is_gated = True
    refused = run(hub, tmp_path, "pull", "o/n")
    assert (refused.returncode, "HF_TOKEN" in refused.stderr) == (1, True)
    offline = run(hub, tmp_path, "pull", "o/n", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids" in offline.stderr
    pulled = run(hub, tmp_path, "pull", "o/n:Q4_K_M", "--json", HF_TOKEN=hub.token)
    path = tmp_path / "models/o/n/m-Q4_K_M.gguf"
    assert json.loads(pulled.stdout) == {"model": "o/n:Q4_K_M", "path": str(path)}
    (model,) = json.loads(run(hub, tmp_path, "list", "--json").stdout)["models"]
    assert model == {
        "name": "o/n:Q4_K_M", "path": str(path), "size": path.stat().st_size, "needs": None,
        "owner": "ridgeline",
    }  # fmt: skip
    removed = run(hub, tmp_path, "rm", "o/n")
    assert removed.stdout == "removed o/n:Q4_K_M: 1 MB freed\n"
    assert tree(tmp_path / "models") == set()


def test_a_pull_that_is_stopped_says_where_it_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.repos["o/n"] = Repo({"m-Q8_0.gguf": bytes(30_000_000)})
    hub.cuts, hub.holds = [21_000_000], threading.Event()
    command = [str(Path(sys.executable).parent / "ridgeline"), "pull", "o/n"]
    environ = settings(hub, tmp_path)
    with started(command, env=environ, stderr=subprocess.PIPE) as process:
        try:
            while not any(f.stat().st_size >= 20_000_000 for f in tmp_path.rglob("*")):
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert re.search(r"stopped: .* resumes from (10|2[01]) MB", process.stderr.read())
        finally:
            hub.holds.set()
    assert process.returncode == 130
