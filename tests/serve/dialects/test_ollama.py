"""Ollama's API: streamed as whole, equal to OpenAI's answers, models, tools, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ridgeline.serve.dialects.ollama.schemas import ChatAnswered, Embedded, GenerateAnswered
from ridgeline.serve.http.options import parse_seconds
from tests.serve.answer.test_tools import SCHEMA, TOOLS, thinker
from tests.serve.dialects.test_responses import reasoner
from tests.serve.serving import Served, check_shape, serving

__all__ = ["reasoner", "thinker"]  # fixtures

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 30}
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "options": GREEDY, "stream": False}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "options": GREEDY, "stream": False}


def whole(served: Served, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    status, answer, _ = served.call(path, body)
    assert status == 200, answer
    check_shape(ChatAnswered if path == CHAT else GenerateAnswered, answer)
    return dict(answer)


def lines(served: Served, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    status, data, headers = served.call(path, {k: v for k, v in body.items() if k != "stream"})
    assert status == 200, data
    assert headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in data.decode().splitlines()]


def refused(served: Served, path: str, body: Any) -> tuple[int, str]:
    status, answer, _ = served.call(path, body)
    assert set(answer) == {"error"}
    return status, str(answer["error"])


def spoken(served: Served, body: dict[str, Any]) -> str:
    """What OpenAI's route says to the same."""
    status, answer, _ = served.call("/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_a_chat_is_openais(served: Served) -> None:
    answer = whole(served, ASK)
    text = spoken(served, {"messages": HELLO, "temperature": 0, "max_tokens": 30})
    assert answer["message"] == {"role": "assistant", "content": text}
    assert (answer["done_reason"], answer["eval_count"], answer["model"]) == ("length", 30, "tiny")
    assert answer["prompt_eval_count"] > 0
    assert answer["eval_duration"] > 0
    assert answer["total_duration"] >= answer["eval_duration"] + answer["prompt_eval_duration"]
    parts = lines(served, ASK)
    assert "".join(part["message"]["content"] for part in parts) == text
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 5
    assert {k: parts[-1][k] for k in ("done_reason", "eval_count", "prompt_eval_count")} == {
        k: answer[k] for k in ("done_reason", "eval_count", "prompt_eval_count")
    }


def test_options_are_honoured(served: Served) -> None:
    text = whole(served, ASK)["message"]["content"]
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "num_predict": 30}
    for more in ({}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"typical_p": 0.2}):
        found = whole(served, ASK | {"options": options | more})["message"]["content"]
        same = {"temperature": 1.5, "seed": 7, "max_tokens": 30, "messages": HELLO} | more
        assert found == spoken(served, same)
        assert found != text
    penalty = {"repeat_penalty": 1.8, "repeat_last_n": -1}
    found = whole(served, ASK | {"options": GREEDY | penalty})["message"]["content"]
    same = {"temperature": 0, "max_tokens": 30, "messages": HELLO, "repetition_penalty": 1.8}
    assert found == spoken(served, same) != text
    assert whole(served, ASK | {"options": GREEDY | {"repeat_penalty": 1}}) != {}
    stop = text[5:8]
    cut = whole(served, ASK | {"options": GREEDY | {"stop": [stop]}})
    assert (cut["message"]["content"], cut["done_reason"]) == (text[: text.index(stop)], "stop")
    longest = whole(served, ASK | {"options": {"temperature": 0, "num_predict": -1}})
    assert longest["prompt_eval_count"] + longest["eval_count"] <= 128


def test_what_cannot_change_an_answer_is_named(served: Served) -> None:
    hints = {"num_ctx": 64, "num_gpu": 99, "num_thread": 8, "use_mmap": True, "mirostat": 0}
    status, answer, headers = served.call(CHAT, ASK | {"options": GREEDY | hints, "truncate": True})
    assert status == 200
    assert answer["message"] == whole(served, ASK)["message"]
    assert headers["x-ridgeline-ignored"] == (
        "truncate, options.num_ctx, options.num_gpu, options.num_thread, options.use_mmap"
    )


