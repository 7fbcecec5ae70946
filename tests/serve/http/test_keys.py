"""A key sees and changes what is its own; an operator's sees and changes all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.http.keys import Keys
from ridgeline.serve.observe.live import MOST_READERS
from tests.serve.http.test_edge import bearer
from tests.serve.serving import Served, serving
from tests.waiting import connected, eventually

ASK = {"prompt": [40, 41, 42], "max_tokens": 30, "ignore_eos": True}
LONG = ASK | {"max_tokens": 120}
COMPLETE = "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def shared(model: Path, tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "keys"
    file.write_text("anna a-key\nbert b-key\nboss o-key admin\n")
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with serving(model, lora, api_key_file=file, allow_lora_loading=tmp_path) as served:
        yield served


def metrics(served: Served, key: str) -> str:
    status, text, _ = served.call("/metrics", **bearer(key))
    assert status == 200
    found: str = text.decode()
    return found


def test_a_key_is_told_its_own_use_alone(shared: Served) -> None:
    for key, num_tokens in (("a-key", 5), ("b-key", 7)):
        assert shared.call(COMPLETE, ASK | {"max_tokens": num_tokens}, **bearer(key))[0] == 200
    eventually(lambda: "bert" in metrics(shared, "o-key"))
    whole = metrics(shared, "o-key")
    assert 'key="anna"' in whole
    assert "ridgeline:request_prompt_tokens_bucket" in whole
    lines = [line for line in metrics(shared, "a-key").splitlines() if not line.startswith("#")]
    assert {line.partition("{")[0] for line in lines} == {
        f"ridgeline:key_{of}_total"
        for of in ("requests", "prompt_tokens", "cached_tokens", "generation_tokens")
    }
    assert all('key="anna"' in line for line in lines)
    assert 'ridgeline:key_generation_tokens_total{key="anna",model_name="tiny"} 5.0' in lines
    assert shared.call("/v1/memory", **bearer("o-key"))[0] == 200
    status, error = shared.refused("/v1/memory", None, **bearer("a-key"))
    assert (status, error["code"]) == (403, "not_allowed")
    for key, num_requests in (("a-key", None), ("o-key", 0)):
        (shown,) = shared.call("/v1/models", **bearer(key))[1]["data"]
        assert shown["status"]["num_requests"] == num_requests


def watch(served: Served, key: str) -> Iterator[dict[str, Any]]:
    """Yield views as a key gets them."""
    with connected(served.port) as connection:
        connection.request("GET", "/v1/live", headers=bearer(key))
        response = connection.getresponse()
        while line := response.readline():
            assert response.readline() == b"\n"
            yield json.loads(line.removeprefix(b"data: "))
        response.close()


def test_a_key_reads_so_many_views_at_once_and_others_are_not_in_its_way(shared: Served) -> None:
    views = [watch(shared, "a-key") for _ in range(MOST_READERS)]
    for one in views:
        next(one)
    status, error, headers = shared.call("/v1/live", **bearer("a-key"))
    assert (status, error["error"]["code"]) == (429, "too_many_views")
    assert headers["retry-after"] == "5"
    with closing(watch(shared, "b-key")) as other:
        assert next(other)["num_running"] == 0
    views.pop().close()

    def is_let_in() -> bool:
        return shared.call("/v1/live", None, "HEAD", **bearer("a-key"))[0] == 200

    eventually(is_let_in)
    for one in views:
        one.close()


def test_a_key_sees_its_own_sequences_live(shared: Served) -> None:
    """And neither another's, nor its blocks, nor the steps that have both."""
    is_seen = shared.valve.gate()
    shared.valve.before = lambda step: is_seen.wait(0.25)  # half a minute in all, unless all saw it
    asking = [
        threading.Thread(target=shared.call, args=(COMPLETE, LONG | {"n": n}), kwargs=bearer(key))
        for key, n in (("a-key", 2), ("b-key", 3))
    ]
    for thread in asking:
        thread.start()
    seen = {}
    for key, num_running in (("a-key", 2), ("b-key", 3), ("o-key", 5)):
        with closing(watch(shared, key)) as views:
            seen[key] = next(one for one in views if one["num_running"] == num_running)
    slots = {key: shared.call("/slots", **bearer(key))[1] for key in seen}
    shared.valve.free()
    for thread in asking:
        thread.join()
    assert {key: sum(one["is_processing"] for one in slots[key]) for key in slots} == {
        "a-key": 2,
        "b-key": 3,
        "o-key": 5,
    }
    assert {one["id_task"] for one in slots["a-key"] if one["is_processing"]} == {
        one["id"][0] for one in seen["a-key"]["sequences"]
    }
    ids = {key: {one["id"][0] for one in view["sequences"]} for key, view in seen.items()}
    assert ids["a-key"].isdisjoint(ids["b-key"])
    assert ids["o-key"] == ids["a-key"] | ids["b-key"]
    for key in ("a-key", "b-key"):
        assert seen[key]["steps"] == []
        assert not {"c"} & {*seen[key]["blocks"]}


