"""Who may come in: keys on every route, names that are ours, limits for each key, the log."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.core.step import Step
from ridgeline.serve.answer.reply import OpenAiWriter
from ridgeline.serve.http.errors import is_triton
from tests.engine.test_llm import HELLO
from tests.serve.serving import JSON, Served, serving
from tests.waiting import PATIENCE_S, connected, eventually

GO_ON = {"prompt": "hello", "max_tokens": 3}
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[Served]:
    with serving(model, api_key=["first-key", "second-key"]) as served:
        yield served


def test_every_route_needs_a_key_but_the_probes_and_the_page(locked: Served) -> None:
    paths = sorted({getattr(route, "path", "") for route in locked.running.parts.app.routes})
    assert {COMPLETE, "/metrics", "/openapi.json", "/health", "/v1/live"} <= set(paths)
    page = [path for path in paths if re.fullmatch(r"/page/[\w.\-/]+\.(m?js|css|svg|woff2)", path)]
    open_paths = ("/", "/plan", "/health", "/ready", "/v2/health/live", "/v2/health/ready")
    open_paths += ("/health/",)
    for path in [*paths, "/new", "//v1/models", "/v1/../health", "/health/", "/%68ealth2"]:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            status, answer, _ = locked.call(path, None, method)
            if path in open_paths or path in page:
                assert status in (200, 405, 415), (method, path)
                continue
            assert status == 401, (method, path)
            is_text = path.startswith("/api/") or is_triton(path)  # whose errors are texts
            if is_text and method != "HEAD":
                assert "needs an API key" in answer["error"]
                continue
            named = {"invalid_api_key", "authentication_error"}  # the second is Anthropic's
            assert method == "HEAD" or named & {*answer["error"].values()}


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", "Bearer wrong", "Bearer first-key2", "Bearer FIRST-KEY"),
        *("first-key", "Basic first-key", "Bearer first-key second-key", "Bearer first-key\t,"),
    ],
)
def test_what_is_no_key_opens_nothing(locked: Served, header: str) -> None:
    status, error = locked.refused(COMPLETE, GO_ON, authorization=header)
    assert (status, error["type"]) == (401, "authentication_error")
    assert locked.call(f"{COMPLETE}?api_key=first-key", GO_ON)[0] == 401
    assert locked.call(COMPLETE, GO_ON, host="localhost/health?")[0] in (401, 403)


def test_any_of_the_keys_opens(locked: Served) -> None:
    for key in ("first-key", "second-key"):
        assert locked.client(key).completions.create(model="tiny", **GO_ON).choices
    assert locked.call(COMPLETE, GO_ON, authorization="bearer first-key")[0] == 200
    with pytest.raises(openai.AuthenticationError):
        locked.client("third-key").models.list()


def test_keys_are_labelled_and_never_logged(locked: Served) -> None:
    locked.call(COMPLETE, GO_ON, **bearer("second-key"))
    locked.call(COMPLETE, GO_ON, **bearer("third-key"))
    eventually(lambda: any("status=401" in line for line in locked.lines))
    eventually(lambda: any("key=key2 " in x and "status=200" in x for x in locked.lines))
    assert not any("-key" in line for line in locked.lines)


def test_the_file_of_keys_is_read_again(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice  key-a\nkey-b\n")
    with serving(model, api_key_file=file) as served:
        assert [served.call("/version", **bearer(k))[0] for k in ("key-a", "key-b", "key-c")] == [
            200,
            200,
            401,
        ]
        file.write_text("carol key-c\n")
        served.running.reload_keys()
        assert [served.call("/version", **bearer(k))[0] for k in ("key-a", "key-b", "key-c")] == [
            401,
            401,
            200,
        ]
        for damaged in ("", "a b c\n", "x k1\nx k2\n"):
            file.write_text(damaged)
            served.running.reload_keys()
            assert served.call("/version", **bearer("key-c"))[0] == 200
        eventually(lambda: any("key=alice" in line for line in served.lines))
        assert sum("keys were not reloaded" in line for line in served.lines) == 3


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_a_name_that_is_not_ours_is_refused(served: Served, host: str) -> None:
    status, error = served.refused(COMPLETE, GO_ON, host=host)
    assert (status, error["code"]) == (403, "unknown_host")


def test_our_own_names_and_pages_may_call(served: Served) -> None:
    for host in ("localhost", "127.0.0.1:99", "LOCALHOST:8000", "[::1]:8000", "[::1]"):
        assert served.call("/health", host=host)[0] == 200
    own = f"127.0.0.1:{served.port}"
    assert served.call("/health", origin=f"http://{own}")[0] == 200
    for origin in ("http://evil.example", "null", f"http://{own}.evil.example"):
        assert served.call("/health", origin=origin)[0] == 403


PAGE, OTHER = "https://page.example", "https://other.example"


def ask_first(served: Served, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Ask as a browser does before a page of ``origin`` may send a POST."""
    headers = {"access-control-request-method": "POST", "origin": origin} | headers
    status, _, found = served.call(COMPLETE, None, "OPTIONS", **headers)
    return status, found


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1:5173", "https://localhost", "http://[::1]:80"],
)
def test_pages_of_this_machine_may_call_a_server_of_this_machine(
    served: Served, origin: str
) -> None:
    status, headers = ask_first(served, origin)
    assert (status, headers["access-control-allow-origin"]) == (200, origin)
    status, _, headers = served.call(COMPLETE, GO_ON, origin=origin)
    assert (status, headers["access-control-allow-origin"]) == (200, origin)


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost.evil.example",
        "http://evil.example",
        "http://localhost:3000.evil.example",
        "http://127.0.0.1.evil.example",
        "http://evil-localhost",
        "null",
        "file://",
    ],
)
def test_foreign_pages_may_not(served: Served, origin: str) -> None:
    status, headers = ask_first(served, origin)
    assert (status, "access-control-allow-origin" in headers) == (200, False)
    status, _, headers = served.call(COMPLETE, GO_ON, origin=origin)
    assert (status, "access-control-allow-origin" in headers) == (403, False)


