"""A stream that another server goes on with is the one that the first would have sent."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.main import TUNNEL_KEY
from ridgeline.serve.tunnel.middleware import HEADER, header_value
from ridgeline.serve.tunnel.resume_log import DIVERGED, Frames, spent_in
from tests.engine.test_llm import HELLO
from tests.serve.serving import JSON, Served, serving, without_signs
from tests.waiting import connected

KEY = "a key"
CREATED = datetime(2031, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=-11)))
NAME = {"model": "tiny"}
DATED = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ messages[0].content }}"
BLOCK = 16  # tokens that the cache keeps together
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
EMPTY = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 0}},
}
# What is measured, and belongs to the server that ends an answer.
MEASURED = re.compile(
    rb'"(cached_tokens|cache_read_input_tokens|input_tokens|[a-z_]*_duration|[a-z_]*_ms|[a-z_]*per_second|'
    rb'tokens_cached|cache_n|prompt_n|predicted_n)":-?[\d.e+-]+|"(timings)":{[^}]*}'
)
CHAT = "/v1/chat/completions"
WISHES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}),
    "dated": (CHAT, {"messages": HELLO, "chat_template": DATED}),
    "ranked": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 3}),
    "tools": (
        CHAT,
        {
            "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 24,
            "chat_template": "{{ tools | length }} {{ messages[0].content }}",
        },
    ),
    "repeated": (
        CHAT,
        {
            "messages": HELLO, "tools": [EMPTY], "tool_choice": "required", "max_tokens": 120,
            "parallel_tool_calls": True,
            "chat_template": "{{ tools | length }} {{ messages[0].content }}",
        },
    ),
    "form": (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}),
    "prompts": ("/v1/completions", {"prompt": ["one two", "one two"], "n": 2, "logprobs": 1}),
    "stop": ("/v1/completions", {"prompt": "the", "stop": ["e", "zz"], "repetition_penalty": 1.3}),
    "echo": ("/v1/completions", {"prompt": "the cat", "echo": True, "logprobs": 1}),
    "none": ("/v1/completions", {"prompt": "the cat", "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 8}),
    "anthropic": ("/v1/messages", NAME | {"messages": HELLO}),
    "ollama": ("/api/chat", NAME | {"messages": HELLO, "options": {"num_predict": 8}}),
    "generate": ("/api/generate", NAME | {"prompt": "Hello", "options": {"num_predict": 8}}),
    "llama.cpp": ("/completion", {"prompt": "Hello", "n_predict": 8}),
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[tuple[Served, Served]]:
    with two_serving(model) as both:
        yield both


@contextmanager
def two_serving(model: Path) -> Iterator[tuple[Served, Served]]:
    """Yield two servers that a router may ask; their engines count requests differently."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TUNNEL_KEY, KEY)
        with serving(model, {"seed": 1}) as one:
            patch.setenv(TUNNEL_KEY, KEY)
            with serving(model, {"seed": 2}) as other:
                other.call("/v1/completions", {"prompt": "first", "max_tokens": 3})
                yield one, other


