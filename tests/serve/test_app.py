"""Which route answers: HEAD as GET does, 404 and 405 before any look at the body, and hints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_llm import HELLO
from tests.serve.serving import Served, serving
from tests.waiting import eventually

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/metrics"]
)
def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    status, body, headers = served.call(path, None, "HEAD")
    got = served.call(path)
    assert (status, body) == (200, b"")
    assert headers["content-type"] == got[2]["content-type"]
    if path != "/metrics":  # which counts
        assert headers["content-length"] == got[2]["content-length"]
    if path != "/health":  # a probe that is well has no line
        eventually(lambda: any("method=HEAD" in line and path in line for line in served.lines))


def test_head_of_what_never_ends_ends(served: Served) -> None:
    num_lines = served.num_lines()
    status, body, headers = served.call("/v1/live", None, "HEAD")
    assert (status, body) == (200, b"")
    assert headers["content-type"].startswith("text/event-stream")
    line = "method=HEAD path=/v1/live status=200"
    eventually(lambda: any(line in one for one in served.lines[num_lines:]))
    assert not served.running.model_server.live._watchers


def test_an_unknown_route_is_404_whatever_the_body_is(served: Served) -> None:
    for path in ("/v1/file", "/chat", CHAT + "x/y"):
        for kind in ("application/json", "multipart/form-data; boundary=x", "text/plain"):
            status, answer, _ = served.call(path, b"--x\r\n", content_type=kind)
            assert (status, answer["error"]["code"]) == (404, "not_found")
    assert served.call("/nothing", b"x", content_encoding="gzip")[0] == 404
    assert served.call("/nothing", None, "HEAD")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("GET", CHAT, "POST"),
        ("HEAD", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("PUT", "/tokenize", "POST"),
    ],
)
def test_a_wrong_method_is_405_and_says_which_are_right(
    served: Served, method: str, path: str, allowed: str
) -> None:
    body = None if method in ("GET", "HEAD") else b"x"
    status, answer, headers = served.call(path, body, method, content_type="text/plain")
    assert (status, headers["allow"]) == (405, allowed)
    assert method == "HEAD" or answer["error"]["code"] == "method_not_allowed"


def test_a_route_that_is_there_still_wants_plain_json_of_a_page(served: Served) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
        form = {"content_type": "text/plain", "origin": served.url}
        assert served.refused(path, b"{}", **form)[0] == 415
        assert served.refused(path, b"{}", content_encoding="gzip")[0] == 415


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/embeddings", "/v1/embeddings"),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/images/edits", None),
        ("/x" * 4000, None),
    ],
)
def test_a_route_that_is_nearly_right_gets_a_hint(
    served: Served, path: str, meant: str | None
) -> None:
    status, error = served.refused(path, {"messages": []})
    assert status == 404
    assert ("did you mean" in error["message"]) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in error["message"]


def test_what_programs_that_evaluate_ask_of_the_tokenizer(served: Served) -> None:
    info = served.call("/tokenizer_info")[1]
    assert (info["bos_token"], info["model_max_length"]) == (None, 128)
    (end,) = served.call("/tokenize", {"prompt": info["eos_token"]})[1]["tokens"]
    assert end == served.llm.engine.eos_ids[0]
    assert "message" in info["chat_template"]


def test_a_model_may_have_several_names(model: Path) -> None:
    ask = {"prompt": "a", "max_tokens": 1}
    with serving(model, served_model_name=["tiny", "gpt-4o-mini", "claude:latest"]) as served:
        for name in ("tiny", "gpt-4o-mini", "claude:latest", "tiny:latest"):
            status, answer, _ = served.call("/v1/completions", ask | {"model": name})
            assert (status, answer["model"]) == (200, "tiny")
        listed = [one["id"] for one in served.call("/v1/models")[1]["data"]]
        assert listed == ["tiny", "gpt-4o-mini", "claude:latest"]
        assert served.call("/v1/models/gpt-4o-mini")[1]["id"] == "gpt-4o-mini"
        tags = [one["name"] for one in served.call("/api/tags")[1]["models"]]
        assert tags == ["tiny:latest", "gpt-4o-mini:latest", "claude:latest"]
        assert served.call("/v1/completions", ask | {"model": "other"})[0] == 404


def test_a_model_may_have_any_name(model: Path) -> None:
    with serving(model, any_model_name=True) as served:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
            ("/v1/embeddings", {"input": "a"}),
        ):
            assert served.call(path, body | {"model": "claude-sonnet-4-5"})[0] == 200
        assert [one["id"] for one in served.call("/v1/models")[1]["data"]] == ["tiny"]