def test_pages_of_this_machine_may_not_call_where_others_are_named(model: Path) -> None:
    for options in ({"cors_origin": [PAGE]}, {"host": "0.0.0.0", "allowed_host": ["x.example"]}):
        with serving(model, **options) as served:
            status, _, headers = served.call(COMPLETE, GO_ON, origin="http://localhost:3000")
            assert (status, "access-control-allow-origin" in headers) == (403, False)


def test_cors_is_for_those_named(model: Path) -> None:
    with serving(model, cors_origin=[PAGE], api_key=["k"]) as served:
        status, headers = ask_first(served, PAGE)
        assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
        for key, expected in (("k", 200), ("wrong", 401)):  # a refusal can be read too
            status, _, headers = served.call(COMPLETE, GO_ON, origin=PAGE, **bearer(key))
            assert (status, headers["access-control-allow-origin"]) == (expected, PAGE)
            assert headers["access-control-expose-headers"] == "*"
            assert headers["vary"] == "Origin"
        status, headers = ask_first(served, OTHER)
        assert (status, "access-control-allow-origin" in headers) == (200, False)
        status, _, headers = served.call(COMPLETE, GO_ON, origin=OTHER, **bearer("k"))
        assert (status, "access-control-allow-origin" in headers) == (403, False)
        eventually(lambda: sum("method=OPTIONS" in line for line in served.lines) == 2)
        (refused,) = (
            line for line in served.lines if "method=OPTIONS" in line and "error=" in line
        )
        assert f"error=\"pages of '{OTHER}' may not call this: see --cors-origin\"" in refused


def test_a_page_may_send_whatever_headers_it_asks_for(model: Path) -> None:
    """As those of openai's JavaScript client, which change with its versions."""
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    with serving(model, cors_origin=[PAGE]) as served:
        wishes = {"access-control-request-headers": asked}
        wishes["access-control-request-private-network"] = "true"  # from a public page to localhost
        status, headers = ask_first(served, PAGE, **wishes)
        assert (status, headers["access-control-allow-headers"]) == (200, asked)
        assert headers["access-control-allow-private-network"] == "true"
        assert "POST" in headers["access-control-allow-methods"]
        assert int(headers["access-control-max-age"]) >= 60
        assert headers["x-request-id"]


def test_any_page_may_call_where_that_is_asked_for(model: Path) -> None:
    with serving(model, cors_origin=["*"]) as served:
        status, headers = ask_first(served, OTHER)
        assert (status, headers["access-control-allow-origin"]) == (200, OTHER)
        status, _, headers = served.call(COMPLETE, GO_ON, origin=OTHER)
        assert (status, headers["access-control-allow-origin"]) == (200, OTHER)
        assert served.call("/health", host="evil.example", origin=OTHER)[0] == 403


def test_no_page_may_call_where_none_is_named(served: Served) -> None:
    status, headers = ask_first(served, OTHER)
    assert (status, "access-control-allow-origin" in headers) == (200, False)


