"""litellm's proxy before the server: each of six providers, by each API that the proxy has."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.clients.other_servers import asked, free_port, running

MODEL, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"]
KEY = "sk-0123456789abcdef"
PROVIDERS = {  # how each calls the server
    "openai": f"{URL}/v1",
    "hosted_vllm": f"{URL}/v1",
    "lm_studio": f"{URL}/v1",
    "ollama_chat": URL,
    "ollama": URL,
    "anthropic": URL,
}
TAKES_CHOICE = [name for name in PROVIDERS if "ollama" not in name]  # Ollama has no tool_choice
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    },
}  # fmt: skip
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"{name}/{MODEL}", "api_base": base, "api_key": "none"},
        }
        for name, base in PROVIDERS.items()
    ]
    config = tmp_path_factory.mktemp("proxy") / "config.yaml"
    config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
    port = free_port()
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    own = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    url = f"http://127.0.0.1:{port}"
    with running(command, os.environ | own, f"{url}/health/liveliness"):
        yield lambda path, **body: asked(url + path, body, KEY)


@pytest.mark.parametrize("name", PROVIDERS)
def test_each_api(proxy, name):
    short = {"model": name, "messages": ASK, "max_tokens": 24}
    [choice] = json.loads(proxy("/v1/chat/completions", **short))["choices"]
    assert choice["message"]["content"]
    lines = proxy("/v1/chat/completions", **short, stream=True).splitlines()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert sum(line.startswith("data:") for line in lines) > 3
    assert json.loads(proxy("/v1/messages", **short))["content"][0]["text"]
    said = json.loads(proxy("/v1/responses", model=name, input="Say hi.", max_output_tokens=24))
    assert said["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("name", PROVIDERS)
def test_tools(proxy, name):
    tools = {"model": name, "max_tokens": 80, "tools": [{"type": "function", "function": FUNCTION}]}
    if name in TAKES_CHOICE:
        asks = proxy("/v1/chat/completions", **tools, messages=ASK, tool_choice="required")
        [call] = json.loads(asks)["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 23 degrees"}
    asks = proxy("/v1/chat/completions", **tools, messages=[*ASK, called, result])
    message = json.loads(asks)["choices"][0]["message"]
    assert message["content"] or message["tool_calls"]
