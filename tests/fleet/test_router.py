"""Several models behind one address: real processes, each with a model of random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from selenium.webdriver import Chrome
from selenium.webdriver.support.select import Select
from typer.testing import CliRunner

from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import app
from ridgeline.fleet.metrics import merged
from ridgeline.serve.app import new_app
from ridgeline.serve.dialects import NAME_A_MODEL
from tests.serve.page.browser import answer, ask, find, keep, texts
from tests.serve.serving import JSON, first_of, serving, without_signs
from tests.waiting import PATIENCE_S, children, connected, eventually, started

ASK = {"prompt": "one two", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
# More than sockets hold: while nobody reads, it does not end.
LONG = ASK | {"prompt": ["one two"] * 8, "max_tokens": 110, "n": 64, "stream": True}


class Routed:
    """A running router."""

    tls: ssl.SSLContext | None = None
    key = ""  # of requests that bring none

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path, said: str) -> None:
        self.process, self.port, self.log_file, self.said = process, port, log, said

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {"authorization": f"Bearer {self.key}"} if self.key else {}
        given = JSON | own | {name.replace("_", "-"): value for name, value in headers.items()}
        with connected(self.port, self.tls) as connection:
            connection.request("GET" if data is None else "POST", path, data, given)
            response = connection.getresponse()
            text = without_signs(response.read())
            found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type") == "application/json"
        return response.status, json.loads(text) if is_json else text.decode(), found

    def complete(self, name: str, **fields: Any) -> str:
        status, body, _ = self.call("/v1/completions", ASK | {"model": name} | fields)
        assert status == 200, body
        assert body["model"] == name
        return str(body["choices"][0]["text"])

    def states(self) -> dict[str, str]:
        return {one["id"]: one["status"]["value"] for one in self.call("/v1/models")[1]["data"]}

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call(f"/v1/models/{name}")[1]["status"]
        return found

    def pids(self) -> list[int]:
        """The processes of the models that are loaded, and one that waits for the next."""
        return children(self.process.pid)


@contextmanager
def routing(
    folder: Path,
    log: Path,
    *flags: str,
    program: tuple[str, ...] = ("-m", "ridgeline"),
    **variables: str,
) -> Iterator[Routed]:
    is_model = folder.is_file() or (folder / "config.json").is_file()
    what = [str(folder)] if is_model else ["--models-dir", str(folder)]
    command = [sys.executable, *program, "serve", *what]
    command += ["--port", "0", "--kv-cache-memory", "1MiB", "--threads", "1"]
    command += ["--receive-timeout", str(PATIENCE_S), "--stall-timeout", str(PATIENCE_S), *flags]
    environment = os.environ | variables
    with (
        log.open("w") as words,
        started(command, stdout=subprocess.PIPE, stderr=words, env=environment) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ready at https?://127.0.0.1:(\d+)", line)
        assert found, line + log.read_text()
        yield Routed(process, int(found[1]), log, line)


@contextmanager
def reading(routed: Routed, name: str) -> Iterator[list[bytes]]:
    """Read a long stream of a model beside the block, which begins when the stream has."""
    with connected(routed.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(LONG | {"model": name}), JSON)
        response = connection.getresponse()
        first_of(response)
        text: list[bytes] = []
        reader = threading.Thread(target=lambda: text.append(response.read()))
        reader.start()
        try:
            yield text
        finally:
            reader.join(PATIENCE_S)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models; ``c`` is damaged, ``b`` writes other text than ``a``."""
    path = tmp_path_factory.mktemp("models")
    for name in "abc":
        shutil.copytree(model, path / name)
    from safetensors.numpy import load_file, save_file

    weights = load_file(path / "b" / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][::-1].copy()
    save_file(weights, path / "b" / "model.safetensors")
    (path / "c" / "model.safetensors").write_bytes(b"nothing")
    return path