def test_a_request_id_is_kept_if_it_is_sane(served: Served) -> None:
    assert served.call("/health", x_request_id="abc-1.2")[2]["x-request-id"] == "abc-1.2"
    for odd in ("a b", "x" * 129, "http://127.0.0.1/?x", "\u00e9"):
        made = served.call("/health", x_request_id=odd.encode("latin-1").decode("latin-1"))[2]
        assert made["x-request-id"] != odd
        assert len(made["x-request-id"]) == 32


def test_the_same_id_twice_at_once_is_two_requests(served: Served) -> None:
    """The name is the client's business; nothing here depends on its being told apart."""
    with ThreadPoolExecutor(2) as pool:
        bodies = [GO_ON | {"max_tokens": count, "ignore_eos": True} for count in (3, 5)]
        found = pool.map(lambda body: served.call(COMPLETE, body, x_request_id="same"), bodies)
        answers = [answer for _, answer, _ in found]
    assert [answer["id"] for answer in answers] == ["cmpl-same"] * 2
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [3, 5]


# --- the order --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[Served]:
    """A server that refuses nearly everything, each thing for a reason of its own."""
    limits = {"max_requests_per_minute": 1, "max_body": "100"}
    keys = ["k4", "k5", "spent"]
    with serving(model, api_key=keys, cors_origin=[PAGE], **limits) as served:
        served.stop_clock_of_limits()
        assert served.call("/tokenize", {"prompt": "x"}, **bearer("spent"))[0] == 200
        yield served


# What is wrong with a request, in the order in which it is looked at, and how it is refused then.
WRONGS: list[tuple[dict[str, str], int, str]] = [
    ({"host": "evil.example"}, 403, "unknown_host"),
    ({"origin": OTHER}, 403, "origin"),
    ({"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    ({"authorization": "Bearer spent"}, 429, "rate_limit_exceeded"),
    ({"content-length": "101"}, 413, "request_too_large"),
    ({"content-encoding": "gzip"}, 415, "unsupported_media_type"),
]


@pytest.mark.parametrize("first", range(len(WRONGS)))
def test_a_request_is_refused_for_the_first_thing_that_is_wrong(narrow: Served, first: int) -> None:
    """Host, Origin, key, the key's limits, size of the body, and what it says that it is."""
    headers = {"origin": PAGE, **bearer(f"k{first}")}
    for wrong, _, _ in reversed(WRONGS[first:]):
        headers |= wrong
    body = b"x" * int(headers.pop("content-length", "2"))
    status, answer, found = narrow.call(COMPLETE, body, **headers)
    assert (status, answer["error"]["code"]) == WRONGS[first][1:]
    assert ("access-control-allow-origin" in found) == (headers["origin"] == PAGE)
    assert found["x-request-id"]
    assert ("x-ratelimit-limit-requests" in found) == (first > 2)


# --- limits -------------------------------------------------------------------------------------


def test_requests_per_minute_are_counted_for_each_key(model: Path) -> None:
    with serving(model, api_key=["a", "b"], max_requests_per_minute=3) as served:
        served.stop_clock_of_limits()
        for left in (2, 1, 0):
            status, _, headers = served.call(COMPLETE, GO_ON, **bearer("a"))
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, str(left))
        status, error = served.refused(COMPLETE, GO_ON, **bearer("a"))
        assert (status, error["type"], error["code"]) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        _, _, headers = served.call(COMPLETE, GO_ON, **bearer("a"))
        assert headers["retry-after"] == "20"
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert served.call(COMPLETE, GO_ON, **bearer("b"))[0] == 200
        with pytest.raises(openai.RateLimitError):
            served.client("a").completions.create(model="tiny", **GO_ON)


def test_every_post_counts_whatever_becomes_of_it_and_looking_does_not(model: Path) -> None:
    asked: list[tuple[str, Any, int]] = [
        (COMPLETE, b"{", 400),
        (COMPLETE, {"prompt": [40] * 500}, 400),
        ("/tokenize", {"prompt": "x"}, 200),
        ("/detokenize", {"tokens": [40]}, 200),
        ("/v1/embeddings", {"input": ""}, 400),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}, 200),
        ("/v1/plan", {"model": {}}, 400),
        ("/v1/nothing", {}, 404),
    ]
    with serving(model, api_key=["a"], max_requests_per_minute=len(asked)) as served:
        served.stop_clock_of_limits()
        for left, (path, body, expected) in zip(range(len(asked))[::-1], asked, strict=True):
            for look in ("/v1/models", "/metrics", "/v1/memory", "/nothing"):
                assert served.call(look, **bearer("a"))[0] in (200, 404)
            status, _, headers = served.call(path, body, **bearer("a"))
            assert (status, headers["x-ratelimit-remaining-requests"]) == (expected, str(left))
        for path, _, _ in asked:
            status, _, headers = served.call(path, {}, **bearer("a"))
            assert (status, headers["x-ratelimit-limit-requests"]) == (429, str(len(asked)))


