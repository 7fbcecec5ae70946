"""One name for a request wherever it shows, and keys that cannot see each other's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Served, eventually, serving
from tests.server.test_gate import bearer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_a_request_has_one_name(model: Path, tmp_path: Path) -> None:
    """In the header, in the answer's id, in the log's line and in the trace."""
    trace = tmp_path / "trace.jsonl"
    with serving(model, {"trace": trace}, log_format="json") as served:
        for path, prefix, body in (
            (CHAT, "chatcmpl", HELLO),
            (COMPLETE, "cmpl", {"prompt": ["a", "b"], "max_tokens": 2}),
        ):
            _, answer, headers = served.call(path, body, x_request_id=f"mine-{prefix}.1")
            assert headers["x-request-id"] == f"mine-{prefix}.1"
            assert answer["id"] == f"{prefix}-mine-{prefix}.1"
        _, answer, headers = served.call(CHAT, HELLO)
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


def cached(served: Served, key: str) -> int:
    body: dict[str, Any] = {"prompt": [40 + i % 30 for i in range(60)], "max_tokens": 1}
    _, answer, _ = served.call(COMPLETE, body, **bearer(key))
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize(("isolate_keys", "others"), [(True, 0), (False, 48)])
def test_what_another_key_sent_does_not_show(model: Path, isolate_keys: bool, others: int) -> None:
    with serving(model, api_key=["first", "second"], isolate_keys=isolate_keys) as served:
        assert cached(served, "first") == 0
        assert cached(served, "first") == 48
        assert cached(served, "second") == others
        assert cached(served, "second") == 48