def test_generate_fills_the_template_or_not(served: Served) -> None:
    answer = whole(served, PROMPT, GENERATE)
    assert answer["response"] == whole(served, ASK)["message"]["content"]
    parts = lines(served, PROMPT, GENERATE)
    assert "".join(part["response"] for part in parts) == answer["response"]
    with_system = PROMPT | {"system": "Be brief."}
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    found = whole(served, with_system, GENERATE)["response"]
    assert found == whole(served, ASK | {"messages": messages})["message"]["content"]
    assert found != answer["response"]
    raw = whole(served, PROMPT | {"raw": True}, GENERATE)["response"]
    ask = {"prompt": "Hello", "temperature": 0, "max_tokens": 30}
    assert raw == served.call("/v1/completions", ask)[1]["choices"][0]["text"]


def test_a_suffix_fills_in(coder_path: Path) -> None:
    with serving(coder_path) as served:
        body = PROMPT | {"suffix": "world"}
        ask = {"prompt": "Hello", "suffix": "world", "temperature": 0, "max_tokens": 30}
        text = served.call("/v1/completions", ask)[1]["choices"][0]["text"]
        assert whole(served, body, GENERATE)["response"] == text
        assert "insert" in served.call("/api/show", {"model": "tiny"})[1]["capabilities"]