def test_tokens_per_minute_count_prompt_and_answer(model: Path) -> None:
    with serving(model, api_key=["a"], max_tokens_per_minute=20) as served:
        served.stop_clock_of_limits()
        body = {"prompt": [40] * 8, "max_tokens": 8, "ignore_eos": True}
        assert served.call(COMPLETE, body, **bearer("a"))[0] == 200
        _, _, headers = served.call("/v1/models", **bearer("a"))
        status, _, headers = served.call(COMPLETE, body, **bearer("a"))
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (429, "4")


def test_short_requests_of_one_key_are_spaced_out_beside_another(locked: Served) -> None:
    """Nothing goes by how fast the machine is: unless they are spaced out, they are too quick."""
    begin_s = time.monotonic()  # from here on: the other is there for a second
    locked.call("/version", **bearer("second-key"))
    for _ in range(60):  # 20 at once, then 200 a second
        assert locked.call("/version", **bearer("first-key"))[0] == 200
    assert time.monotonic() - begin_s > 0.18


def test_requests_at_a_time(model: Path) -> None:
    with serving(model, api_key=["a", "b"], max_concurrent_requests=1) as served:
        held = served.valve.hold()
        first = threading.Thread(target=served.call, args=(COMPLETE, GO_ON), kwargs=bearer("a"))
        first.start()
        eventually(lambda: served.running.async_engine.num_streams == 1)
        assert served.call(COMPLETE, GO_ON, **bearer("a"))[0] == 429
        held.set()
        first.join()
        assert served.call(COMPLETE, GO_ON, **bearer("b"))[0] == 200
        assert served.call(COMPLETE, GO_ON, **bearer("a"))[0] == 200


def test_a_full_queue_says_so(model: Path) -> None:
    with serving(model, {"max_num_seqs": 1}, max_queued_requests=2) as served:
        held = served.valve.hold()
        threads = [threading.Thread(target=served.call, args=(COMPLETE, GO_ON)) for _ in range(3)]
        for i, thread in enumerate(threads):
            thread.start()
            eventually(lambda i=i: served.running.async_engine.num_streams == i + 1)
            eventually(lambda i=i: served.running.async_engine.num_queued == i)
        assert served.call("/ready")[0] == 503
        status, _, headers = served.call(COMPLETE, GO_ON)
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        assert served.call("/health")[0] == 200
        held.set()
        for thread in threads:
            thread.join()
        assert served.call("/ready")[0] == 200
        assert served.refused(COMPLETE, {"prompt": ["a"] * 3})[0] == 400


def test_a_flood_of_one_key_does_not_delay_another(model: Path) -> None:
    """With one seat, whoever was served the fewest tokens is next, not whoever came first."""
    with serving(model, {"max_num_seqs": 1}, api_key=["a", "b"]) as served:
        held, order = served.valve.gate(), []

        def note_order(step: Step) -> None:  # the engine's own: answers may overtake each other
            held.wait(PATIENCE_S)
            started = {seq_id for seq_id, _ in step.admitted}
            ends = [w.start + len(w.tokens) for w in step.work if w.seq_id in started]
            order.extend("a" if end == 60 else "b" for end in ends)

        def ask(key: str) -> None:
            prompt = [40] * (60 if key == "a" else 1)  # prompts count as well
            served.call(COMPLETE, {"prompt": prompt, "max_tokens": 2}, **bearer(key))

        served.valve.before = note_order
        threads = [threading.Thread(target=ask, args=(key,)) for key in "aaaaaabbbb"]
        for i, thread in enumerate(threads):
            thread.start()
            eventually(lambda i=i: served.running.async_engine.num_streams == i + 1)
        held.set()
        for thread in threads:
            thread.join()
        # b comes later and starts where a stands, at 60; after one answer it is one token ahead.
        assert "".join(order) == "ababbbaaaa"


# --- the log ------------------------------------------------------------------------------------


def test_the_log_has_a_line_for_each_request(model: Path) -> None:
    with serving(model, log_format="json") as served:
        served.call(COMPLETE, {**GO_ON, "ignore_eos": True, "user": "me\n\x1b[31m"})
        served.call("/no\x1bthing".replace("\x1b", "%1b%0a"))
        eventually(lambda: len(served.lines) == 2)
        assert not any(ord(letter) < 32 for line in served.lines for letter in line)
        first, second = map(json.loads, served.lines)
        assert (first["path"], first["status"], first["finish"]) == (COMPLETE, 200, "length")
        assert (first["prompt_tokens"] > 0, first["completion_tokens"]) == (True, 3)
        assert first["total_ms"] >= first["time_to_first_token_ms"] >= first["queue_time_ms"] >= 0
        assert first["user"] == "me\n\x1b[31m"
        assert second["status"] == 404
        assert "hello" not in served.lines[0]


