"""A router takes what one server takes: content types, slashes, and other programs' routes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_router import Routed, routing
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG
from tests.waiting import connected

HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 3}


GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("a", "b")):
        write_peft(folder / name, random_pairs(llama_shapes(CONFIG), 4, seed=i))
    return folder


@pytest.fixture(scope="module")
def pair(model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """Two servers of one model."""
    folder = tmp_path_factory.mktemp("router")
    flags = ["--replicas", "2", "--served-model-name", "tiny", "--enable-lora"]
    flags += ["--allow-lora-loading", str(adapters)]
    with routing(model, folder / "log", *flags, RIDGELINE_HOME=str(folder)) as routed:
        yield routed


def send(routed: Routed, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    with connected(routed.port) as connection:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        is_json = response.getheader("content-type") == "application/json"
        return response.status, json.loads(data) if is_json else data


def said(routed: Routed, name: str, *messages: dict[str, Any]) -> str:
    body = {"model": name, "messages": [*messages, *HELLO], "options": GREEDY, "stream": False}
    status, answer, _ = routed.call("/api/chat", body)
    assert (status, answer.get("model")) == (200, name), answer
    return str(answer["message"]["content"])


def server_levels(routed: Routed) -> list[bool]:
    """Whether each server sleeps."""
    paths = [f"/is_sleeping?replica={number}" for number in (1, 2)]
    return [routed.call(path)[1]["is_sleeping"] for path in paths]


def test_content_types_and_slashes(pair: Routed) -> None:
    for kind in ("application/octet-stream", "text/plain", ""):
        for path in ("/v1/chat/completions", "/api/chat", "/v1/messages/"):
            status, _, headers = pair.call(path, ASK | {"stream": True}, content_type=kind)
            assert (status, headers["x-accel-buffering"]) == (200, "no"), (kind, path)
        page = {"content_type": kind, "origin": f"http://127.0.0.1:{pair.port}"}
        assert pair.call("/v1/chat/completions", ASK, **page)[0] == 415
    assert [one["id"] for one in pair.call("/v1/models/")[1]["data"]] == ["tiny"]
    assert pair.call("/v2/models/")[0] == 404


def test_vllms_names_for_sleep_and_wake(pair: Routed) -> None:
    assert server_levels(pair) == [False, False]
    assert pair.call("/sleep?level=2", b"")[0] == 200
    assert server_levels(pair) == [True, True]
    assert pair.call("/is_sleeping/")[1] == {"is_sleeping": True}
    assert pair.call("/wake_up", b"")[0] == 200
    assert server_levels(pair) == [False, False]
    assert pair.call("/sleep?level=9", b"")[0] == 400


def test_an_adapter_is_replaced_on_all_servers(pair: Routed, adapters: Path) -> None:
    def asked() -> set[str]:
        """What the adapter says; several at once, so that both servers are asked."""
        body = {"model": "turn", "prompt": ["river stone"] * 8, "max_tokens": 8, "temperature": 0}
        choices = [pair.call("/v1/completions", body)[1]["choices"] for _ in range(4)]
        return {choice["text"] for one in choices for choice in one}

    load = {"lora_name": "turn", "lora_path": "turn"}
    shutil.copytree(adapters / "a", adapters / "turn")
    assert pair.call("/v1/load_lora_adapter", load | {"load_inplace": False})[0] == 200
    [before] = asked()
    shutil.rmtree(adapters / "turn")
    shutil.copytree(adapters / "b", adapters / "turn")
    assert pair.call("/v1/load_lora_adapter", load)[0] == 400, "the name is taken"
    assert asked() == {before}
    assert pair.call("/v1/load_lora_adapter", load | {"load_inplace": True})[0] == 200
    [after] = asked()
    assert after != before
    assert pair.call("/v1/unload_lora_adapter", {"lora_name": "turn"})[0] == 200


def test_statistics_are_those_of_all_servers(pair: Routed) -> None:
    def count(path: str = "/v2/models/tiny/stats") -> int:
        status, answer, _ = pair.call(path)
        assert status == 200, answer
        [one] = answer["model_stats"]
        assert one["name"] == "tiny"
        return int(one["inference_count"])

    before = count()
    for i in range(6):
        body = {"model": "tiny", "prompt": f"{i} {'stone ' * 9}", "max_tokens": 2}
        assert pair.call("/v1/completions", body)[0] == 200
    assert count() == count("/v2/models/stats") == before + 6
    assert pair.call("/v2/models/nope/stats")[0] == 404


def test_further_names_are_those_of_all_servers(pair: Routed) -> None:
    system = {"role": "system", "content": "Be brief."}
    told = said(pair, "tiny", system)
    assert told != said(pair, "tiny")
    create = {"model": "brief", "from": "tiny", "system": "Be brief.", "stream": False}
    assert pair.call("/api/create", create)[:2] == (200, {"status": "success"})
    assert pair.call("/api/copy", {"source": "brief", "destination": "two"})[0] == 200
    assert {said(pair, "two:latest") for _ in range(4)} == {told}
    assert [one["id"] for one in pair.call("/v1/models")[1]["data"]] == ["tiny", "brief", "two"]
    names = {one["name"] for one in pair.call("/api/tags")[1]["models"]}
    assert names == {"tiny:latest", "brief:latest", "two:latest"}
    assert pair.call("/api/show", {"model": "two"})[1]["system"] == "Be brief."
    assert pair.call("/v1/models/two")[1]["id"] == "two"
    for name, status in (("brief", 200), ("two", 200), ("two", 404), ("tiny", 400)):
        assert send(pair, "DELETE", "/api/delete", {"model": name})[0] == status
    assert pair.call("/api/chat", {"model": "brief", "messages": HELLO})[0] == 404
    assert pair.call("/api/pull", {"model": "tiny", "stream": False})[1] == {"status": "success"}
    status, answer, _ = pair.call("/api/pull", {"model": "smollm2", "stream": False})
    assert (status, "this server has one model" in answer["error"]) == (400, True)


def test_a_router_of_several_models_fetches_others(model: Path, tmp_path: Path) -> None:
    """What lies in the cache of the hub's library needs no network."""
    for name in ("models/one", "hub/models--own--other/snapshots/c0ffee"):
        shutil.copytree(model, tmp_path / name)
    variables = {"RIDGELINE_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    log = tmp_path / "log"
    with routing(tmp_path / "models", log, "--admin-api-key", "two", **variables) as routed:
        routed.key = "two"
        for name in ("../models/one", str(model), "models/one/config.json", "nothing-of-this-name"):
            status, answer, _ = routed.call("/api/pull", {"model": name, "stream": False})
            assert status == 400, (name, answer)
        assert routed.call("/api/chat", {"model": "own/other", "messages": HELLO})[0] == 404
        status, text, headers = routed.call("/api/pull", {"model": "own/other"})
        assert (status, headers["x-accel-buffering"]) == (200, "no")
        lines = [json.loads(line) for line in text.splitlines()]
        assert lines[0]["status"] == "pulling own/other"
        assert lines[-1] == {"status": "success"}
        assert said(routed, "own/other") == said(routed, "one")
        assert "own/other" in routed.states()
        assert routed.call("/api/pull", {"model": "own/other", "stream": False})[0] == 200