def test_only_an_operator_changes_what_all_have(shared: Served) -> None:
    for path, body in ((LOAD, {"lora_name": "x", "lora_path": "."}), (UNLOAD, {"lora_name": "x"})):
        status, error = shared.refused(path, body, **bearer("a-key"))
        assert (status, error["code"]) == (403, "not_allowed")
        assert "operator" in error["message"]
    assert (
        shared.refused(LOAD, {"lora_name": "x", "lora_path": "none"}, **bearer("o-key"))[0] == 400
    )
    assert shared.refused(UNLOAD, {"lora_name": "x"}, **bearer("o-key"))[0] == 404


def test_who_is_an_operator(tmp_path: Path) -> None:
    assert Keys([], None).is_operator("-"), "where no key is needed"
    assert Keys(["one"], None).is_operator("key1"), "a server's only key"
    assert not Keys(["one"], None).is_operator("-"), "who came without it"
    two = Keys(["one", "two"], None)
    assert not two.is_operator("key1")
    assert any("no key is an operator's" in note for note in two.notes(are_isolated=True))
    flags = Keys(["one"], None, ["boss"])
    assert flags.label_of(b"Bearer boss") == "admin1"
    assert (flags.is_operator("admin1"), flags.is_operator("key1")) == (True, False)
    assert len(flags.notes(are_isolated=False)) == 1
    file = tmp_path / "keys"
    file.write_text("one\nanna two\nboss three admin # the third word\n")
    keys = Keys([], file)
    assert keys.labels == ("line1", "anna", "boss")
    assert [keys.is_operator(label) for label in keys.labels] == [False, False, True]
    for text in ("anna one root\n", "anna one admin more\n", "a b\na c\n", "admin1 x\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="keys"):
            Keys([], file, ["boss"])


def test_keys_are_compared_whole() -> None:
    keys = Keys(["secret"], None)
    assert keys.label_of(b"Bearer secret") == "key1"
    for header in (None, b"", b"Bearer secre", b"Bearer secrets", b"secret", b"Bearer Secret"):
        assert keys.label_of(header) is None
    assert "secret" not in str(vars(keys)["_keys"])


def cached(served: Served, key: str) -> int:
    body: dict[str, Any] = {"prompt": [40 + i % 30 for i in range(60)], "max_tokens": 1}
    _, answer, _ = served.call(COMPLETE, body, **bearer(key))
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize(("isolate_keys", "others"), [(True, 0), (False, 48)])
def test_what_another_key_sent_does_not_show(model: Path, isolate_keys: bool, others: int) -> None:
    with serving(model, api_key=["first", "second"], isolate_keys=isolate_keys) as served:
        assert cached(served, "first") == 0
        assert cached(served, "first") == 48
        assert cached(served, "second") == others
        assert cached(served, "second") == 48