def test_text_lines_escape_control_characters(model: Path) -> None:
    with serving(model) as served:
        served.call(COMPLETE, {**GO_ON, "user": "me\n\x1b[31m status=500"})
        eventually(lambda: len(served.lines) == 1)
        assert r'user="me\n\u001b[31m status=500"' in served.lines[0]


def test_content_is_logged_on_demand_only(model: Path) -> None:
    with serving(model, log_content=True, log_format="json") as served:
        _, answer, _ = served.call(COMPLETE, GO_ON)
        eventually(lambda: len(served.lines) == 1)
        line = json.loads(served.lines[0])
        assert line["prompt"] == "hello"
        assert json.loads(line["response"])["id"] == answer["id"]


def test_a_trace_id_stands_in_the_log(served: Served) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for given, found in (
        (f"00-{trace}-00f067aa0ba902b7-01", True),
        (f"00-{trace}-00f067aa0ba902b7", False),
        (f"00-{trace.upper()}-00f067aa0ba902b7-01", False),
        (f"x\t{trace}", False),
    ):
        before = len(served.lines)
        served.call("/version", None, traceparent=given)
        eventually(lambda before=before: any("/version" in x for x in served.lines[before:]))
        assert any(f"trace_id={trace}" in line for line in served.lines[before:]) == found


class Panic(BaseException):
    """As those of libraries in Rust, which no `except Exception` catches."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/generate", "/tokenize"])
def test_what_breaks_in_a_thread_is_one_error_and_one_line(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], path: str
) -> None:
    def encode(*arguments: object, **options: object) -> list[int]:
        raise kind("a library panicked")

    monkeypatch.setattr(served.llm.text.chat_template, "render_ids", encode)
    monkeypatch.setattr(served.llm.tokenizer, "encode", encode)
    bodies = {
        "/v1/messages": {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 2,
        },
        "/api/generate": {"model": "tiny", "prompt": "a", "stream": False},
    }
    status, answer, found = served.call(path, bodies.get(path, {"prompt": "a"}))
    assert status == 500
    assert "something went wrong" in str(answer["error"])
    assert "panicked" not in str(answer)
    eventually(lambda: any(f"id={found['x-request-id']} " in line for line in served.lines))
    (line,) = (line for line in served.lines if f"id={found['x-request-id']} " in line)
    assert " status=500 " in line
    assert "something went wrong" in line
    assert served.call("/health")[0] == 200


def test_a_panic_amid_a_stream_cuts_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def ending(*arguments: object) -> bytes:
        taken.append(1)
        raise Panic("a library panicked")

    monkeypatch.setattr(OpenAiWriter, "ending", ending)
    body = {"prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}
    with connected(served.port) as connection:
        connection.request("POST", COMPLETE, json.dumps(body), JSON)
        with connection.getresponse() as response, pytest.raises(http.client.IncompleteRead):
            response.read()
    assert taken
    assert served.call("/health")[0] == 200


def test_a_request_has_one_name(model: Path, tmp_path: Path) -> None:
    """In the header, in the answer's id, in the log's line and in the trace."""
    trace = tmp_path / "trace.jsonl"
    with serving(model, {"trace": trace}, log_format="json") as served:
        for path, prefix, body in (
            (CHAT, "chatcmpl", HI),
            (COMPLETE, "cmpl", {"prompt": ["a", "b"], "max_tokens": 2}),
        ):
            _, answer, headers = served.call(path, body, x_request_id=f"mine-{prefix}.1")
            assert headers["x-request-id"] == f"mine-{prefix}.1"
            assert answer["id"] == f"{prefix}-mine-{prefix}.1"
        _, answer, headers = served.call(CHAT, HI)
        own = headers["x-request-id"]
        assert len(own) == 32
        assert answer["id"] == f"chatcmpl-{own}"
        eventually(lambda: len(served.lines) == 3)
        assert [json.loads(line)["id"] for line in served.lines] == [
            "mine-chatcmpl.1", "mine-cmpl.1", own,
        ]  # fmt: skip
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    names = [record["name"] for record in records if record["type"] == "request"]
    assert names == ["mine-chatcmpl.1", "mine-cmpl.1", "mine-cmpl.1", own]
