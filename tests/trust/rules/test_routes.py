"""Answers that are forced to say what a rule forbids, on every route; raw bytes are searched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import JSON, Served, serving
from tests.trust.rules.reading import Told
from tests.waiting import connected, eventually

SECRET = "bob@example.com"
# As patterns and prompts write it: a request must not have the text itself.
PATTERN = "[b]ob@example[.]com"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": f"^x {PATTERN}$"}},
    "required": ["a"],
    "additionalProperties": False,
}
RULES = """
version = "1"
[keys.default]
output = ["pii"]
[rules.pii]
kinds = ["email", "card", "iban", "phone", "us_ssn", "ip", "aws_key", "github_token", "jwt"]
patterns = ["project heron", 'K-\\d{4}']
action = "ACTION"
says = "I may not say that."
"""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 60}
TOOL = {"name": "send", "parameters": SCHEMA}
GRAMMAR = 'root ::= "x " [b] "ob@ex" [a] "mple.com y"'
REGEX = {"structured_outputs": {"regex": f"x {PATTERN} y"}}
BEAMS = {"structured_outputs": {"regex": f"x {PATTERN} [yz]"}}  # n asks for two answers
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

OPTIONS = {"options": {"num_predict": 300}}

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, **REGEX}),
    "chat with logprobs": (
        "/v1/chat/completions",
        {**CHAT, **REGEX, "logprobs": True, "top_logprobs": 5, "return_token_ids": True},
    ),
    "three chats": ("/v1/chat/completions", {**CHAT, **REGEX, "n": 3}),
    "chat in JSON": ("/v1/chat/completions", {**CHAT, "response_format": JSON_FORM}),
    "chat with a prediction": (
        "/v1/chat/completions",
        {**CHAT, **REGEX, "prediction": {"type": "content", "content": "x bob"}},
    ),
    "a call": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "completion": ("/v1/completions", {**TEXT, **REGEX}),
    "completion with logprobs": (
        "/v1/completions",
        {**TEXT, **REGEX, "logprobs": 5, "echo": True, "return_token_ids": True},
    ),
    "beams": ("/v1/completions", {**TEXT, **BEAMS, "use_beam_search": True, "n": 2}),
    "the best of three": ("/v1/completions", {**TEXT, **REGEX, "best_of": 3}),
    "two prompts": ("/v1/completions", {**TEXT, **REGEX, "prompt": ["x", "y"]}),
    "responses": (
        "/v1/responses",
        {
            "input": "x",
            "max_output_tokens": 300,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
    ),
    "messages": (
        "/v1/messages",
        {**CHAT, "model": "tiny", "output_format": {"type": "json_schema", "schema": SCHEMA}},
    ),
    "a call in messages": (
        "/v1/messages",
        {
            **CHAT,
            "model": "tiny",
            "tools": [{"name": "send", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "Ollama's chat": (
        "/api/chat",
        {"model": "tiny", "messages": CHAT["messages"], "format": SCHEMA, **OPTIONS},
    ),
    "Ollama's generate": (
        "/api/generate",
        {"model": "tiny", "prompt": "x", "format": SCHEMA, "raw": True, **OPTIONS},
    ),
    "llama.cpp's": (
        "/completion",
        {"prompt": "x", "n_predict": 60, "grammar": GRAMMAR, "n_probs": 5, "return_tokens": True},
    ),
    "llama.cpp's other": ("/completions", {"prompt": "x", "n_predict": 60, "grammar": GRAMMAR}),
    "infill": (
        "/infill",
        {"input_prefix": "x", "input_suffix": "y", "n_predict": 60, "grammar": GRAMMAR},
    ),
}
ENDS = {  # the word of each dialect for an answer that a rule has ended
    "/v1/chat/completions": b'"finish_reason":"content_filter"',
    "/v1/completions": b'"finish_reason":"content_filter"',
    "/v1/responses": b'"incomplete_details":{"reason":"content_filter"}',
    "/v1/messages": b'"stop_reason":"refusal"',
    "/api/chat": b'"done_reason":"stop"',
    "/api/generate": b'"done_reason":"stop"',
}


def rules_file(path: Path, action: str = "block", text: str = RULES) -> Path:
    path.write_text(text.replace("ACTION", action))
    return path


@pytest.fixture(scope="module", params=["block", "redact"])
def ruled(
    roomy: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    file = rules_file(tmp_path_factory.mktemp("rules") / "rules.toml", request.param)
    with serving(roomy, rules=file) as served:
        yield served


def sent(served: Served, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Return the status of an answer and its body, as the socket has it."""
    with connected(served.port) as connection:
        connection.request("POST", path, json.dumps(body).encode(), JSON)
        response = connection.getresponse()
        return response.status, response.read()


