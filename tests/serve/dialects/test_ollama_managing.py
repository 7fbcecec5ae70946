"""Ollama's routes that manage models: what is here is pulled at once, further names, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.aliases import Alias, Aliases
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG
from tests.serve.serving import Served, serving

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}
CREATE, COPY, DELETE = "/api/create", "/api/copy", "/api/delete"


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("managed")
    write_peft(folder / "a", random_pairs(llama_shapes(CONFIG), 4, seed=1))
    with serving(model, {"lora": {"a": folder / "a"}}, home=folder) as served:
        yield served


def chat(served: Served, name: str, *messages: dict[str, Any], **options: Any) -> str:
    asked = {"model": name, "messages": [*messages, *HELLO], "options": GREEDY | options}
    status, answer, _ = served.call("/api/chat", asked | {"stream": False})
    assert (status, answer.get("model")) == (200, name), answer
    return str(answer["message"]["content"])


def create(served: Served, name: str, **fields: Any) -> None:
    asked = {"model": name, "from": "tiny", "stream": False} | fields
    status, answer, _ = served.call(CREATE, asked)
    assert (status, answer) == (200, {"status": "success"})


def delete(served: Served, name: str) -> int:
    return served.call(DELETE, {"model": name}, "DELETE")[0]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_a_model_that_is_here_is_pulled_at_once(served: Served) -> None:
    steps = served.valve.num_steps
    for body in ({"model": "tiny"}, {"name": "tiny:latest"}, {"model": "a", "insecure": True}):
        status, answer, _ = served.call("/api/pull", body | {"stream": False})
        assert (status, answer) == (200, {"status": "success"})
        status, data, headers = served.call("/api/pull", body)
        assert (status, headers["content-type"]) == (200, "application/x-ndjson")
        assert [json.loads(line) for line in data.splitlines()] == [{"status": "success"}]
    assert served.valve.num_steps == steps


def test_a_server_of_one_model_says_how_to_have_another(served: Served) -> None:
    status, data, _ = served.call("/api/pull", {"model": "smollm2"})
    last = json.loads(data.splitlines()[-1])
    assert (status, "this server has 'tiny' alone" in last["error"]) == (200, True)


def test_a_name_with_a_system_prompt_and_options(served: Served) -> None:
    plain, told = chat(served, "tiny"), chat(served, "tiny", system("Be brief."))
    assert plain != told
    create(served, "brief", system="Be brief.", parameters={"num_predict": 5, "temperature": 0})
    assert chat(served, "brief") == chat(served, "brief:latest", num_predict=12) == told
    other = chat(served, "tiny", system("Be long."))
    assert chat(served, "brief", system("Be long.")) == other, "the request's own goes first"
    asked: dict[str, Any] = {"model": "brief", "messages": HELLO, "stream": False}
    answer = served.call("/api/chat", asked)[1]
    assert (answer["eval_count"], told.startswith(answer["message"]["content"])) == (5, True)
    answer = served.call("/api/generate", {"model": "brief", "prompt": "Hello", "stream": False})[1]
    assert (answer["eval_count"], told.startswith(answer["response"])) == (5, True)
    for path, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 5})):
        usage = served.call(path, asked | more)[1]["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 5, path
    raw = served.call("/v1/completions", {"model": "brief", "prompt": "Hello"})[1]
    same = served.call("/v1/completions", {"prompt": "Hello", "max_tokens": 5, "temperature": 0})[1]
    assert raw["choices"] == same["choices"]
    counted = served.call("/v1/messages/count_tokens", {"model": "brief", "messages": HELLO})[1]
    assert counted["input_tokens"] == served.call("/api/chat", asked)[1]["prompt_eval_count"]
    assert delete(served, "brief") == 200
    assert served.call("/api/chat", asked)[0] == 404


def test_names_are_listed_and_shown(served: Served) -> None:
    create(served, "shown", system="Be brief.", parameters={"top_k": 3, "stop": ["x"]})
    names = [one["name"] for one in served.call("/api/tags")[1]["models"]]
    assert names == ["tiny:latest", "shown:latest"]
    listed = {one["id"]: one.get("parent") for one in served.call("/v1/models")[1]["data"]}
    assert listed == {"tiny": None, "a": "tiny", "shown": "tiny"}
    shown = served.call("/api/show", {"model": "shown"})[1]
    assert shown["system"] == "Be brief."
    assert "top_k 3" in shown["parameters"]
    assert "system" not in served.call("/api/show", {"model": "tiny"})[1]
    assert served.call("/v1/models/shown")[0] == 200
    assert delete(served, "shown") == 200
    assert len(served.call("/api/tags")[1]["models"]) == 1


def test_examples_and_a_template(served: Served) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    create(served, "shots", system="Short.", messages=turns)
    assert chat(served, "shots") == chat(served, "tiny", system("Short."), *turns)
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    create(served, "bare", template=template)
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    same = served.call("/v1/chat/completions", asked | {"chat_template": template})[1]
    assert chat(served, "bare") == same["choices"][0]["message"]["content"] != chat(served, "tiny")
    for go in ("{{ .System }} {{ .Prompt }}", "{{- if .System }}x{{ end }}", "{{range .Messages}}"):
        status, answer, _ = served.call(CREATE, {"model": "go", "from": "tiny", "template": go})
        assert (status, "it is Go's: write Jinja" in answer["error"]) == (400, True)
    assert [delete(served, name) for name in ("shots", "bare")] == [200, 200]


def test_a_copy_of_a_name_and_of_an_adapter(served: Served) -> None:
    create(served, "one", system="Be brief.")
    assert served.call(COPY, {"source": "one", "destination": "two"})[0] == 200
    assert served.call(COPY, {"source": "a", "destination": "three"})[0] == 200
    create(served, "four", **{"from": "one"}, parameters={"num_predict": 3})
    assert delete(served, "one") == 200
    told = chat(served, "tiny", system("Be brief."))
    assert chat(served, "two") == told == chat(served, "four")
    assert chat(served, "three") == chat(served, "a") != chat(served, "tiny")
    assert [delete(served, name) for name in ("two", "three", "four")] == [200, 200, 200]


def test_names_outlast_a_restart(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with serving(model, home=tmp_path) as served:
            if not list(Aliases(tmp_path).all()):
                create(served, "kept", parameters=GREEDY)
            assert chat(served, "kept") == chat(served, "tiny")
    Aliases(tmp_path).keep(Alias("elsewhere", "another-model"))
    with serving(model, home=tmp_path) as served:
        assert len(served.call("/api/tags")[1]["models"]) == 2, "not those of other models"
        assert served.call("/api/chat", {"model": "elsewhere", "messages": HELLO})[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", CREATE, {"model": "x"}, 400, "from is missing"),
        ("POST", CREATE, {"from": "tiny"}, 400, "model is missing"),
        ("POST", CREATE, {"model": "x", "from": "nope"}, 404, "there is no model 'nope'"),
        ("POST", CREATE, {"model": "tiny", "from": "tiny"}, 400, "is a model itself"),
        ("POST", CREATE, {"model": "a", "from": "tiny"}, 400, "is a model itself"),
        ("POST", CREATE, {"model": "../x y", "from": "tiny"}, 400, "is no name"),
        ("POST", CREATE, {"model": "x", "from": "tiny", "files": {"a": "b"}}, 400, "over HTTP"),
        ("POST", CREATE, {"model": "x", "from": "tiny", "quantize": "q4_K_M"}, 400, "quantize"),
        ("POST", CREATE, {"model": "x", "modelfile": "FROM tiny"}, 400, "send from, system"),
        ("POST", CREATE, {"model": "x", "from": "tiny", "parameters": {"top_p": 5}}, 400, "top_p"),
        ("POST", COPY, {"source": "nope", "destination": "x"}, 404, "there is no model 'nope'"),
        ("POST", COPY, {"source": "tiny", "destination": "a"}, 400, "is a model itself"),
        ("POST", COPY, {"source": "tiny"}, 400, "destination is missing"),
        ("DELETE", DELETE, {"model": "nope"}, 404, "there is no model 'nope'"),
        ("DELETE", DELETE, {"model": "tiny"}, 400, "ridgeline rm removes"),
        ("DELETE", DELETE, {"name": "a"}, 400, "is served here"),
        ("POST", "/api/pull", {"model": "smollm2", "stream": False}, 400,
         "this server has 'tiny' alone: ridgeline pull"),
        ("POST", "/api/push", {"model": "tiny"}, 501, "nothing is pushed from here"),
        ("GET", "/api/blobs/sha256:00", None, 404, "there is no blob 'sha256:00'"),
        ("POST", "/api/blobs/sha256:00", b"GGUF", 501, "no files of models are taken"),
        ("DELETE", "/api/deletes", None, 404, "did you mean /api/delete?"),
        ("POST", "/api/generat", {}, 404, "did you mean /api/generate?"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(
    served: Served, method: str, path: str, body: Any, status: int, words: str
) -> None:
    found, answer, _ = served.call(path, body, method)
    assert (found, words in answer["error"]) == (status, True), answer
    assert served.call("/api/blobs/sha256:00", None, "HEAD")[0] == 404
    assert not list(served.running.model_server.aliases.all())


def test_a_hint_names_a_route_that_takes_the_method(served: Served) -> None:
    assert "did you mean" not in served.call("/api/generat", None, "DELETE")[1]["error"]


def test_what_changes_something_is_an_operators(model: Path, tmp_path: Path) -> None:
    with serving(model, home=tmp_path, api_key=["one"], admin_api_key=["two"]) as served:
        for method, path, body in (
            ("POST", CREATE, {"model": "x", "from": "tiny"}),
            ("POST", COPY, {"source": "tiny", "destination": "y"}),
            ("DELETE", DELETE, {"model": "x"}),
            ("POST", "/api/pull", {"model": "smollm2", "stream": False}),
        ):
            for key, is_let in (("one", False), ("two", True)):
                status, answer, _ = served.call(path, body, method, authorization=f"Bearer {key}")
                assert (status != 403) == is_let, (path, answer)
        here = {"model": "tiny", "stream": False}
        assert served.call("/api/pull", here, authorization="Bearer one")[0] == 200
        asked = {"model": "y", "messages": HELLO, "stream": False, "options": GREEDY}
        assert served.call("/api/chat", asked, authorization="Bearer one")[0] == 200


def test_without_a_folder_nothing_is_kept(model: Path) -> None:
    with serving(model) as served:
        status, answer, _ = served.call(COPY, {"source": "tiny", "destination": "x"})
        assert (status, "keeps no files" in answer["error"]) == (503, True)
        assert served.call("/api/chat", {"model": "x", "messages": HELLO})[0] == 404


def test_the_real_client_manages(served: Served) -> None:
    ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")
    client = ollama.Client(host=served.url)
    assert client.pull("tiny").status == "success"
    assert [one.status for one in client.pull("tiny", stream=True)] == ["success"]
    assert client.create("mine", from_="tiny", system="Be brief.").status == "success"
    assert client.copy("mine", "two").status == "success"
    for name in ("mine", "two"):
        assert client.delete(name).status == "success"
    with pytest.raises(ollama.ResponseError, match="nothing is pushed"):
        client.push("tiny")
    client._client.close()
