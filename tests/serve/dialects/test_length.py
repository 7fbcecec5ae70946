"""The most that an answer may have is a limit: the context may leave less, and the header says so.

Only a prompt that leaves no room is refused, and none is cut.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_llm import HELLO
from tests.serve.serving import Served

CONTEXT = 128  # tokens of the model
NAME = {"model": "tiny"}
CHAT, COMPLETE = ("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})
ASKED = [  # a route, its body, and where that says how long an answer may be
    (*CHAT, ("max_tokens",)),
    (*CHAT, ("max_completion_tokens",)),
    (*COMPLETE, ("max_tokens",)),
    ("/v1/responses", {"input": "Hello"}, ("max_output_tokens",)),
    ("/v1/messages", NAME | {"messages": HELLO}, ("max_tokens",)),
    ("/api/chat", NAME | {"messages": HELLO, "stream": False}, ("options", "num_predict")),
    ("/api/generate", NAME | {"prompt": "a", "stream": False}, ("options", "num_predict")),
]
IDS = [f"{path} {'.'.join(names)}" for path, _, names in ASKED]


def at(names: tuple[str, ...], value: int, **others: Any) -> dict[str, Any]:
    """A body in which this value stands there."""
    outer, *inner = names
    return {outer: {inner[0]: value} | others} if inner else {outer: value} | others


def tokens(answer: dict[str, Any]) -> tuple[int, int]:
    """Those of prompt and answer, in the names of any dialect."""
    counts = answer.get("usage", answer)
    prompt = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    said = ("completion_tokens", "output_tokens", "eval_count")
    of_cache = counts.get("cache_read_input_tokens", 0)
    return (
        of_cache + next(counts[name] for name in prompt if name in counts),
        next(counts[name] for name in said if name in counts),
    )


@pytest.mark.parametrize(("path", "body", "names"), ASKED, ids=IDS)
@pytest.mark.parametrize("asked", [200, 32000, (1 << 63) - 1])
def test_more_than_fits_is_capped_and_the_header_says_to_what(
    served: Served, path: str, body: dict[str, Any], names: tuple[str, ...], asked: int
) -> None:
    status, answer, headers = served.call(path, body | at(names, asked, temperature=0))
    assert status == 200, answer
    num_prompt, num_said = tokens(answer)
    assert num_said <= CONTEXT - num_prompt
    where = ".".join(names)
    assert headers["x-ridgeline-capped"] == f"{where} {asked} -> {CONTEXT - num_prompt}"


@pytest.mark.parametrize(("path", "body", "names"), ASKED, ids=IDS)
def test_what_fits_is_not_capped(
    served: Served, path: str, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    status, answer, headers = served.call(path, body | at(names, 3))
    assert (status, tokens(answer)[1] <= 3, "x-ridgeline-capped" in headers) == (200, True, False)


@pytest.mark.parametrize(("path", "body", "names"), ASKED, ids=IDS)
def test_minus_one_is_no_limit(
    served: Served, path: str, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    temperature: dict[str, Any] = {"temperature": 0}
    status, found, headers = served.call(path, body | at(names, -1, **temperature))
    assert (status, "x-ridgeline-capped" in headers) == (200, False)
    assert tokens(found) == tokens(served.call(path, body | at(names, 200, **temperature))[1])


@pytest.mark.parametrize(("path", "body", "names"), ASKED, ids=IDS)
def test_a_prompt_that_leaves_no_room_is_refused(
    served: Served, path: str, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    prompt = next(name for name in ("messages", "prompt", "input") if name in body)
    long = "a b c d " * 40
    said = [{"role": "user", "content": long}] if prompt == "messages" else long
    status, answer, _ = served.call(path, body | at(names, 3) | {prompt: said})
    assert status == 400
    assert f"this model takes {CONTEXT} tokens, prompt and answer together" in str(answer)


def test_an_answer_that_fills_the_context_ends_by_its_length(served: Served) -> None:
    wants = {"max_tokens": 32000, "ignore_eos": True}
    _, answer, _ = served.call(COMPLETE[0], {"prompt": "a b c"} | wants)
    assert (sum(tokens(answer)), answer["choices"][0]["finish_reason"]) == (CONTEXT, "length")
    _, answer, _ = served.call(CHAT[0], {"messages": HELLO} | wants)
    assert (sum(tokens(answer)), answer["choices"][0]["finish_reason"]) == (CONTEXT, "length")


def test_anthropic_has_a_reason_of_its_own_for_that(served: Served) -> None:
    body = NAME | {"temperature": 1}
    for count in range(40):  # until one does not end by itself
        messages = [{"role": "user", "content": f"{count}" * count}]
        asked = body | {"messages": messages, "max_tokens": 32000}
        status, answer, headers = served.call("/v1/messages", asked)
        if status == 200 and sum(tokens(answer)) == CONTEXT:
            break
    assert answer["stop_reason"] == "model_context_window_exceeded"
    left = int(headers["x-ridgeline-capped"].split()[-1])
    _, limited, headers = served.call("/v1/messages", asked | {"max_tokens": min(2, left)})
    assert limited["stop_reason"] in ("max_tokens", "end_turn")
    assert "x-ridgeline-capped" not in headers


def test_each_of_several_prompts_has_the_room_that_it_leaves(served: Served) -> None:
    body = {"prompt": ["a", "a b c d e f"], "max_tokens": 32000, "ignore_eos": True}
    _, answer, headers = served.call(COMPLETE[0], body)
    num_prompts, num_said = tokens(answer)
    assert num_prompts + num_said == 2 * CONTEXT
    _, longer, _ = served.call("/tokenize", {"prompt": "a b c d e f"})
    assert headers["x-ridgeline-capped"] == f"max_tokens 32000 -> {CONTEXT - longer['count']}"


def test_the_default_of_completions_is_no_demand(served: Served) -> None:
    """It is 16: where less is left, nobody asked for it."""
    tokens_of = [5] * (CONTEXT - 4)
    status, answer, headers = served.call(COMPLETE[0], {"prompt": tokens_of, "ignore_eos": True})
    assert (status, tokens(answer)[1], "x-ridgeline-capped" in headers) == (200, 4, False)
