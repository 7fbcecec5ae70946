"""Adapters over HTTP: picked by name, listed, loaded and unloaded while requests run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.serve.adapters import Loras
from ridgeline.serve.engine.request_stream import RequestStream, StreamCaller
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG
from tests.serve.serving import Served, hold, serving
from tests.waiting import PATIENCE_S, eventually

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SHAPES = llama_shapes(CONFIG)
ASK = {"prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters: three below ``inside``, and one beside it."""
    path = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("inside/a", "inside/b", "inside/c", "outside")):
        write_peft(path / name, random_pairs(SHAPES, 4, seed=i))
    (path / "inside" / "link").symlink_to(path / "outside")
    return path


@pytest.fixture(scope="module")
def shared(model: Path, folder: Path) -> Iterator[Served]:
    lora = {"a": folder / "inside" / "a", "b": folder / "inside" / "b"}
    with serving(
        model, {"lora": lora, "enable_lora": True}, allow_lora_loading=folder / "inside"
    ) as served:
        yield served


def text(served: Served, name: str | None = None, path: str = COMPLETE) -> str:
    status, answer, _ = served.call(path, ASK | ({"model": name} if name else {}))
    assert status == 200, answer
    assert answer["model"] == (name or "tiny")
    found: str = answer["choices"][0]["text"]
    return found


def test_the_name_picks_and_the_models_own_is_without(served: Served) -> None:
    found = {name: text(served, name) for name in (None, "a", "b", "tiny")}
    assert found[None] == found["tiny"]
    assert len(set(found.values())) == 3
    assert text(served) == found[None]  # and back


def test_every_api_takes_it(served: Served) -> None:
    hello = [{"role": "user", "content": "hi"}]
    greedy = {"temperature": 0}
    for path, body, read in (
        (CHAT, {"messages": hello, "max_tokens": 8, **greedy},
         lambda a: a["choices"][0]["message"]["content"]),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8, **greedy},
         lambda a: a["output"][0]["content"][0]["text"]),
        ("/v1/messages", {"messages": hello, "max_tokens": 8, **greedy},
         lambda a: a["content"][0]["text"]),
        ("/api/chat", {"messages": hello, "stream": False, "options": {"num_predict": 8, **greedy}},
         lambda a: a["message"]["content"]),
        ("/api/generate", {"prompt": "hi", "stream": False, "raw": True,
                           "options": {"num_predict": 8, **greedy}}, lambda a: a["response"]),
    ):  # fmt: skip
        texts = set()
        for name in ("tiny", "a", "b"):
            status, answer, _ = served.call(path, body | {"model": name})
            assert (status, answer["model"]) == (200, name), (path, answer)
            texts.add(read(answer))
        assert len(texts) == 3, path


def test_streams_take_it_and_fingerprints_tell_it(served: Served) -> None:
    client = served.client()
    prints = {}
    for name in ("tiny", "a", "b"):
        chunks = list(client.completions.create(model=name, prompt="the cat", stream=True))
        assert {chunk.model for chunk in chunks} == {name}
        prints[name] = chunks[0].system_fingerprint
    assert len(set(prints.values())) == 3


def test_the_list_of_models_has_them_with_their_parent(served: Served) -> None:
    listed = served.client().models.list().data
    assert [(one.id, getattr(one, "parent", None)) for one in listed] == [
        ("tiny", None), ("a", "tiny"), ("b", "tiny"),
    ]  # fmt: skip
    status, one, _ = served.call("/v1/models/b")
    assert (status, one["id"], one["parent"]) == (200, "b", "tiny")
    status, error = served.refused(COMPLETE, ASK | {"model": "z"})
    assert (status, error["code"]) == (404, "model_not_found")
    assert "this server has 'tiny', 'a', 'b'" in error["message"]


