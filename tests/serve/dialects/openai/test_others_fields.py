"""Fields of vLLM, llama.cpp, SGLang and Ollama that OpenAI's routes honour as well."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.engine.test_llm import HELLO
from tests.serve.answer.test_tools import thinker
from tests.serve.serving import Served

__all__ = ["thinker"]  # a fixture

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
GO_ON: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "temperature": 0}


def replied(served: Served, **fields: Any) -> dict[str, Any]:
    """The answer to a chat with these fields."""
    status, answer, _ = served.call(CHAT, ASK | fields)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def test_that_all_tokens_are_penalised_is_told_unless_it_was_asked_for(served: Served) -> None:
    _, _, headers = served.call(COMPLETE, GO_ON | {"repeat_penalty": 50, "repeat_last_n": -1})
    assert "x-ridgeline-ignored" not in headers
    _, _, headers = served.call(COMPLETE, GO_ON | {"repeat_penalty": 50})
    assert headers["x-ridgeline-ignored"] == "repeat_last_n"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "x[0-9]{3}"}, r"x[0-9]{3}"),
        ({"ebnf": 'root ::= "ab" "c"'}, "abc"),
        ({"format": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
         r'\{\s*"a"\s*:\s*1\s*\}'),
        ({"response_format": {"type": "json_object", "schema": {"enum": [True]}}}, "true"),
        ({"response_format": {"type": "json_object", "schema": True}}, ".*"),
    ],
    ids=str,
)  # fmt: skip
def test_forms_under_other_names(served: Served, form: dict[str, Any], pattern: str) -> None:
    answer = replied(served, max_tokens=40, **form)
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"], re.S)


def test_the_ids_of_all_tokens(served: Served) -> None:
    wants = {"return_token_ids": True}
    prompt = served.call("/tokenize", {"messages": HELLO})[1]["tokens"]
    answer = replied(served, **wants)
    [choice] = answer["choices"]
    assert answer["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    stream = served.call(CHAT, ASK | wants | {"stream": True})[1].decode()
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    streamed = [chunk["choices"][0]["token_ids"] or [] for chunk in chunks]
    assert [token for some in streamed for token in some] == choice["token_ids"]
    prompts = ["hello", "a b"]
    status, answer, _ = served.call(COMPLETE, GO_ON | wants | {"prompt": prompts, "n": 2,
                                                               "temperature": 1})  # fmt: skip
    assert status == 200
    for i, one in enumerate(answer["choices"]):
        ids = served.call("/tokenize", {"prompt": prompts[i // 2]})[1]["tokens"]
        assert one["prompt_token_ids"] == ids
    shown = sum(len(one["token_ids"]) for one in answer["choices"])
    assert shown == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/completion"])
def test_ids_never_run_ahead_of_a_streamed_text(served: Served, path: str) -> None:
    """A token that may be the beginning of a stop string is not told before its text."""
    asked = {"return_token_ids": True, "ignore_eos": True, "temperature": 0, "max_tokens": 12}
    asked |= {"messages": HELLO} if path == CHAT else {"prompt": "hello"}

    def streamed(**more: Any) -> list[tuple[str, list[int]]]:
        data = served.call(path, asked | more | {"stream": True})[1].decode()
        lines = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
        if path == "/completion":
            return [(line["content"], line["tokens"]) for line in lines]
        choices = [choice for line in lines for choice in line["choices"]]
        return [
            (choice.get("delta", choice).get("content" if path == CHAT else "text") or "",
             choice["token_ids"] or [])
            for choice in choices
        ]  # fmt: skip

    plain = streamed()
    whole = "".join(text for text, _ in plain)
    held = [whole[:2] + "never", whole[2:6] + "never"]
    text, ids, chunks = "", list[int](), streamed(stop=held)
    for piece, tokens in chunks:
        text, ids = text + piece, ids + tokens
        told = served.call("/detokenize", {"tokens": ids})[1]["content"]
        assert text.startswith(told.rstrip("\ufffd"))
    assert (text, ids) == (whole, [token for _, tokens in plain for token in tokens])
    assert max(len(tokens) for _, tokens in chunks) > 1  # some were held back


def test_logprobs_of_the_prompt(served: Served) -> None:
    answer = replied(served, prompt_logprobs=2)
    ids = served.call("/tokenize", {"messages": HELLO})[1]["tokens"]
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for token, ranked in zip(ids[1:], others, strict=True):
        assert set(ranked[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert 2 <= len(ranked) <= 3
        assert {entry["rank"] for entry in ranked.values()} >= {1, 2}
    _, answer, _ = served.call(COMPLETE, GO_ON | {"prompt_logprobs": 0, "prompt": ["hello", "a"]})
    for one in answer["choices"]:
        assert all(entry is None or len(entry) == 1 for entry in one["prompt_logprobs"])


def test_tokens_of_logprobs_as_ids(served: Served) -> None:
    ids = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = replied(served, logprobs=True, top_logprobs=2, **ids)
    [choice] = answer["choices"]
    shown = [one["token"] for one in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{token}" for token in choice["token_ids"][: len(shown)]]
    plain = served.call(COMPLETE, GO_ON | {"logprobs": 1})[1]["choices"][0]["logprobs"]
    named = served.call(COMPLETE, GO_ON | {"logprobs": 1} | ids)[1]["choices"][0]["logprobs"]
    assert named["text_offset"] == plain["text_offset"]
    assert all(token.startswith("token_id:") for token in named["tokens"])


def test_a_template_of_the_request(served: Served) -> None:
    template = "{{ messages[0].content }}!"
    body = {"messages": HELLO, "chat_template": template}
    tokens = served.call("/tokenize", body)[1]["tokens"]
    assert tokens == served.call("/tokenize", {"prompt": HELLO[0]["content"] + "!"})[1]["tokens"]
    assert replied(served, chat_template=template)["usage"]["prompt_tokens"] == len(tokens)


def test_an_echo_begins_with_the_message_that_goes_on(served: Served) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The "}]
    going_on = {"messages": begun, "continue_final_message": True}
    plain = replied(served, **going_on)["choices"][0]["message"]["content"]
    echoed = replied(served, **going_on, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "The " + plain
    assert replied(served, echo=True)["choices"][0] == replied(served)["choices"][0]


def test_reasoning_is_left_out_where_it_is_not_wanted(thinker: Served) -> None:
    body = {"messages": HELLO, "seed": 3, "max_tokens": 60, "enable_thinking": True}
    shown = thinker.call(CHAT, body)[1]["choices"][0]["message"]
    hidden = thinker.call(CHAT, body | {"include_reasoning": False})[1]["choices"][0]["message"]
    assert shown["reasoning_content"]
    assert hidden == {name: text for name, text in shown.items() if name != "reasoning_content"}


@pytest.mark.parametrize(
    "way",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
    ],
    ids=str,
)
def test_thinking_is_switched_off_under_all_names(served: Served, way: dict[str, Any]) -> None:
    template = "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }}"
    body = {"messages": HELLO, "chat_template": template}
    off = served.call("/tokenize", {"prompt": "off"})[1]["tokens"]
    assert served.call("/tokenize", body | way)[1]["tokens"] == off
    on = served.call("/tokenize", {"prompt": "on"})[1]["tokens"]
    assert served.call("/tokenize", body)[1]["tokens"] == on


def test_a_salt_keeps_prefixes_apart(served: Served) -> None:
    """What one salt's requests left in the cache another's do not find."""

    def cached(salt: str | None) -> int:
        body = GO_ON | {"prompt": "salt water " * 4, "cache_salt": salt}
        answer = served.call(COMPLETE, body)[1]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0
    assert cached(None) == 0


@pytest.mark.parametrize(
    ("path", "function", "odd"),
    [
        (CHAT, {"type": "function", "function": {"name": "f"}},
         [{"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}]),
        ("/v1/responses", {"type": "function", "name": "f"},
         [{"type": "namespace", "name": "n", "tools": []}, {"type": "local_shell"},
          {"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]),
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}},
         [{"type": "web_search_20250305", "name": "web_search"},
          {"type": "bash_20250124", "name": "bash"}]),
        ("/api/chat", {"type": "function", "function": {"name": "f"}}, [{"type": "mcp"}]),
    ],
)  # fmt: skip
def test_tools_that_no_client_runs_are_skipped_by_name(
    thinker: Served, path: str, function: dict[str, Any], odd: list[dict[str, Any]]
) -> None:
    said = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO}
    body = said | {"model": "tiny", "stream": False}
    body |= {} if path == "/v1/responses" else {"max_tokens": 20}
    status, answer, headers = thinker.call(path, body | {"tools": [odd[0], function, *odd[1:]]})
    assert status == 200, answer
    places = [0, *range(2, len(odd) + 1)]
    skipped = [f"tools[{i}] ({one['type']})" for i, one in zip(places, odd, strict=True)]
    assert headers["x-ridgeline-ignored"].split(", ")[-len(skipped) :] == skipped
    alone = thinker.call(path, body | {"tools": odd})
    assert (alone[0], "tools[0].type" in json.dumps(alone[1])) == (400, True)


def test_long_names_and_many_tools(thinker: Served) -> None:
    tools = [{"type": "function", "name": f"{i:0128}"} for i in range(140)]
    body = {"input": "Hello", "tools": tools, "tool_choice": "none", "max_output_tokens": 2}
    assert thinker.call("/v1/responses", body)[0] == 200
    tools[7]["name"] += "x"
    thinker.refused_for("tools[7].name", "/v1/responses", body)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stop_string_can_be_shown(served: Served, path: str) -> None:
    asked = (ASK if path == CHAT else GO_ON) | {"ignore_eos": True}
    whole = _text(served.call(path, asked)[1])
    stop = whole[4:6]
    end = whole.index(stop)
    for name in ("include_stop_str_in_output", "no_stop_trim"):  # SGLang's name for it
        for shows in (False, True):
            status, answer, _ = served.call(path, asked | {"stop": [stop], name: shows})
            assert status == 200, answer
            assert _text(answer) == whole[: end + (len(stop) if shows else 0)]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_control_tokens_can_be_shown(served: Served, path: str) -> None:
    spelling = served.llm.text.spell(0)
    asked = (ASK if path == CHAT else GO_ON) | {"max_tokens": 2, "ignore_eos": True}
    asked |= {"allowed_token_ids": [0]}
    for skips, expected in ((False, spelling * 2), (True, "")):
        status, answer, _ = served.call(path, asked | {"skip_special_tokens": skips})
        assert status == 200, answer
        assert _text(answer) == expected


def _text(answer: dict[str, Any]) -> str:
    """The text of the one answer, of a chat or a completion."""
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] or "") if "message" in choice else str(choice["text"])