@pytest.fixture(scope="module")
def routed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with routing(folder, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def test_each_model_answers_by_its_name(routed: Routed, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = {}
    for name in ("a", "b", "a:latest"):
        bare = name.removesuffix(":latest")
        llm = LLM(folder / bare, kv_cache_memory="1MiB", threads=1)
        (alone,) = llm.generate("one two", params)
        status, body, headers = routed.call("/v1/completions", ASK | {"model": name})
        assert (status, body["model"]) == (200, bare)
        assert headers["x-request-id"] == body["id"].removeprefix("cmpl-")
        assert headers["content-length"].isdigit()
        answers[bare] = body["choices"][0]["text"]
        assert answers[bare] == alone.outputs[0].text
    assert answers["a"] != answers["b"]
    assert routed.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    eventually(lambda: len(routed.pids()) == 3)
    assert routed.status("a")["resident_bytes"] > 1 << 20
    assert routed.call("/v1/models/a")[1]["max_model_len"] == 128


def test_openais_client_streams_through_it(routed: Routed) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{routed.port}/v1", api_key="x") as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(
            model="a", messages=messages, temperature=0, max_tokens=20
        )
        parts = client.chat.completions.create(
            model="a", messages=messages, temperature=0, max_tokens=20, stream=True
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content
        assert [one.id for one in client.models.list()] == ["a", "b", "c"]
        with pytest.raises(openai.NotFoundError, match="this server has 'a', 'b', 'c'"):
            client.chat.completions.create(model="gpt-4o", messages=messages)


def test_what_names_no_model_is_refused(routed: Routed) -> None:
    for body, status, code in (
        ({"prompt": "x"}, 400, "missing_parameter"),
        ({"prompt": "x", "model": 5}, 400, "missing_parameter"),
        ({"prompt": "x", "model": "d"}, 404, "model_not_found"),
        (b"[]", 400, "invalid_value"),
        (b"{", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
    ):
        found, answer, _ = routed.call("/v1/completions", body)
        assert (found, answer["error"]["code"]) == (status, code)
    assert routed.call("/v1/completion", ASK | {"model": "a"})[0] == 404
    status, answer, _ = routed.call("/v1/messages", {"model": "d"})
    assert (status, answer["type"]) == (404, "error"), "as Anthropic writes it"
    status, answer, _ = routed.call("/v1/completions", ASK | {"model": "a", "max_tokens": -2})
    assert (status, answer["error"]["param"]) == (400, "max_tokens"), "the model's own answer"


def test_a_model_that_cannot_be_loaded_says_why(routed: Routed) -> None:
    status, answer, _ = routed.call("/v1/completions", ASK | {"model": "c"})
    assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
    assert "c cannot be loaded" in answer["error"]["message"]
    assert "model.safetensors" in answer["error"]["message"]
    assert routed.complete("a")


def test_the_page_and_its_parts(routed: Routed) -> None:
    routed.complete("a")
    routed.complete("b")
    assert routed.call("/health")[0] == routed.call("/ready")[0] == 200
    assert "<title>Ridgeline</title>" in routed.call("/")[1]
    assert "/v1/messages" in routed.call("/openapi.json")[1]["paths"]
    assert routed.call("/v1/live?model=c")[1]["error"]["code"] == "model_not_loaded"
    with connected(routed.port) as connection:
        connection.request("GET", "/v1/live?model=b")
        assert connection.getresponse().read(6) == b"data: "
    assert routed.call("/v1/memory?model=c")[1]["error"]["code"] == "model_not_loaded"
    lines = routed.call("/v1/memory?model=b")[1]["lines"]
    assert {"kv_cache", "process.other"} <= {line["name"] for line in lines}
    eventually(lambda: routed.status("b")["num_requests"] == 0)  # who looks on does not keep it
    _, answer, _ = routed.call("/v1/completions", ASK | {"model": "b"})
    status, told, _ = routed.call(f"/v1/requests/{answer['id']}/explain?model=b")
    assert (status, answer["id"]) == (200, f"cmpl-{told['name']}")
    assert routed.call(f"/v1/requests/{answer['id']}/explain?model=c")[0] == 503
    text = routed.call("/metrics")[1]
    assert {'model_name="a"', 'model_name="b"'} <= set(re.findall(r'model_name="\w+"', text))
    assert text.count("# TYPE ridgeline:num_requests_running ") == 1
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"]
    assert len(samples) == len(set(samples))
    assert {'process_resident_memory_bytes{model_name="a"}'} < set(samples)
    assert any(one.startswith('http_requests_total{model_name="b",') for one in samples)


def test_plans_load_no_model(routed: Routed) -> None:
    listed = routed.call("/v1/plan/devices")[1]
    assert listed["models"] == ["a", "b", "c"]
    before = [routed.status(name)["value"] for name in "ab"]
    plans = [routed.call("/v1/plan", {"model": name})[1] for name in "ab"]
    assert [plan["model"]["name"] for plan in plans] == ["a", "b"]
    assert [routed.status(name)["value"] for name in "ab"] == before
    assert routed.call("/v1/plan", {"model": "c"})[1]["error"]["code"] == "invalid_value"
    assert routed.call("/v1/plan", {"model": "d"})[1]["error"]["code"] == "model_not_found"
    assert routed.call("/v1/plan", {})[1]["error"]["code"] == "missing_parameter"
    unknown = routed.call("/v1/plan", {"model": "a", "ctx": 1})[1]["error"]
    assert (unknown["param"], unknown["code"]) == ("ctx", "unknown_parameter")
    assert "<title>Plan" in routed.call("/plan")[1]


def test_ollamas_clients_see_all_models(routed: Routed) -> None:
    listed = routed.call("/api/tags")[1]["models"]
    assert [one["name"] for one in listed] == ["a:latest", "b:latest"], "c cannot be read"
    ask = {"model": "a:latest", "messages": [{"role": "user", "content": "x"}], "stream": False}
    status, answer, _ = routed.call("/api/chat", ask | {"options": {"num_predict": 3}})
    assert (status, answer["eval_count"]) == (200, 3)
    loaded = {one["name"]: one for one in routed.call("/api/ps")[1]["models"]}
    assert loaded["a:latest"]["digest"] == listed[0]["digest"]
    assert loaded["a:latest"]["size"] > 1 << 20
    status, answer, _ = routed.call("/api/chat", ask | {"keep_alive": "soon"})
    assert (status, set(answer)) == (400, {"error"})
    status, answer, _ = routed.call("/api/generate", {"model": "a", "keep_alive": 0})
    assert '"done_reason": "unload"' in answer
    eventually(lambda: routed.states()["a"] == "unloaded")
    assert routed.call("/api/generate", {"model": "a", "keep_alive": -1})[0] == 200
    eventually(lambda: routed.status("a")["num_requests"] == 0)
    assert routed.status("a")["unload_s"] is None
    assert routed.call("/api/generate", {"model": "a", "keep_alive": "10m"})[0] == 200
    eventually(lambda: (routed.status("a")["unload_s"] or 0) > 300)


def test_the_page_has_a_choice(routed: Routed, browser: Chrome) -> None:
    browser.get(f"http://127.0.0.1:{routed.port}/")
    keep(browser)
    choice = find(browser, "#models")
    eventually(choice.is_displayed)
    assert choice.text.split() == ["a", "b", "c"]
    Select(choice).select_by_value("b")
    ask(browser, "Hello")
    eventually(lambda: answer(browser))
    eventually(lambda: "".join(texts(browser, ".facts")).startswith("b  ·  "))
    find(browser, ".why").click()
    eventually(lambda: "took" in "".join(texts(browser, ".explanation p")))
    find(browser, ".explanation form button").click()
    eventually(lambda: find(browser, "#state").text == "live")
    assert browser.title.startswith("b ")
    browser.refresh()
    eventually(lambda: find(browser, "#models").get_attribute("value") == "b")
    Select(find(browser, "#models")).select_by_value("c")
    ask(browser, "Hello")
    eventually(lambda: "c cannot be loaded" in find(browser, "#messages").text)
    eventually(lambda: find(browser, "#state").text == "loads with its first question")
    browser.get("about:blank")


def test_its_table_has_all_routes_that_name_a_model(model: Path) -> None:
    with serving(model) as served:
        routes = new_app(served.running.model_server).routes
        posts = [r.path for r in routes if "POST" in (getattr(r, "methods", None) or ())]
    posts = [path for path in posts if not path.startswith("/v2/models/")]  # test_triton.py
    of_one_model = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/slots/{id_slot}"]
    of_loaded = ["/v1/sleep", "/v1/wake", "/sleep", "/wake_up"]  # nothing is loaded for them
    own = ["/v1/plan", "/v2/repository/index", "/v2/repository/models/{model:path}/{action}"]
    own += ["/api/blobs/{digest}", "/api/copy", "/api/create", "/api/pull", "/api/push"]
    assert sorted(posts) == sorted([*NAME_A_MODEL, *of_one_model, *of_loaded, *own])


def test_lm_studios_list_has_all_models_and_which_are_loaded(routed: Routed) -> None:
    routed.complete("a")
    said = {one["id"]: one for one in routed.call("/api/v0/models")[1]["data"]}
    states = routed.states()
    assert {"a", "b"} <= said.keys()
    for name, one in said.items():
        assert one["state"] == {"loaded": "loaded"}.get(states[name], "not-loaded")
        assert ("loaded_context_length" in one) == (states[name] == "loaded")


def test_llamacpps_paths_without_v1_go_to_the_model_that_is_named(routed: Routed) -> None:
    assert [one["id"] for one in routed.call("/models")[1]["data"]] == list(routed.states())
    chat = {"model": "a", "messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
    for path in ("/chat/completions", "/chat/completions/input_tokens"):
        assert routed.call(path, chat)[0] == 200
    assert routed.call("/responses", {"model": "a", "input": "one"})[0] == 200


def test_a_client_that_leaves_ends_its_answer(routed: Routed) -> None:
    with connected(routed.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(LONG | {"model": "a"}), JSON)
        with connection.getresponse() as response:
            first_of(response)
            eventually(lambda: routed.status("a")["num_requests"] == 1)  # others are leaving
    eventually(lambda: routed.status("a")["num_requests"] == 0)
    running = 'ridgeline:num_requests_running{model_name="a"} 0.0'
    eventually(lambda: running in routed.call("/metrics")[1])
    assert "Traceback" not in routed.log


def test_a_model_that_was_told_to_end_is_started_again_before_it_has(
    folder: Path, tmp_path: Path
) -> None:
    with routing(folder, tmp_path / "log") as routed:
        (first,) = routed.pids()
        routed.complete("a")
        os.kill(first, signal.SIGTERM)
        statuses = []
        while "ended by itself" not in routed.log or len(statuses) < 50:
            status, body, _ = routed.call("/v1/completions", ASK | {"model": "a"})
            statuses.append(status)
            assert status == 200, body


def test_an_idle_model_is_unloaded_and_one_that_answers_is_not(
    folder: Path, tmp_path: Path
) -> None:
    with routing(folder, tmp_path / "log", "--keep-alive", "0.3") as routed:
        with reading(routed, "a") as text:  # longer than the model may be idle
            routed.complete("b")
            eventually(lambda: routed.states()["b"] == "unloaded")
        assert text[0].endswith(b"data: [DONE]\n\n")
        eventually(lambda: routed.states()["a"] == "unloaded")
        eventually(lambda: len(routed.pids()) == 1)
        assert routed.complete("a")


def test_a_model_makes_room_only_when_it_is_idle(folder: Path, tmp_path: Path) -> None:
    flags = ("--models-memory", "9MiB", "--kv-cache-memory", "6MiB")
    with routing(folder, tmp_path / "log", *flags) as routed:
        first = routed.complete("a")
        assert routed.complete("b")
        assert routed.states() == {"a": "asleep", "b": "loaded", "c": "unloaded"}
        assert "a sleeps, to make room for b" in routed.log
        with reading(routed, "b") as text:
            assert routed.complete("a") == first, "it waited"
            assert "a waits for memory" in routed.log
        assert text[0].endswith(b"data: [DONE]\n\n")
        assert "a wakes" in routed.log
        assert routed.states() == {"a": "loaded", "b": "asleep", "c": "unloaded"}
        assert not re.search("[ab] makes room", routed.log), "neither was ended"


def test_a_folder_that_goes_wrong_at_run_time_is_said_in_the_log(
    folder: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(folder / "a", models / "a")
    with routing(models, tmp_path / "log") as routed:
        (models / "a.gguf").write_bytes(b"")
        assert routed.complete("a")
        assert routed.states() == {"a": "loaded"}
        eventually(lambda: "warning: two models are called 'a': " in routed.log)
        shutil.rmtree(models)
        assert routed.states() == {}
        status, body, _ = routed.call("/v1/completions", ASK | {"model": "a"})
        assert (status, "this server has no model" in body["error"]["message"]) == (404, True)
        assert routed.call("/v1/live")[0] == 404
        eventually(lambda: "cannot be read: No such file or directory" in routed.log)


def test_a_model_too_large_for_the_memory_is_refused(folder: Path, tmp_path: Path) -> None:
    with routing(folder, tmp_path / "log", "--models-memory", "100KiB") as routed:
        status, answer, _ = routed.call("/v1/completions", ASK | {"model": "a"})
        assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
        assert "not enough memory" in answer["error"]["message"]


def test_keys_open_it_and_the_models_behind_it(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna one\n")
    flags = ("--api-key-file", str(keys), "--max-concurrent-requests", "1")
    with routing(folder, tmp_path / "log", *flags, RIDGELINE_PORT="1") as routed:
        body = ASK | {"model": "a"}
        assert routed.call("/v1/completions", body)[0] == 401
        assert "is loaded" not in routed.log, "nobody else can have a model loaded"
        assert routed.call("/v1/completions", body, authorization="Bearer one")[0] == 200
        eventually(lambda: "key=anna" in routed.log)
        keys.write_text("bert two\n")
        routed.process.send_signal(signal.SIGHUP)
        eventually(lambda: routed.log.count("the keys were read again") == 2)
        assert routed.call("/v1/completions", body, authorization="Bearer one")[0] == 401
        assert routed.call("/v1/completions", body, authorization="Bearer two")[0] == 200


def test_a_key_sees_and_changes_what_is_its_own(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna one\nbert two\nboss three admin\n")
    with routing(folder, tmp_path / "log", "--api-key-file", str(keys)) as routed:
        anna, bert, boss = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "three"))
        for key in (anna, bert):
            assert routed.call("/v1/completions", ASK | {"model": "a"}, **key)[0] == 200
        of_bert = 'ridgeline:key_requests_total{key="bert",model_name="a"} 1.0'
        eventually(lambda: of_bert in routed.call("/metrics", **boss)[1])
        seen = routed.call("/metrics", **anna)[1]
        assert 'key="anna"' in seen
        assert "bert" not in seen
        assert "bucket" not in seen
        assert routed.call("/v1/memory?model=a", **anna)[0] == 403
        assert routed.call("/v1/memory?model=a", **boss)[0] == 200
        unload = {"model": "a", "keep_alive": 0}
        assert routed.call("/api/generate", unload, **anna)[0] == 200
        status = routed.call("/v1/models/a", **boss)[1]["status"]
        assert status["unload_s"] > 1, "who is no operator unloads nothing"
        assert routed.call("/v1/models/a", **anna)[1]["status"]["unload_s"] is None
        assert routed.call("/api/generate", unload, **boss)[0] == 200
        eventually(lambda: routed.call("/v1/models/a", **boss)[1]["status"]["value"] != "loaded")


def test_it_ends_when_its_answers_have(folder: Path, tmp_path: Path) -> None:
    """Also when its servers are told too, as systemd does."""
    with routing(folder, tmp_path / "log", "--shutdown-timeout", str(PATIENCE_S)) as routed:
        routed.complete("a")
        pids = routed.pids()
        with reading(routed, "a") as text:
            for pid in (*pids, routed.process.pid):
                os.kill(pid, signal.SIGTERM)
        assert text[0].endswith(b"data: [DONE]\n\n")
        assert routed.process.wait(PATIENCE_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert "Traceback" not in routed.log


def test_what_is_for_one_model_alone_is_refused(tmp_path: Path) -> None:
    for flags, words in (
        (("a", "b", "--lora", "l=p"), "--lora works with one model only"),
        (("a", "b", "--served-model-name", "t"), "--served-model-name works with one model only"),
        (("a", "--replicas", "0"), "--replicas is '0': write a number from 1"),
        ((), "name a model, or several"),
        (("--models-dir", str(tmp_path)), "there is no model in --models-dir"),
        (("a", "b", "--keep-alive", "soon"), "--keep-alive: 'soon' is not a time"),
        (("a", "b", "--models-memory", "much"), "--models-memory: 'much' is not a size"),
        (("no-such", "smollm2", "--port", "0"), "there is no model 'no-such'"),
    ):
        result = CliRunner().invoke(app, ["serve", *flags])
        assert result.exit_code in (1, 2)
        assert words in (result.output + str(result.exception))


def test_metrics_of_two_processes_are_one_text() -> None:
    text = "# HELP a x\n# TYPE a gauge\na{{m={}}} 1\n# HELP b y\n# TYPE b counter\nb{{m={}}} 2\n"
    assert merged([text.format(1, 1), text.format(2, 2), ""]) == (
        "# HELP a x\n# TYPE a gauge\na{m=1} 1\na{m=2} 1\n"
        "# HELP b y\n# TYPE b counter\nb{m=1} 2\nb{m=2} 2\n"
    )