def test_ollamas_tag_says_nothing_of_an_adapter(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
    body["options"] = {"num_predict": 8, "temperature": 0}
    said = {}
    for name in ("tiny", "a", "a:latest", "tiny:latest"):
        status, answer, _ = served.call("/api/chat", body | {"model": name})
        assert (status, answer["model"]) == (200, name)
        said[name] = answer["message"]["content"]
    assert said["a"] == said["a:latest"] != said["tiny"] == said["tiny:latest"]
    assert served.call("/api/chat", body | {"model": "a:other"})[0] == 404


def test_an_adapter_is_replaced_in_place(served: Served, folder: Path) -> None:
    """A trainer writes new weights into the same place, and loads them under the same name."""
    place = folder / "inside" / "turn"
    shutil.copytree(folder / "inside" / "b", place)
    body = {"lora_name": "turn", "lora_path": "turn"}
    assert served.call(LOAD, body | {"load_inplace": False})[0] == 200
    assert served.call(LOAD, body)[0] == 400, "the name is taken"
    before = text(served, "turn")
    assert before == text(served, "b")
    client, going_on = served.client(), hold(served, after=4)
    stream = client.completions.create(model="turn", stream=True, prompt="", extra_body=ASK)
    first = next(iter(stream)).choices[0].text
    shutil.rmtree(place)
    shutil.copytree(folder / "inside" / "c", place)
    assert served.call(LOAD, body | {"load_inplace": True})[0] == 200
    going_on.set()
    assert first + "".join(one.choices[0].text for one in stream) == before, "it keeps the old one"
    served.valve.before = lambda step: None
    assert served.call(LOAD, {"lora_name": "other", "lora_path": "c"})[0] == 200
    assert text(served, "turn") == text(served, "other") != before, "without stale prefixes"
    shutil.rmtree(place)
    assert served.call(LOAD, body | {"load_inplace": True})[0] == 400
    assert text(served, "turn") == text(served, "other"), "what cannot be read changes nothing"
    for name in ("turn", "other"):
        assert served.call(UNLOAD, {"lora_name": name})[0] == 200
    assert served.call(LOAD, {"lora_name": "x", "lora_path": "c", "load_inplace": True})[0] == 200
    assert served.call(UNLOAD, {"lora_name": "x"})[0] == 200


def test_loading_and_unloading(served: Served, folder: Path) -> None:
    status, said, _ = served.call(LOAD, {"lora_name": "new", "lora_path": "c"})
    assert (status, said) == (200, b"Success: LoRA adapter 'new' added successfully.")
    assert text(served, "new") not in {text(served, name) for name in (None, "a", "b")}
    whole = str(folder / "inside" / "c")
    for body, status, message in (
        ({"lora_name": "new", "lora_path": "c"}, 400, "there is an adapter 'new' already"),
        ({"lora_name": "tiny", "lora_path": "c"}, 400, "and not the model's own name"),
        ({"lora_name": "a b", "lora_path": "c"}, 400, "1 to 128 letters"),
        ({"lora_name": "x", "lora_path": "../outside"}, 403, "--allow-lora-loading"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "--allow-lora-loading"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "--allow-lora-loading"),
        ({"lora_name": "x", "lora_path": "nothing"}, 400, "nothing: no such adapter"),
        ({"lora_name": "x", "lora_path": "."}, 400, ".: "),
        ({"lora_name": "x", "lora_path": ""}, 400, ".: "),
        ({"lora_name": "x", "lora_path": "c\0"}, 400, "no path can have"),
        ({"lora_name": "x", "lora_path": "c" * 10_000}, 400, ""),
        ({"lora_name": "x", "lora_path": "c/" * 1900}, 400, ""),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": whole, "odd": 1}, 400, "odd"),
    ):
        found, error = served.refused(LOAD, body)
        assert (found, message in error["message"]) == (status, True), error
        assert str(folder) not in error["message"], "the server's own paths are not told"
    assert served.call(LOAD, {"lora_name": "again", "lora_path": whole})[0] == 200
    assert text(served, "again") == text(served, "new")
    for name in ("new", "again"):
        status, said, _ = served.call(UNLOAD, {"lora_name": name, "lora_int_id": 1})
        assert (status, said) == (
            200,
            f"Success: LoRA adapter '{name}' removed successfully.".encode(),
        )
        status, error = served.refused(UNLOAD, {"lora_name": name})
        assert (status, error["param"]) == (404, "lora_name")
    assert served.refused(COMPLETE, ASK | {"model": "new"})[0] == 404


def test_an_adapter_that_goes_from_the_disk_tells_no_path(model: Path, folder: Path) -> None:
    gone = folder / "inside" / "gone"
    shutil.copytree(folder / "inside" / "a", gone)
    with serving(model, {"lora": {"gone": gone}}) as served:
        shutil.rmtree(gone)
        served.llm.adapters._named["gone"].handle = None  # as where another took its memory
        status, error = served.refused(COMPLETE, ASK | {"model": "gone"})
    assert (status, error["message"].startswith("gone: no such adapter")) == (404, True)


def test_only_so_many_adapters_are_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.running.model_server.loras, "_most", 4)
    for name in ("one", "two"):
        assert served.call(LOAD, {"lora_name": name, "lora_path": "c"})[0] == 200
    status, error = served.refused(LOAD, {"lora_name": "three", "lora_path": "c"})
    assert (status, error["code"]) == (400, "too_many_adapters")
    for name in ("one", "two"):
        served.call(UNLOAD, {"lora_name": name})
    assert served.call(LOAD, {"lora_name": "three", "lora_path": "c"})[0] == 200
    served.call(UNLOAD, {"lora_name": "three"})


