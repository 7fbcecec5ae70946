"""Open WebUI: its lists, its admin's page for models, and chats over both of its connections."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.clients.other_servers import asked, free_port, running

MODEL, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"]
BOTH = [MODEL, f"{MODEL}:latest"]  # over OpenAI's API, and over Ollama's
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}


@pytest.fixture(scope="module")
def webui(tmp_path_factory):
    own = {
        "DATA_DIR": str(tmp_path_factory.mktemp("webui")), "WEBUI_SECRET_KEY": "x",
        "OLLAMA_BASE_URL": URL, "OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none",
        "WEBUI_AUTH": "False", "OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "ollama", "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
    }  # fmt: skip
    port = free_port()
    command = [str(Path(sys.executable).with_name("open-webui")), "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running(command, os.environ | own, f"{url}/health"):
        who = {"email": "admin@localhost", "password": "admin"}
        key = json.loads(asked(f"{url}/api/v1/auths/signin", who))["token"]
        yield lambda path, body=None, method=None: asked(url + path, body, key, method)


def test_lists(webui):
    assert {one["id"] for one in json.loads(webui("/api/models"))["data"]} >= {*BOTH}
    assert json.loads(webui("/ollama/api/version"))["version"]
    assert json.loads(webui("/ollama/api/ps"))["models"]
    assert json.loads(webui("/ollama/api/show", {"model": f"{MODEL}:latest"}))["details"]
    assert json.loads(webui("/ollama/verify", {"url": URL, "key": ""}))["version"]
    found = json.loads(webui("/openai/verify", {"url": f"{URL}/v1", "key": "none"}))
    assert [one["id"] for one in found["data"]] == [MODEL]


def test_the_page_of_an_admin(webui):
    assert "success" in webui("/ollama/api/pull/0", {"model": f"{MODEL}:latest"})
    made = {"model": "mine", "from": f"{MODEL}:latest", "system": "Be short."}
    assert "success" in webui("/ollama/api/create/0", made)
    assert webui("/ollama/api/copy/0", {"source": "mine:latest", "destination": "two"}) == "true"
    for name in ("two", "mine"):
        assert webui("/ollama/api/delete/0", {"model": name}, "DELETE") == "true"
    assert json.loads(webui("/ollama/api/unload", {"model": f"{MODEL}:latest"}))["status"]


@pytest.mark.parametrize("model", BOTH)
def test_chats(webui, model):
    def said(messages=ASK, path="/api/chat/completions", **more):
        body = {"model": model, "messages": messages, "stream": False, "max_tokens": 24, **more}
        return webui(path, body)

    def message(text):
        return json.loads(text)["choices"][0]["message"]

    assert message(said())["content"]
    assert said(stream=True).count("data:") > 3
    assert message(said(tools=[TOOL]))
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    assert message(said([*ASK, called, result], tools=[TOOL]))["content"]
    for task in ("title", "tags", "follow_up"):
        path, answered = f"/api/v1/tasks/{task}/completions", {"role": "assistant", "content": "Hi"}
        assert message(said([*ASK, answered], path, chat_id="1"))["content"] is not None
