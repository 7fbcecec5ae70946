"""What programs and proxies say in heads and paths: content types, slashes, streams not kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.serving import Served
from tests.waiting import connected

HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": ASK,
    "/v1/embeddings": {"input": "a"},
    "/api/chat": {"model": "tiny", "messages": HELLO, "options": {"num_predict": 3}},
    "/api/generate": {"model": "tiny", "prompt": "a", "options": {"num_predict": 3}},
    "/completion": {"prompt": "a", "n_predict": 3},
    "/tokenize": {"content": "a"},
    "/v2/models/tiny/generate": {"text_input": "a", "max_tokens": 3},
}
KINDS = (
    *("", "application/octet-stream", "text/plain", "application/x-www-form-urlencoded"),
    *("application/json; charset=utf-8", "application/vnd.api+json", "nonsense"),
)


def status_of(served: Served, path: str, body: Any, kind: str, **headers: str) -> int:
    """Send a body as what it is not, or without a word."""
    with connected(served.port) as connection:
        given = {"content-type": kind} if kind else {}
        connection.request("POST", path, json.dumps(body), given | headers)
        response = connection.getresponse()
        response.read()
        return response.status


@pytest.mark.parametrize("path", BODIES)
def test_the_body_counts_and_not_what_is_said_of_it(served: Served, path: str) -> None:
    for kind in KINDS:
        assert status_of(served, path, BODIES[path], kind) == 200, kind


def test_a_page_says_that_it_sends_json(served: Served) -> None:
    """Its browser asks before it sends JSON, and sends a form or a text unasked."""
    for path, body in BODIES.items():
        for kind in KINDS:
            is_tensors = kind == "application/octet-stream" and path.startswith("/v2/")
            expected = 200 if kind.startswith("application/json") or is_tensors else 415
            assert status_of(served, path, body, kind, origin=served.url) == expected, (path, kind)


def test_no_json_is_still_refused(served: Served) -> None:
    for kind in KINDS:
        assert status_of(served, "/v1/completions", "a text", kind) == 400


def test_a_slash_at_the_end_says_nothing(served: Served) -> None:
    """A redirect would go to the connection's own scheme, without a proxy's prefix."""
    for path, body in BODIES.items():
        status, _, headers = served.call(f"{path}/", body, x_forwarded_proto="https")
        assert (status, "location" in headers) == (200, False), path
    for path in ("/version", "/api/tags", "/v2", "/plan"):
        assert served.call(f"{path}/")[:2] == served.call(path)[:2] != (404, b"")
    assert [one["id"] for one in served.call("/v1/models/")[1]["data"]] == ["tiny"]
    assert served.call("/v1/models/tiny/")[1]["id"] == "tiny"
    assert served.call("/health/")[1]["status"] == "ok"
    for path in ("/v2/models", "/v2/models/", "/nothing/", "/v1/chat/"):
        assert served.call(path)[0] == 404
    assert served.call("/")[0] == 200


def test_no_proxy_keeps_a_stream(served: Served) -> None:
    streams = [path for path in BODIES if path not in ("/v1/embeddings", "/tokenize")]
    for path in streams:
        asked = f"{path}_stream" if path.startswith("/v2/") else path
        status, _, headers = served.call(asked, BODIES[path] | {"stream": True})
        assert (status, headers["x-accel-buffering"]) == (200, "no"), path
        whole = served.call(path, BODIES[path] | {"stream": False})[2]
        assert "x-accel-buffering" not in whole, path
    with connected(served.port) as connection:
        connection.request("GET", "/v1/live")
        assert connection.getresponse().getheader("x-accel-buffering") == "no"
