"""What a key may use and have is a part of making a request's parameters: nothing is changed later.

So a request that would get more is refused or gets less, on each route, and never fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import Served, serving

RULES = """
version = "1"
[keys.default]
features = ["completions", "chat"]
limits = { max_tokens = 5 }
"""
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_TURN = [{"role": "user", "content": "Hello"}]
ASKS: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "The cat"},
    CHAT: {"messages": _TURN},
    "/completion": {"prompt": "The cat"},
    "/v1/responses": {"input": "Hello"},
    "/api/chat": {"model": "tiny", "messages": _TURN, "stream": False},
}
ALONE: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXT, {"logprobs": 0}),  # the log-probability of each token, and of no other
    (TEXT, {"logprobs": 1}),
    (TEXT, {"echo": True, "logprobs": 0, "max_tokens": 0}),
    (TEXT, {"prompt_logprobs": 0}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 0}),
    (CHAT, {"prompt_logprobs": 0}),
    ("/completion", {"n_probs": 1}),
    ("/v1/responses", {"include": ["message.output_text.logprobs"]}),
    ("/api/chat", {"logprobs": True}),
)


@pytest.fixture(scope="module")
def limited(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("limited") / "rules.toml"
    file.write_text(RULES)
    with serving(model, rules=file) as served:
        yield served


@pytest.mark.parametrize(("path", "fields"), ALONE)
def test_whatever_tells_log_probabilities_is_that_feature(
    limited: Served, served: Served, path: str, fields: dict[str, Any]
) -> None:
    body = {**ASKS[path], **fields}
    status, answer, _ = limited.call(path, body)
    assert status == 403, answer
    assert "may not use logprobs" in str(answer["error"])
    assert served.call(path, body)[0] == 200  # it is the key that may not


@pytest.mark.parametrize("path", ASKS)
def test_what_asks_for_none_is_answered(limited: Served, path: str) -> None:
    nothing: dict[str, Any] = {TEXT: {"logprobs": None}, CHAT: {"logprobs": False}}.get(path, {})
    assert limited.call(path, {**ASKS[path], **nothing})[0] == 200


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 6}, {"min_tokens": 50, "max_tokens": 60}, {"min_tokens": 6, "n": 2}]
)
def test_more_tokens_at_least_than_a_key_may_have_is_a_bad_request(
    limited: Served, fields: dict[str, Any]
) -> None:
    status, error = limited.refused(TEXT, ASKS[TEXT] | fields)
    assert (status, error["param"]) == (400, "min_tokens")
    says = f"min_tokens is {fields['min_tokens']}: answers to this key have at most 5 tokens"
    assert error["message"].startswith(says)
    assert "[keys.default]" in error["message"]


@pytest.mark.parametrize("longest", [None, -1, 5, 60])
def test_as_many_as_a_key_may_have_are_made(limited: Served, longest: int | None) -> None:
    body = ASKS[TEXT] | {"min_tokens": 5, "max_tokens": longest, "ignore_eos": True}
    _, answer, _ = limited.call(TEXT, body)
    assert answer["usage"]["completion_tokens"] == 5
    _, answer, _ = limited.call(TEXT, body | {"min_tokens": 0, "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3
