"""What coding agents send at their default settings, by the shape of their requests: three turns,
with a call and its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.test_llm import write_model
from tests.serve.answer.test_tools import TEMPLATE
from tests.serve.serving import Served, serving

SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 4}},
          "required": ["path"], "additionalProperties": False}  # fmt: skip
SYSTEM = "You are a coding agent."


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template knows tools, under any name."""
    path = write_model(tmp_path_factory.mktemp("models") / "agent")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    tokenizer = {"chat_template": TEMPLATE, "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    engine = {"kv_cache_memory": "8MiB"}
    with serving(path, engine, any_model_name=True) as served:
        yield served
        served.assert_idle()


def events(text: bytes) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events, or of lines."""
    lines = [line.removeprefix("data: ") for line in text.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def names_of(headers: dict[str, str]) -> set[str]:
    """What was dropped."""
    return set(headers["x-ridgeline-ignored"].split(", "))


def test_codex(agent: Served) -> None:
    """Responses, streamed, with tools that only its provider runs and fields of its own."""
    body: dict[str, Any] = {
        "model": "gpt-5-codex",
        "instructions": SYSTEM,
        "input": [{"type": "message", "role": "user",
                   "content": [{"type": "input_text", "text": "List"}]}],
        "tools": [
            {"type": "function", "name": "shell", "description": "", "strict": False,
             "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "namespace", "name": "mcp", "tools": []},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "1"},
    }  # fmt: skip
    for turn in range(3):
        wanted = body | ({"tool_choice": {"type": "function", "name": "shell"}} if turn < 2 else {})
        status, text, headers = agent.call("/v1/responses", wanted)
        assert status == 200, text
        assert names_of(headers) >= {
            "client_metadata", "tools[1] (custom)", "tools[2] (namespace)",
            "tools[3] (web_search)", "text.verbosity", "reasoning.effort",
        }  # fmt: skip
        last = events(text)[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        calls = [one for one in last["response"]["output"] if one["type"] == "function_call"]
        assert calls or turn == 2
        body["input"] += last["response"]["output"]
        results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "a.py"}
                   for one in calls]  # fmt: skip
        body["input"] += results or [{"role": "user", "content": "Go on"}]


def test_claude_code(agent: Served) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": "claude-sonnet-4-5-20250929",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": SYSTEM} | cached],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List"}]},
            {"role": "system", "content": [{"type": "text", "text": "# Environment"} | cached]},
        ],
        "tools": [
            {"name": "Later", "description": "", "input_schema": SCHEMA, "defer_loading": True},
            {"name": "Read", "description": "", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1"},
    }
    for turn in range(3):
        choice = {"tool_choice": {"type": "tool", "name": "Read"}} if turn < 2 else {}
        status, text, headers = agent.call("/v1/messages?beta=true", body | choice)
        assert status == 200, text
        assert headers["x-ridgeline-capped"].startswith("max_tokens 32000 -> ")
        assert names_of(headers) >= {
            "context_management", "output_config.effort", "tools[2] (web_search_20250305)",
            "system.cache_control",
        }  # fmt: skip
        found = events(text)
        assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
        begun = [one["content_block"] for one in found if one["type"] == "content_block_start"]
        uses = [one for one in begun if one["type"] == "tool_use"]
        if turn < 2:
            [use] = uses
            pieces = [one["delta"]["partial_json"] for one in found
                      if one.get("delta", {}).get("type") == "input_json_delta"]  # fmt: skip
            use["input"] = json.loads("".join(pieces))
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a.py"}
            body["messages"] += [{"role": "assistant", "content": [use]},
                                 {"role": "user", "content": [result | cached]}]  # fmt: skip
    counted = agent.call("/v1/messages/count_tokens?beta=true", {
        name: body[name] for name in ("model", "messages", "system", "tools", "thinking")
    })  # fmt: skip
    assert (counted[0], counted[1]["input_tokens"] > 0) == (200, True)


@pytest.mark.parametrize(
    "own",
    [
        {"max_tokens": 32000, "stream_options": {"include_usage": True}},  # opencode
        {"max_completion_tokens": 16384, "store": False, "reasoning_effort": "low"},  # pi
        {"max_tokens": 8000, "metadata": {"sessionId": "a"}, "vl_high_resolution_images": True},
        {"max_tokens": 4096, "stream_options": {"include_usage": True}, "verbosity": "low"},
        {"max_completion_tokens": 8192, "parallel_tool_calls": False, "prediction": None},  # Zed
    ],
    ids=str,
)
def test_agents_over_chat_completions(agent: Served, own: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": [{"type": "text", "text": "List"}]})
    body = {
        "model": "gpt-4o",
        "stream": True,
        "tools": [tool],
        "messages": messages,
        "seed": 3,
    } | own
    for turn in range(3):
        choice = "required" if turn < 2 else "auto"
        status, text, headers = agent.call("/v1/chat/completions", body | {"tool_choice": choice})
        assert status == 200, text
        assert headers["x-ridgeline-capped"].startswith("max_")
        choices = [one["choices"][0] for one in events(text) if one["choices"]]
        calls: dict[int, dict[str, Any]] = {}
        for delta in (one["delta"] for one in choices):
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls[call["index"]] = call
                else:
                    said = call["function"]["arguments"]
                    calls[call["index"]]["function"]["arguments"] += said
        if turn < 2 and choices[-1]["finish_reason"] == "tool_calls":
            messages.append({"role": "assistant", "content": None, "tool_calls": [*calls.values()]})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py"}
                         for call in calls.values()]  # fmt: skip


def test_copilots_and_zeds_provider_for_ollama(agent: Served) -> None:
    """They look at the version and what a model can, and then chat."""
    version = agent.call("/api/version")[1]["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
    [model] = agent.call("/api/tags")[1]["models"]
    shown = agent.call("/api/show", {"name": model["model"]})[1]
    assert "tools" in shown["capabilities"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 1024
    body = {
        "model": model["model"],
        "messages": [{"role": "user", "content": "List"}],
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "keep_alive": "5m",
        "think": False,
        "options": {"num_ctx": 131072, "num_predict": 32000.0, "temperature": 0, "stop": []},
        "max_output_tokens": 4096,
    }
    status, text, headers = agent.call("/api/chat", body)
    assert status == 200, text
    assert names_of(headers) >= {"options.num_ctx", "max_output_tokens"}
    assert headers["x-ridgeline-capped"].startswith("options.num_predict 32000 -> ")
    assert events(text)[-1]["done"]