def is_clean(data: bytes) -> bool:
    """Whether neither the bytes nor any text that a client makes of them has the secret."""
    joined = data.replace(b"\\", b"").lower()
    return SECRET.encode() not in data.lower() and SECRET.encode() not in joined


def assert_untold(served: Served, data: bytes) -> None:
    """Assert that neither an answer's bytes nor what a client can make of them has the secret."""
    assert is_clean(data), data
    told = Told(data, served.llm.text.tokenizer.token_bytes)
    assert told.texts
    for span in told.spans():
        assert SECRET.encode() not in span.lower(), (span, data)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_no_byte_that_a_rule_forbids_leaves_the_socket(
    ruled: Served, name: str, *, stream: bool
) -> None:
    path, body = ROUTES[name]
    if stream and ("use_beam_search" in body or "best_of" in body):
        stream = False
    status, data = sent(ruled, path, body | {"stream": stream, "seed": 1})
    assert status == 200, data
    assert_untold(ruled, data)
    assert ENDS.get(path, b'"stop_type":"limit"') in data, data
    ruled.assert_idle()


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_no_byte_leaves_the_routes_of_triton(ruled: Served, route: str) -> None:
    body = {"text_input": "x", "max_tokens": 60, "return_finish_reason": True, **REGEX}
    status, data = sent(ruled, f"/v2/models/tiny/{route}", body)
    assert status == 200, data
    assert is_clean(data), data
    assert b"content_filter" in data


def test_the_forced_answers_say_it_where_no_rule_holds(roomy: Path) -> None:
    """Or the tests above would show nothing."""
    with serving(roomy) as served:
        for path, body in ROUTES.values():
            status, data = sent(served, path, body | {"stream": False})
            assert status == 200, data
            assert SECRET.encode() in data, (path, data)
            told = Told(data, served.llm.text.tokenizer.token_bytes)
            assert any(SECRET.encode() in span for span in told.spans())


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_text_is_replaced_and_so_are_its_tokens(ruled: Served, *, stream: bool) -> None:
    body = {"prompt": f"to {SECRET} now", "echo": True, "max_tokens": 3, "stream": stream}
    body |= {"logprobs": 2, "return_token_ids": True, "stop": [SECRET]}
    status, data = sent(ruled, "/v1/completions", body)
    assert status == 200
    assert is_clean(data), data
    assert (b"[EMAIL]" in data) or b"content_filter" in data


def test_metrics_count_matches_and_the_log_names_the_rule_alone(ruled: Served) -> None:
    before = ruled.num_lines()
    sent(ruled, *ROUTES["chat"])
    eventually(lambda: ruled.lines[before:])  # a line is written after its answer
    (line,) = ruled.lines[before:]
    assert "pii:content:" in line
    assert "rules=1/default" in line
    assert "example" not in line
    assert any(name.startswith("ridgeline:rule_hits_total") for name in ruled.metrics())


@pytest.mark.parametrize("path", ["/v1/responses", "/completion"])
def test_a_rule_may_forbid_the_name_of_a_field(roomy: Path, tmp_path: Path, path: str) -> None:
    """Fields are the dialect's words; what they say is the request's."""
    words = ["tools", "temperature", "grammar"]
    text = f'version = "1"\n[keys.default]\noutput = ["words"]\n[rules.words]\npatterns = {words}\n'
    text += 'action = "redact"\n'
    bodies = {
        "/v1/responses": {"input": "x", "instructions": "no tools", "max_output_tokens": 3},
        "/completion": {"prompt": "x", "n_predict": 3, "stop": ["no tools"]},
    }
    with serving(roomy, rules=rules_file(tmp_path / "rules.toml", text=text)) as served:
        status, data = sent(served, path, bodies[path])
    assert status == 200, data
    found = json.loads(data)
    settings = found.get("generation_settings", found)
    assert "temperature" in settings
    said = settings["stop"][0] if path == "/completion" else settings["instructions"]
    assert said.startswith("no ")
    assert said != "no tools"