def test_nothing_is_loaded_where_that_is_off(model: Path, folder: Path) -> None:
    lora = {"a": folder / "inside" / "a"}
    with serving(model, {"lora": lora}) as served:
        for path, body in (
            (LOAD, {"lora_name": "b", "lora_path": "b"}),
            (UNLOAD, {"lora_name": "a"}),
        ):
            status, error = served.refused(path, body)
            assert (status, "--allow-lora-loading" in error["message"]) == (403, True)
        assert text(served, "a") != text(served)


def test_names_and_folders_are_checked_at_the_start(model: Path, folder: Path) -> None:
    with LLM(model, kv_cache_memory="1MiB", threads=1, lora={"a": folder / "outside"}) as llm:
        with pytest.raises(ValueError, match="'a' is the name of the model itself"):
            Loras(llm.adapters, "a", None)
        with pytest.raises(ValueError, match="nothing is not a directory"):
            Loras(llm.adapters, "tiny", folder / "nothing")


def test_coming_and_going_under_load_loses_no_request(served: Served) -> None:
    """Four clients ask without a pause for the model and two adapters, while a third adapter comes
    and goes; who asks for that one gets its answer, or is told that it is not there."""
    wanted = {name: text(served, name) for name in (None, "a", "b")}
    served.call(LOAD, {"lora_name": "c", "lora_path": "c"})
    wanted["c"] = text(served, "c")
    served.call(UNLOAD, {"lora_name": "c"})
    lost: list[Any] = []
    counts = dict.fromkeys(wanted, 0)
    is_over = threading.Event()

    def ask(names: list[str | None]) -> None:
        while not is_over.is_set():
            for name in names:
                status, answer, _ = served.call(COMPLETE, ASK | ({"model": name} if name else {}))
                if name == "c" and status == 404:
                    continue
                if status != 200 or answer["choices"][0]["text"] != wanted[name]:
                    lost.append((name, status, answer))
                counts[name] += 1

    clients = [
        threading.Thread(target=ask, args=(names,))
        for names in (["a", None], ["b", "a"], [None, "c"], ["c"])
    ]
    for client in clients:
        client.start()
    num_rounds = 0
    while num_rounds < 15 or not (lost or all(count > 5 for count in counts.values())):
        num_rounds += 1
        assert num_rounds < 1000, counts
        assert served.call(LOAD, {"lora_name": "c", "lora_path": "c"})[0] == 200
        time.sleep(0.03)
        assert served.call(UNLOAD, {"lora_name": "c"})[0] == 200
    is_over.set()
    for client in clients:
        client.join()
    assert not lost
    two = sum(one.num_bytes for one in served.llm.adapters._handles)
    assert served.llm.adapters.names == ["a", "b"]
    eventually(lambda: len(served.llm.adapters._handles) == 2)
    assert two > 0