def test_nothing_asked_loads_or_unloads(served: Served) -> None:
    steps = served.valve.num_steps
    for path, body in ((CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": ""})):
        for keep, reason in ((None, "load"), (0, "unload"), ("0", "unload"), ("5m", "load")):
            asked = {"model": "tiny", "keep_alive": keep, "stream": False, **body}
            answer = whole(served, asked, path)
            assert (answer["done"], answer["done_reason"]) == (True, reason)
    (line,) = lines(served, {"model": "tiny"}, GENERATE)
    assert line["done_reason"] == "load"
    assert served.valve.num_steps == steps


def test_a_form(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    strict = schema | {"required": ["a"], "additionalProperties": False}
    found = whole(served, ASK | {"format": strict, "options": {"num_predict": 60, "seed": 1}})
    jsonschema.validate(json.loads(found["message"]["content"]), strict)
    found = whole(served, PROMPT | {"format": "json", "options": {"seed": 2}}, GENERATE)
    if found["done_reason"] == "stop":
        assert isinstance(json.loads(found["response"]), dict)


def test_calls_come_whole_and_results_go_back(thinker: Served) -> None:
    body = ASK | {"tools": TOOLS, "tool_choice": "required", "options": {"seed": 3}}
    said = whole(thinker, body)["message"]
    assert said["tool_calls"]
    for call in said["tool_calls"]:
        if call["function"]["name"] == "add":
            jsonschema.validate(call["function"]["arguments"], SCHEMA)
    parts = lines(thinker, body)
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [c["function"] for c in said["tool_calls"]]
    results = [
        {"role": "tool", "content": "3", "tool_name": call["function"]["name"]} for call in calls
    ]
    going_on = [*HELLO, said, *results]
    assert whole(thinker, ASK | {"messages": going_on, "tools": TOOLS})["done"]


def test_results_find_their_calls() -> None:
    from ridgeline.serve.dialects.ollama.protocol import OllamaChatRequest
    from ridgeline.serve.dialects.ollama.request import chat_request

    def call(name: str, **more: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": 1}}, **more}

    messages = [
        {"role": "assistant", "tool_calls": [call("a"), call("b", id="mine"), call("a")]},
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2", "tool_name": "a"},
        {"role": "tool", "content": "3"},
    ]
    asked = OllamaChatRequest.model_validate({"model": "m", "messages": messages})
    found = chat_request(asked).messages
    ids = [one["id"] for one in found[0].tool_calls or ()]
    assert len(set(ids)) == 3
    assert ids[1] == "mine"
    assert [one.tool_call_id for one in found[1:]] == ["mine", ids[0], ids[2]]
    assert json.loads((found[0].tool_calls or [])[0]["function"]["arguments"]) == {"x": 1}


def test_thinking_is_told_apart(reasoner: Served) -> None:
    body = ASK | {"options": {"temperature": 0, "num_predict": 60}}
    said = whole(reasoner, body)["message"]
    assert said["thinking"]
    parts = lines(reasoner, body)
    thoughts = "".join(part["message"].get("thinking", "") for part in parts)
    assert thoughts == said["thinking"]
    assert "".join(part["message"]["content"] for part in parts) == said["content"]
    quiet = whole(reasoner, body | {"think": False})["message"]
    assert "thinking" not in quiet
    found = whole(reasoner, PROMPT | {"options": body["options"]}, GENERATE)
    assert (found["thinking"], found["response"]) == (said["thinking"], said["content"])
    assert "thinking" in reasoner.call("/api/show", {"model": "tiny"})[1]["capabilities"]


def test_logprobs(served: Served) -> None:
    found = whole(served, ASK | {"logprobs": True, "top_logprobs": 2})
    assert len(found["logprobs"]) == 30
    assert all(len(one["top_logprobs"]) == 2 for one in found["logprobs"])
    parts = lines(served, ASK | {"logprobs": True})
    assert sum(len(part.get("logprobs", ())) for part in parts) == 30


@pytest.mark.parametrize("raw", [False, True])
def test_logprobs_of_a_prompt(served: Served, raw: bool) -> None:
    body = PROMPT | {"raw": raw, "logprobs": True, "top_logprobs": 7}
    found = whole(served, body, GENERATE)
    assert len(found["logprobs"]) == found["eval_count"] == 30
    for one in found["logprobs"]:
        assert len(one["top_logprobs"]) == 7
        assert one["top_logprobs"][0]["token"] == one["token"], "greedy"
        assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
    assert found["response"] == whole(served, PROMPT | {"raw": raw}, GENERATE)["response"]
    parts = lines(served, body, GENERATE)
    assert [one for part in parts for one in part.get("logprobs", ())] == found["logprobs"]
    assert "logprobs" not in whole(served, PROMPT | {"raw": raw}, GENERATE)


def test_models_are_listed(served: Served) -> None:
    listed = served.call("/api/tags")[1]
    (one,) = listed["models"]
    assert (one["name"], one["details"]["format"]) == ("tiny:latest", "safetensors")
    assert one["size"] > 0
    assert len(one["digest"]) == 64
    (loaded,) = served.call("/api/ps")[1]["models"]
    assert loaded["digest"] == one["digest"]
    assert loaded["context_length"] == 128
    shown = served.call("/api/show", {"model": "tiny:latest"})[1]
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] == 128
    assert shown["capabilities"][:2] == ["completion", "tools"]
    assert "temperature 0.5" in shown["parameters"]
    spoken = served.call("/api/version")[1]["version"].split(".")
    assert [int(number) for number in spoken] >= [0, 6, 4], "VS Code asks for that one"
    assert served.call("/version")[1]["version"] != ".".join(spoken)
    by_old_name = served.call("/api/show", {"name": "tiny"})[1]
    assert by_old_name["details"] == shown["details"]
    status, answer, _ = served.call("/api/show", {"verbose": True})
    assert (status, answer["error"]) == (400, "model is missing")


def test_whole_numbers_may_have_a_point(served: Served) -> None:
    said = {"seed": 7, "num_predict": 8, "top_k": 40, "repeat_last_n": -1}
    floats = {name: float(value) for name, value in said.items()}
    first, second = (
        whole(served, ASK | {"options": options | {"temperature": 1}}) for options in (said, floats)
    )
    assert first["message"] == second["message"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"model": "other"}, "there is no model 'other'"),
        (CHAT, {"model": None}, "model is missing"),
        (CHAT, {"options": {"mirostat": 1}}, "options.mirostat is not supported"),
        (CHAT, {"options": {"temperature": 3}}, "options.temperature is 3: it must be less than"),
        (CHAT, {"options": {"seed": 1.5}}, "options.seed is 1.5: it must be a valid integer"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict is -3"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "images is not"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        (CHAT, {"format": {"type": 5}}, "format cannot be used"),
        (CHAT, {"format": "xml"}, "format is wrong: it must be json"),
        (GENERATE, {"context": [1, 2]}, "context is not supported: send the conversation"),
        (GENERATE, {"template": "x"}, "template is not supported"),
        (GENERATE, {"raw": True, "system": "x"}, "system needs the model's template"),
        (GENERATE, {"suffix": "x"}, "this model has no fill-in-the-middle tokens"),
        ("/api/embed", {"input": "x", "dimensions": 10**6}, "dimensions is 1000000"),
        ("/api/embed", {"input": "x " * 200, "truncate": False}, "send truncate: true to cut it"),
        ("/api/show", {"model": "other"}, "there is no model 'other'"),
    ],
)
def test_what_is_refused_by_name(
    served: Served, path: str, fields: dict[str, Any], words: str
) -> None:
    base = {CHAT: ASK, GENERATE: PROMPT}.get(path, {"model": "tiny"})
    status, why = refused(served, path, base | fields)
    assert status == (404 if words.startswith("there is no model") else 400)
    assert words in why


def test_a_stream_that_fails_says_so(served: Served) -> None:
    served.valve.before = lambda step: _fail_late(served)
    *parts, last = lines(served, ASK)
    served.valve.before = lambda step: None
    assert set(last) == {"error"}
    assert len(parts) > 1


def _fail_late(served: Served) -> None:
    engine = served.llm.engine
    if any(seq.num_generated > 3 for one in engine.requests.values() for seq in one.sequences):
        raise RuntimeError("broken for a test")


def test_times() -> None:
    known = {"5m": 300, "1h30m": 5400, "300ms": 0.3, "-1": -1, "-5m": -300, 10: 10, 0.5: 0.5}
    for text, seconds in known.items():
        assert parse_seconds(text) == pytest.approx(seconds)
    for text in ("", "5 parsecs", "m", "1h-3m", "inf", "nan", True, "9" * 400):
        with pytest.raises(ValueError, match="is not a time"):
            parse_seconds(text)


@pytest.fixture(scope="module")
def client(shared: Served) -> Iterator[Any]:
    ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")
    found = ollama.Client(host=shared.url)
    yield found
    found._client.close()


def test_the_real_client(client: Any, served: Served) -> None:
    answer = client.chat(model="tiny", messages=HELLO, options=GREEDY)
    assert answer.message.content == whole(served, ASK)["message"]["content"]
    parts = client.chat(model="tiny", messages=HELLO, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert client.generate(model="tiny", prompt="Hello", options=GREEDY).response
    assert client.list().models[0].model == "tiny:latest"
    assert client.show("tiny").details.format == "safetensors"
    assert client.ps().models[0].model == "tiny:latest"
    found = client.embed(model="tiny", input=["x", "y"], dimensions=4)
    assert [sum(v * v for v in one) for one in found.embeddings] == pytest.approx([1, 1], abs=1e-6)
    assert found.prompt_eval_count == 2


def test_vectors_are_those_of_openais_route(served: Served) -> None:
    texts = ["The river is deep.", "dog"]
    data = served.call("/v1/embeddings", {"input": texts})[1]["data"]
    status, answer, _ = served.call("/api/embed", {"model": "tiny", "input": texts})
    assert status == 200
    check_shape(Embedded, answer)
    assert answer["embeddings"] == [one["embedding"] for one in data]
    raw = served.call("/v1/embeddings", {"input": texts[1], "normalize": False})[1]["data"]
    status, answer, _ = served.call("/api/embeddings", {"model": "tiny", "prompt": texts[1]})
    assert (status, answer) == (200, {"embedding": raw[0]["embedding"]})
    long = served.call("/api/embed", {"model": "tiny", "input": "x " * 200})[1]
    assert long["prompt_eval_count"] == 128  # cut to what the model takes
    for nothing in ({}, {"input": ""}, {"input": []}):
        assert served.call("/api/embed", {"model": "tiny", **nothing})[1]["embeddings"] == []
    status, answer, _ = served.call("/api/embed", {"model": "tiny", "input": ["a", "", "b"]})
    assert status == 400 or len(answer["embeddings"]) == 3
    status, answer, _ = served.call("/api/embed", {"model": "tiny", "input": [""]})
    assert status == 400 or len(answer["embeddings"]) == 1
    assert served.call("/api/embeddings", {"model": "tiny"})[1] == {"embedding": []}