def asked(
    served: Served,
    path: str,
    body: dict[str, Any],
    lines: bytes = b"",
    key: str = KEY,
    **others: bool,
) -> tuple[int, bytes]:
    """Ask as a router does; return status and bytes of the answer."""
    with connected(served.port) as connection:
        headers = JSON | {"x-request-id": "same"}
        headers[HEADER.decode()] = header_value(key, 77, CREATED, lines, **others).decode()
        connection.request("POST", path, lines + json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return response.status, response.read()


def pieces_of(answer: bytes) -> list[tuple[bytes, bytes]]:
    """Return the frames of an answer without the last, which says what its key has spent."""
    *pieces, (last, _) = Frames().feed(answer)
    assert spent_in(last)
    found = [(lines, without_signs(body)) for lines, body in pieces]
    return [piece for piece in found if any(piece)]


def masked(body: bytes) -> bytes:
    return MEASURED.sub(b"", body)


@pytest.mark.parametrize("wish", WISHES)
def test_it_goes_on_behind_any_piece(servers: tuple[Served, Served], wish: str) -> None:
    """The rest comes from another process, which has seen other requests, and is equal."""
    path, body = WISHES[wish]
    longest = {"max_tokens": 8} if path.startswith("/v1") and "responses" not in path else {}
    body = {"stream": True, "temperature": 0.9} | longest | body
    status, answer = asked(servers[0], path, body)
    assert status == 200, answer
    pieces = pieces_of(answer)
    whole = masked(b"".join(part for _, part in pieces))
    assert b'"error":{' not in whole
    assert (b"repeated_call" in whole) == (wish == "repeated")
    for cut in range(len(pieces)):
        lines = b"".join(line for line, _ in pieces[:cut])
        shown = b"".join(part for _, part in pieces[:cut])
        status, rest = asked(servers[cut % 2], path, body, lines)
        assert status == 200
        found = b"".join(part for _, part in pieces_of(rest))
        if body.get("n", 1) == 1 and not isinstance(body.get("prompt"), list):
            assert masked(shown + found) == whole, cut
        else:  # answers beside each other come in any order
            assert sorted(masked(shown + found).splitlines()) == sorted(whole.splitlines()), cut
    for served in servers:
        served.assert_idle()


@contextmanager
def counting(served: Served) -> Iterator[list[int]]:
    """Count the tokens that a server computes within the block."""
    counts: list[int] = []
    served.valve.before = lambda step: counts.append(sum(len(one.tokens) for one in step.work))
    yield counts
    served.assert_idle()
    served.valve.before = lambda step: None


def test_what_was_read_before_is_gone_on_with_after_few_tokens(roomy: Path) -> None:
    """A server reads 400 tokens of another one's three answers; then it need not read them again.

    What it computes before the next event is what a client waits for.
    """
    path, body = "/v1/completions", {"prompt": "one two", "n": 3, "max_tokens": 200}
    body |= {"stream": True, "temperature": 0.9, "ignore_eos": True}
    with two_serving(roomy) as (one, other):
        pieces = pieces_of(asked(one, path, body)[1])
        shown_by = list(accumulate(line.count(b"\n") for line, _ in pieces))
        read, moved = (bisect_right(shown_by, num) + 1 for num in (400, 500))
        lines = [b"".join(line for line, _ in pieces[:cut]) for cut in (read, moved)]
        num_shown, num_then = shown_by[read - 1], shown_by[moved - 1]
        before = other.running.model_server.limits.spent.copy()
        with counting(other) as counts:
            assert asked(other, path, body, lines[0], only_reads=True)[0] == 200
        assert sum(counts) > num_shown
        assert other.running.model_server.limits.spent == before, "who goes on counts them"
        other.num_lines()
        assert "finish=read" in "".join(other.lines)
        with counting(other) as counts:
            rest = b"".join(part for _, part in pieces_of(asked(other, path, body, lines[1])[1]))
    shown = b"".join(part for _, part in pieces[:moved])
    whole = b"".join(part for _, part in pieces)
    assert sorted(masked(shown + rest).splitlines()) == sorted(masked(whole).splitlines())
    num_left, num_meanwhile = 3 * 200 - num_then, num_then - num_shown
    assert sum(counts) <= num_left + num_meanwhile + 3 * 2 * BLOCK


def test_the_time_is_the_routers(servers: tuple[Served, Served]) -> None:
    """Also that of a template, in the router's time zone: no other clock is read."""
    path, body = WISHES["dated"]
    _, answer = asked(servers[0], path, body | {"stream": True, "return_token_ids": True})
    first = json.loads(pieces_of(answer)[0][1].splitlines()[0].removeprefix(b"data: "))
    assert first["created"] == CREATED.timestamp()
    ids = first["prompt_token_ids"]
    assert servers[0].llm.tokenizer.decode(ids).startswith("2031-12-31 23:59:59 ")


@pytest.mark.parametrize("change", ["token", "prompt", "server"])
def test_what_would_not_be_the_same_is_not_gone_on_with(
    servers: tuple[Served, Served], change: str
) -> None:
    path, body = WISHES["chat"]
    body = body | {"stream": True, "max_tokens": 8}
    pieces = pieces_of(asked(servers[0], path, body)[1])
    head, *entries = b"".join(line for line, _ in pieces).splitlines(keepends=True)[:4]
    if change == "token":
        last = json.loads(entries[-1])
        last[2] = (last[2] + 1) % 400
        entries[-1] = json.dumps(last).encode() + b"\n"
    elif change == "server":
        head = json.dumps([json.loads(head)[0], "fp_other"]).encode() + b"\n"
    else:
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    status, rest = asked(servers[1], path, body, b"".join([head, *entries]))
    assert status == 200  # the stream has begun: its end is an event of it
    ((lines, shown),) = [piece for piece in pieces_of(rest) if piece[1]]
    assert lines == DIVERGED
    assert b"the server that goes on" in shown
    assert b"[DONE]" not in shown
    servers[1].assert_idle()


def test_strangers_are_refused(servers: tuple[Served, Served]) -> None:
    path, body = WISHES["chat"]
    assert asked(servers[0], path, body, key="guess")[0] == 403
    for lines in (b"{", b"[]\n[0]\n", b"[]\n[0,0,-1,3]\n", b'[]\n["0",0,1,""]\n', b"[]\n{}\n"):
        assert asked(servers[0], path, body | {"stream": True}, lines)[0] == 400, lines
    for header in ("", "[]", "{}", '{"key": 1}', "null", '{"key":"a key","seed":-1}'):
        status, error, _ = servers[0].call(path, body, **{HEADER.decode(): header})
        assert status == 400, error
    servers[0].assert_idle()


def test_a_server_without_a_router_answers_as_ever(model: Path) -> None:
    path, body = WISHES["chat"]
    with serving(model) as served:
        status, answer = asked(served, path, body | {"stream": True, "max_tokens": 3})
        assert status == 200
        assert without_signs(answer).startswith(b"data: {")
        assert answer.endswith(b"data: [DONE]\n\n")
