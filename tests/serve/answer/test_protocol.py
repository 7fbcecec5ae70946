"""Every field is honoured or refused by its name; every error has OpenAI's shape; never a 5xx."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.answer.schemas import ChatCompletion, Completion
from tests.engine.test_llm import HELLO
from tests.serve.serving import Served, check_shape, serving
from tests.waiting import PATIENCE_S, eventually

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
GO_ON: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}
FORM = {"content_type": "text/plain", "origin": "http://localhost"}  # as a page sends it unasked


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_the_first_field_that_is_not_supported_is_named(served: Served, path: str) -> None:
    fields = {"functions": [1], "mirostat": 2, "documents": [1], "logprobs": "x", "n_probs": 5}
    for names in (list(fields), list(fields)[::-1]):
        body = {name: fields[name] for name in names} | (ASK if path == CHAT else GO_ON)
        assert served.refused(path, body)[1]["param"] == names[0]


def _nested(depth: int) -> list[Any]:
    calls: Any = {"function": {}}
    for _ in range(depth):
        calls = {"a": calls}
    return [{"role": "assistant", "content": "", "tool_calls": [calls]}, *HELLO]


def test_what_is_nested_too_deeply_is_refused_before_a_template_sees_it(served: Served) -> None:
    assert served.call(CHAT, ASK | {"messages": _nested(150)})[0] == 200
    for depth in (200, 490, 600, 5000):
        body = json.dumps(ASK | {"messages": []}).replace("[]", "%s").encode()
        deep = b'[{"role":"user","content":"x","tool_calls":[{"a":%s1%s}]}]'
        deep %= (b"[" * depth, b"]" * depth)
        status, answer, _ = served.call(CHAT, body % deep)
        assert (status, answer["error"]["code"]) == (400, "invalid_json"), depth
        assert "recursion limit" in answer["error"]["message"]


@pytest.mark.parametrize(
    "field", ['"stop": %s', '"stop": [%s]', '"metadata": {"a": %s}', '"user": %s', '"tools": [%s]']
)
def test_half_a_letter_is_refused_everywhere(served: Served, field: str) -> None:
    for half in (r'"\ud800"', r'"a\udc00"', r'"\ud800\ud800"', r'"\ud83dx"'):
        body = '{"prompt": "x", "max_tokens": 1, ' + field % half + "}"
        status, answer, _ = served.call(COMPLETE, body.encode())
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
    whole = '{"prompt": "x", "max_tokens": 1, "stop": "\\ud83d\\ude00"}'
    assert served.call(COMPLETE, whole.encode())[0] == 200


def test_a_chat_of_no_tokens_only_reads_its_prompt(served: Served) -> None:
    ask = {"messages": [{"role": "user", "content": "Read this."}], "max_tokens": 0}
    status, found, _ = served.call(CHAT, ask | {"logprobs": True, "max_completion_tokens": 0})
    choice = found["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "length")
    assert not choice["message"]["content"]
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["prompt_tokens"] > 0


def test_many_stop_strings(served: Served) -> None:
    stop = [f"never {i}" for i in range(64)]
    assert served.call(COMPLETE, GO_ON | {"stop": stop})[0] == 200


def test_a_bug_has_a_code_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.running.model_server, "reply", None)
    status, error = served.refused(COMPLETE, GO_ON)
    assert (status, error["code"]) == (500, "internal_error")


def test_flags_lower_the_limits(model: Path) -> None:
    bounds = {"max_n": 2, "max_stop": 1, "max_logprobs": 3, "max_temperature": 1.0}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    at_most: dict[str, Any] = {"n": 2, "stop": ["a"], "temperature": 1, "logit_bias": {"5": -10}}
    beyond: dict[str, Any] = {"n": 3, "stop": ["a", "b"], "temperature": 1.1, "logprobs": 4}
    with serving(model, **bounds, max_logit_bias=10.0) as served:
        allowed = chat | at_most | {"logprobs": True, "top_logprobs": 3}
        assert served.call(CHAT, allowed)[0] == 200
        for name, value in (beyond | {"logit_bias": {"5": -11}}).items():
            served.refused_for(name, COMPLETE, {"prompt": "Hi", name: value})
        ranked = chat | {"logprobs": True, "top_logprobs": 4}
        error = served.refused_for("top_logprobs", CHAT, ranked)
        assert error["message"] == "top_logprobs asks for 4: this server allows at most 3"


def test_values_that_change_nothing_are_let_pass(served: Served) -> None:
    nothing = dict.fromkeys(
        ("tools", "stop", "seed", "n", "temperature", "logit_bias", "stream_options", "audio")
    )
    nothing |= {"response_format": {"type": "text"}, "tools": [], "priority": 0, "store": False}
    nothing |= {"user": "me", "metadata": {"a": "b"}, "tool_choice": "none"}
    assert served.call(CHAT, ASK | nothing)[0] == 200
    nothing.pop("audio")
    assert served.call(COMPLETE, GO_ON | nothing | {"best_of": 1, "suffix": ""})[0] == 200


def test_what_cannot_change_an_answer_is_dropped_and_named(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "cache_control": {}, "whatever": None}
    body = ASK | {"tools": tools, "tool_choice": "none", "messages": [message], "whatever": None}
    status, answer, headers = served.call(CHAT, body | {"temperature": 0})
    assert status == 200
    dropped = "messages.cache_control, messages.content.cache_control"
    assert headers["x-ridgeline-ignored"] == dropped
    plain, found, headers = served.call(CHAT, ASK | {"messages": HELLO, "temperature": 0})
    assert (plain, found["choices"]) == (200, answer["choices"])
    assert "x-ridgeline-ignored" not in headers
    body = {"messages": [message]}
    assert served.call("/tokenize", body)[2]["x-ridgeline-ignored"].startswith("messages.")
    nulls = {"metadata": {"a": None, "b": "c"}, "logit_bias": {"50": None, "51": 100}}
    nulls |= {"stream": True, "stream_options": {"include_usage": None, "other": None}}
    assert served.call(COMPLETE, GO_ON | nulls)[0] == 200


def test_the_log_says_why_a_request_was_refused(served: Served) -> None:
    for path, body, headers in (
        (COMPLETE, GO_ON | {"mirostat": 1}, {}),
        (COMPLETE, GO_ON | {"max_tokens": -2}, {}),
        (CHAT, ASK, FORM),
        ("/v1/nothing", {}, {}),
    ):
        before = len(served.lines)
        status, error = served.refused(path, body, **headers)
        wanted = (f"status={status}", f"error={json.dumps(error['message'])}")
        eventually(  # lines of requests before may still come
            lambda wanted=wanted, before=before: any(
                all(part in line for part in wanted) for line in served.lines[before:]
            )
        )


def test_message_forms(served: Served) -> None:
    """Parts are joined; developer, system, assistant and tool messages reach the template."""

    def ids(messages: list[dict[str, Any]], **more: Any) -> Any:
        status, found, _ = served.call("/tokenize", {"messages": messages, **more})
        assert status == 200
        return found["tokens"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    user = {"role": "user", "content": "a\nb"}
    assert ids([{"role": "user", "content": parts}]) == ids([user])
    for role in ("system", "developer", "assistant", "tool"):
        assert ids([{"role": role, "content": "x", "name": "n"}, user]) != ids([user])
    system = {"role": "system", "content": "x"}
    assert ids([system | {"role": "developer"}, user]) == ids([system, user])
    begun = [user, {"role": "assistant", "content": "I"}]
    assert ids(begun, continue_final_message=True) == ids(begun, add_generation_prompt=False)


def test_a_token_that_stops_is_left_out_until_there_are_enough(served: Served) -> None:
    def text(**fields: Any) -> str:
        base = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        status, found, _ = served.call(COMPLETE, base | fields)
        assert status == 200, found
        return str(found["choices"][0]["text"])

    always = {"logit_bias": {"50": 100}, "stop_token_ids": [50]}
    assert text(**always) == ""
    assert text(**always, min_tokens=100) != ""


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/nothing", None, {}, 404),
        ("GET", CHAT, None, {}, 405),
        ("DELETE", "/metrics", None, {}, 405),
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, b"", {}, 400),
        ("POST", CHAT, b"[1]", {}, 400),
        ("POST", CHAT, b"null", {}, 400),
        ("POST", CHAT, b"[" * 100_000, {}, 400),
        ("POST", CHAT, b'{"n": ' + b"9" * 10_000 + b"}", {}, 400),
        ("POST", CHAT, b"\xff\xfe{}", {}, 400),
        ("POST", COMPLETE, b'{"prompt": "\\ud800"}', {}, 400),
        ("POST", COMPLETE, b'{"prompt": "x", "temperature": NaN}', {}, 400),
        ("POST", COMPLETE, b'{"prompt": "x", "temperature": 1e400}', {}, 400),
        ("POST", COMPLETE, b"{}", FORM, 415),
        ("POST", COMPLETE, b"{}", {"content_encoding": "gzip"}, 415),
        ("POST", COMPLETE, b" " * ((8 << 20) + 1), {}, 413),
    ],
)
def test_what_is_no_request(
    served: Served,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
) -> None:
    found, answer, _ = served.call(path, body, method, **headers)
    assert found == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"]
    text = json.dumps(answer)
    assert not any(leak in text for leak in ("Traceback", "/src/", ".py", "0x"))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"include_timings": True, "n": 2, "stop": ["a", "e"]},
        {
            "timings_per_token": True,
            "return_token_ids": True,
            "prompt_logprobs": 2,
            "verbose": True,
        },
    ],
)
def test_answers_have_the_documented_shape(served: Served, more: dict[str, Any]) -> None:
    ranked = {"logprobs": True, "top_logprobs": 2}
    for wish in (ASK | more, ASK | more | ranked):
        check_shape(ChatCompletion, served.call(CHAT, wish)[1])
    for wish in (GO_ON | more, GO_ON | more | {"logprobs": 2, "echo": True}):
        check_shape(Completion, served.call(COMPLETE, wish)[1])


def test_the_openapi_document_has_every_field(served: Served) -> None:
    status, document, _ = served.call("/openapi.json")
    assert status == 200
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "top_logprobs", "include_timings"} <= fields.keys()


def test_requests_are_answered_while_the_openapi_document_is_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Event(), threading.Event()

    def slow() -> dict[str, Any]:
        begun.set()
        return {"is_alone": not answered.wait(PATIENCE_S)}

    with serving(model) as served, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(served.running.parts.app, "openapi", slow)
        document = pool.submit(served.call, "/openapi.json")
        assert begun.wait(PATIENCE_S)
        assert served.call("/health")[0] == 200
        answered.set()
        assert document.result()[1] == {"is_alone": False}


def test_no_page_loads_anything_from_elsewhere(served: Served) -> None:
    """It works without a network, and tells nobody that it is used."""
    pages = 0
    for route in served.running.parts.app.routes:
        path = getattr(route, "path", "")
        if "{" in path or path in ("/v1/live", "/openapi.json"):
            continue
        _, body, headers = served.call(path)
        if headers.get("content-type", "").startswith("text/html"):
            pages += 1
            assert b'="http' not in body
    assert pages


def test_a_bias_of_nothing_may_have_any_key(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    assert served.call(CHAT, body | {"logit_bias": {"foo": 0, "7": 0.0}})[0] == 200


def test_a_prompt_is_cut_from_the_left_if_that_is_asked_for(served: Served) -> None:
    ids = [*range(40, 90)] * 4  # longer than the model takes
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for most, kept in ((5, ids[-5:]), (-1, ids[-120:])):
        answer = served.call(COMPLETE, body | {"prompt": ids, "truncate_prompt_tokens": most})[1]
        expected = served.call(COMPLETE, body | {"prompt": kept})[1]
        (choice,), (same,) = answer["choices"], expected["choices"]
        assert choice["prompt_token_ids"] == kept
        assert choice["text"] == same["text"]
        assert answer["usage"]["prompt_tokens"] == len(kept)
    chat = body | {"messages": HELLO, "truncate_prompt_tokens": 3}
    whole = served.call(CHAT, body | {"messages": HELLO})[1]["prompt_token_ids"]
    assert served.call(CHAT, chat)[1]["prompt_token_ids"] == whole[-3:]