def test_a_request_keeps_what_is_unloaded_and_metrics_tell_it(served: Served) -> None:
    served.call(LOAD, {"lora_name": "c", "lora_path": "c"})
    wanted = text(served, "c")
    gate, seen = served.valve.gate(), threading.Event()

    def hold(step: Any) -> None:
        seen.set()
        gate.wait(PATIENCE_S)

    served.valve.before = hold
    found: list[Any] = []
    client = threading.Thread(target=lambda: found.append(text(served, "c")))
    client.start()
    assert seen.wait(PATIENCE_S)
    assert served.metrics()['ridgeline:lora_requests{lora_name="c"}'] == 1
    assert served.call(UNLOAD, {"lora_name": "c"})[0] == 200
    assert len(served.llm.adapters._handles) == 3
    gate.set()
    client.join()
    served.valve.before = lambda step: None
    assert found == [wanted]
    eventually(lambda: len(served.llm.adapters._handles) == 2)


def test_a_promise_counts_what_the_cache_has_for_its_adapter(served: Served) -> None:
    prompt = tuple(41 + i % 31 for i in range(60))
    served.call(COMPLETE, {"prompt": list(prompt), "max_tokens": 1, "model": "a"})
    deadline_admission, found = served.running.model_server.deadline_admission, dict[str, int]()
    deadline = SimpleNamespace(length="most")
    is_known = threading.Event()

    def look() -> None:
        for name in ("a", "b"):
            adapter = served.llm.adapters.lease(name)
            stream = RequestStream(
                [prompt], SamplingParams(max_tokens=2), None, StreamCaller("-"), adapter=adapter
            )  # type: ignore[arg-type]
            asking: Any = SimpleNamespace(stream=stream, deadline=deadline)
            (snapshot,) = deadline_admission._snapshots(asking, 1)
            found[name] = snapshot.answers[0].num_cached
        is_known.set()

    served.running.async_engine.between_steps(look)
    assert is_known.wait(PATIENCE_S)
    assert found == {"a": 48, "b": 0}


def test_where_memory_is_full_of_what_is_in_use(model: Path, folder: Path) -> None:
    lora = {"a": folder / "inside" / "a"}
    with serving(model, {"lora": lora}) as served:
        size = served.llm.adapters.num_bytes
    options = {"lora": lora, "enable_lora": True, "lora_memory": size}
    with serving(model, options, allow_lora_loading=folder / "inside") as served:
        plain = text(served, "a")
        assert served.call(LOAD, {"lora_name": "b", "lora_path": "b"})[0] == 200  # a goes
        other = text(served, "b")
        assert text(served, "a") == plain  # b goes
        gate, seen = served.valve.gate(), threading.Event()

        def hold(step: Any) -> None:
            seen.set()
            gate.wait(PATIENCE_S)

        served.valve.before = hold
        client = threading.Thread(target=text, args=(served, "a"))
        client.start()
        assert seen.wait(PATIENCE_S)
        status, error = served.refused(COMPLETE, ASK | {"model": "b"})
        assert (status, error["code"]) == (503, "no_room")
        gate.set()
        client.join()
        served.valve.before = lambda step: None
        eventually(lambda: not served.llm.adapters.in_use)
        assert text(served, "b") == other
