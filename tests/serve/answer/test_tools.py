"""Tools and reasoning through the server: calls fit, streamed as whole, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from ridgeline import LLM
from tests.engine.test_llm import VOCAB, write_model
from tests.serve.serving import Served, serving, without_signs
from tests.waiting import connected

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]<tool_call>{% endfor %}"
    "{% for m in messages %}<|end|>{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant:"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "string", "maxLength": 3},
    },
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "description": "x"}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
END_OF_THOUGHT = VOCAB - 5  # without a spelling of its own
HELLO: Any = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "seed": 3, "max_tokens": 300}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model whose template knows tools and reasoning."""
    path = write_model(tmp_path_factory.mktemp("models") / "tools")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": END_OF_THOUGHT, "content": "</think>"})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "add_bos_token": False})
    )
    with serving(path, {"kv_cache_memory": "8MiB"}) as served:
        yield served
        served.assert_idle()


def check(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert len(call.id) == 29
    schema = SCHEMA if call.function.name == "add" else {"type": "object", "maxProperties": 0}
    jsonschema.validate(json.loads(call.function.arguments), schema)


def _add(state: dict[str, Any], delta: Any) -> None:
    """Add a delta to what was streamed so far."""
    state["content"] += delta.content or ""
    state["reasoning"] += getattr(delta, "reasoning_content", None) or ""
    for call in delta.tool_calls or []:
        if call.id:
            assert call.index == len(state["calls"])
            state["calls"].append([call.function.name, ""])
        state["calls"][call.index][1] += call.function.arguments


def both(served: Served, **fields: Any) -> Any:
    """The choice of a request, which must be the same streamed and whole."""
    ask: dict[str, Any] = {"model": "tiny", **ASK, **fields}
    state: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    with served.client() as client:
        whole = client.chat.completions.create(**ask).choices[0]
        for chunk in client.chat.completions.create(**ask, stream=True):
            [choice] = chunk.choices
            _add(state, choice.delta)
            state["finish"] = choice.finish_reason or state["finish"]
    message = whole.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    assert state["calls"] == calls
    assert state["content"] == (message.content or "")
    assert state["reasoning"] == (getattr(message, "reasoning_content", None) or "")
    assert state["finish"] == whole.finish_reason
    return whole


def test_a_call_that_is_required(thinker: Served) -> None:
    names = set()
    for seed in range(8):
        choice = both(thinker, tool_choice="required", seed=seed)
        assert choice.message.content is None
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls:
                check(call)
                names.add(call.function.name)
    assert "add" in names


FORCED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # By route: a request, and what more it says for one call or for several.
    CHAT: (
        {"messages": HELLO, "tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 300},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True},
    ),
    "/v1/responses": (
        {
            "input": "Hello",
            "tools": [{"type": "function", "name": "now", "strict": True}],
            "tool_choice": "required",
            "max_output_tokens": 300,
        },
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True},
    ),
    "/v1/messages": (
        {
            "model": "tiny",
            "messages": HELLO,
            "tools": [{"name": "now", "input_schema": {"type": "object", "maxProperties": 0}}],
            "tool_choice": {"type": "any"},
            "max_tokens": 300,
        },
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": False}},
    ),
    "/api/chat": (
        {
            "model": "tiny",
            "messages": HELLO,
            "tools": TOOLS[1:],
            "tool_choice": "required",
            "options": {"num_predict": 300, "temperature": 0},
        },
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True},
    ),
}


def _calls_and_end(path: str, answer: dict[str, Any]) -> tuple[int, str]:
    """How many calls an answer has, and how it says that it ended."""
    if path == CHAT:
        [choice] = answer["choices"]
        return len(choice["message"]["tool_calls"]), choice["finish_reason"]
    if path == "/v1/responses":
        kinds = [one["type"] for one in answer["output"]]
        return kinds.count("function_call"), answer["status"]
    if path == "/v1/messages":
        kinds = [one["type"] for one in answer["content"]]
        return kinds.count("tool_use"), answer["stop_reason"]
    return len(answer["message"]["tool_calls"]), answer["done_reason"]


@pytest.mark.parametrize("path", FORCED)
def test_a_call_that_must_come_is_one_and_none_comes_twice(thinker: Served, path: str) -> None:
    """The tool takes nothing, so any second call is the first once more."""
    ask, one, several = FORCED[path]
    ends = {"/v1/responses": "completed", "/v1/messages": "tool_use", "/api/chat": "stop"}
    num_tokens = []
    for more in ({}, one, several):
        body = ask | more | {"temperature": 0, "stream": False}
        status, answer, headers = thinker.call(path, body)
        assert status == 200, answer
        assert _calls_and_end(path, answer) == (1, ends.get(path, "tool_calls"))
        assert headers.get("x-ridgeline-ended") == ("repeated_call" if more is several else None)
        said = answer["choices"][0].get("stop_reason") if path == CHAT else answer.get("ended_by")
        assert said == headers.get("x-ridgeline-ended")
        if path == "/v1/responses":
            assert answer["parallel_tool_calls"] == (more is several)
        usage = answer.get("usage") or {"output_tokens": answer.get("eval_count")}
        num_tokens.append(usage.get("output_tokens", usage.get("completion_tokens")))
    assert num_tokens[0] == num_tokens[1] < num_tokens[2], "the second call was begun"


@pytest.mark.parametrize("path", FORCED)
def test_nothing_of_a_repeated_call_is_streamed(thinker: Served, path: str) -> None:
    ask, _, several = FORCED[path]
    shown = thinker.call(path, ask | several | {"temperature": 0, "stream": True})[1].decode()
    begun = {
        "/v1/responses": "response.output_item.added",
        "/v1/messages": '"type":"tool_use"',
        "/api/chat": '"tool_calls"',
    }
    assert shown.count(begun.get(path, '"name":"now"')) == (2 if "responses" in path else 1), shown
    last = {
        CHAT: r'"finish_reason":"tool_calls","stop_reason":"repeated_call"',
        "/v1/responses": r'"type":"response\.completed",.*"ended_by":"repeated_call"',
        "/v1/messages": r'"message_delta",.*"stop_reason":"tool_use",.*"ended_by":"repeated_call"',
        "/api/chat": r'"done":true,"done_reason":"stop",.*"ended_by":"repeated_call"',
    }
    assert len(re.findall(last[path], shown)) == shown.count("repeated_call") == 1, shown


def test_the_call_that_is_named(thinker: Served) -> None:
    for name in ("add", "now"):
        choice = both(thinker, tool_choice={"type": "function", "function": {"name": name}})
        [call] = choice.message.tool_calls
        check(call)
        assert (call.function.name, choice.finish_reason) == (name, "stop")


def test_what_may_be_called_can_be_less(thinker: Served) -> None:
    now = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [now]}}
    for seed in range(3):
        choice = both(thinker, tool_choice=allowed, parallel_tool_calls=False, seed=seed)
        [call] = choice.message.tool_calls
        check(call)
        assert (call.function.name, choice.finish_reason) == ("now", "tool_calls")


def test_text_where_calls_are_free_or_forbidden(thinker: Served) -> None:
    for wish in ("auto", "none"):
        choice = both(thinker, tool_choice=wish, max_tokens=20)
        assert choice.message.tool_calls is None
        assert choice.message.content
    without = {name: value for name, value in ASK.items() if name != "tools"} | {"max_tokens": 20}
    answers = [
        thinker.call(CHAT, fields)[1]
        for fields in (ASK | without | {"tool_choice": "none"}, without)
    ]
    assert answers[0]["choices"] == answers[1]["choices"], "tools that are not shown change nothing"
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_a_call_that_is_cut_is_delivered(thinker: Served) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    whole = both(thinker, tool_choice=named).message.tool_calls[0].function.arguments
    seen = set()
    for most in range(1, 60, 4):
        choice = both(thinker, tool_choice=named, max_tokens=most)
        for call in choice.message.tool_calls or []:
            assert whole.startswith(call.function.arguments)
            seen.add((choice.finish_reason, call.function.arguments == whole))
    assert ("length", False) in seen


def test_a_conversation_goes_on_with_results(thinker: Served) -> None:
    call = both(thinker, tool_choice={"type": "function", "function": {"name": "add"}})
    message = call.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    status, answer, _ = thinker.call(
        CHAT, ASK | {"messages": [*HELLO, message, result], "max_tokens": 5}
    )
    assert status == 200, answer
    tokens = thinker.call("/tokenize", {"messages": [*HELLO, message, result], "tools": TOOLS})[1]
    shown = thinker.call("/detokenize", {"tokens": tokens["tokens"]})[1]["prompt"]
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert json.dumps(arguments, ensure_ascii=False) in shown
    assert shown.startswith("[add]<tool_call>[now]")


def test_reasoning_is_told_apart(thinker: Served) -> None:
    ask: dict[str, Any] = {"tools": None, "chat_template_kwargs": {"enable_thinking": True}}
    status, answer, _ = thinker.call(CHAT, ASK | ask | {"max_tokens": 30})
    assert status == 200
    message = answer["choices"][0]["message"]
    assert message["content"] == ""  # a random model does not stop thinking
    assert message["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 30}
    for off in ({"chat_template_kwargs": {}}, {"reasoning_effort": "none"}):
        answer = thinker.call(CHAT, ASK | ask | {"max_tokens": 30} | off)[1]
        assert answer["choices"][0]["message"]["content"]
        assert "completion_tokens_details" not in answer["usage"]
    said = [{"role": "assistant", "content": "A", field: "B"} for field in
            ("reasoning_content", "reasoning")]  # fmt: skip
    tokens = [thinker.call("/tokenize", {"messages": [one]})[1]["tokens"] for one in said]
    assert tokens[0] == tokens[1]
    assert "assistant:BA" in thinker.call("/detokenize", {"tokens": tokens[0]})[1]["prompt"]


def test_a_form_and_tools_begin_behind_reasoning(thinker: Served) -> None:
    think: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    think["logit_bias"] = {str(END_OF_THOUGHT): 100}  # it thinks as briefly as can be
    form = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    }
    choice = both(thinker, **form, tools=None, extra_body=think)
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    choice = both(thinker, tool_choice="required", parallel_tool_calls=False, extra_body=think)
    [call] = choice.message.tool_calls
    check(call)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "json_schema": {"type": "object"}}, "json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters":
                     {"properties": {"b": {"type": "array", "uniqueItems": True}}}}}]}, "tools"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "tools"),
    ],
)  # fmt: skip
def test_what_is_refused_with_tools_that_a_template_knows(
    thinker: Served, fields: dict[str, Any], param: str
) -> None:
    thinker.refused_for(param, CHAT, ASK | fields)


def test_the_first_delta_names_the_role_and_has_no_content(thinker: Served) -> None:
    body = ASK | {"stream": True, "tool_choice": "required", "temperature": 0}
    lines = thinker.call(CHAT, body)[1].decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[1]["tool_calls"]
    assert not any("content" in delta for delta in deltas[1:])
    plain = ASK | {"stream": True, "tools": None}
    first = thinker.call(CHAT, plain)[1].decode().splitlines()[0]
    assert json.loads(first[6:])["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_the_server_says_how_calls_are_written(thinker: Served, tmp_path: Path) -> None:
    [model] = thinker.call("/v1/models")[1]["data"]
    assert (model["tool_call_parser"], model["reasoning"]) == ("hermes", True)
    path = write_model(tmp_path / "other")
    options = {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    with serving(path, **options) as other:
        [model] = other.call("/v1/models")[1]["data"]
        assert (model["tool_call_parser"], model["reasoning"]) == ("mistral", False)
    for name in options:
        with pytest.raises(ValueError, match="there is no"):
            other.running.options.__class__(**{name: "x"})


def test_a_chat_template_of_a_file_is_used_in_place_of_the_models_own(tmp_path: Path) -> None:
    path, file = write_model(tmp_path / "model"), tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    with serving(path, chat_template=file) as served:
        [model] = served.call("/v1/models")[1]["data"]
        assert (model["tool_call_parser"], model["reasoning"]) == ("hermes", True)
        shown = served.call("/apply-template", {"messages": HELLO})[1]["prompt"]
        assert shown.startswith("<|end|>user:")
        assert served.call("/props")[1]["chat_template"] == TEMPLATE
        assert served.call(CHAT, {"messages": HELLO, "max_tokens": 2})[0] == 200
    file.write_text("{% for m in messages %}")
    with LLM(path, kv_cache_memory="1MiB", threads=1) as llm:
        with pytest.raises(ValueError, match=f"--chat-template {file}: the chat template"):
            llm.text.use_chat_template(file)
        with pytest.raises(FileNotFoundError):
            llm.text.use_chat_template(tmp_path / "none")


def test_beams_call_tools(thinker: Served) -> None:
    """Behind the end of its reasoning each beam follows the grammar of calls, on its own."""
    beams = {"use_beam_search": True, "best_of": 3, "n": 2, "tool_choice": "required"}
    asked = {name: value for name, value in ASK.items() if name != "seed"}
    body = asked | beams | {"parallel_tool_calls": False}
    status, answer, _ = thinker.call(CHAT, body)
    assert status == 200, answer
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        (call,) = thinker_calls(choice)
        check(call)


def thinker_calls(choice: dict[str, Any]) -> list[Any]:
    """Return the calls of a choice, as the client's objects."""
    calls: Any = choice["message"]["tool_calls"]
    return [ChatCompletionMessageFunctionToolCall.model_validate(call) for call in calls]


_FUNCTIONS = [tool["function"] for tool in TOOLS]
_OTHERS_ASK: dict[str, dict[str, Any]] = {
    CHAT: ASK | {"tool_choice": "required"},
    "/v1/responses": {
        "input": "Hello",
        "tools": [{"type": "function"} | function for function in _FUNCTIONS],
        "tool_choice": "required",
        "max_output_tokens": 300,
    },
    "/v1/messages": {
        "model": "tiny",
        "messages": HELLO,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 300,
    },
    "/api/chat": {
        "model": "tiny",
        "messages": HELLO,
        "tools": TOOLS,
        "options": {"seed": 3, "num_predict": 300},
    },
}
_OF_CLOCKS = re.compile(rb'"(created|created_at|\w+_duration)":("[^"]*"|\d+)')


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("path", _OTHERS_ASK)
def test_nothing_of_an_answer_is_chance(thinker: Served, path: str, is_streamed: bool) -> None:
    """Ids of calls and items follow from the request, so that another server can go on with it."""
    body = json.dumps(_OTHERS_ASK[path] | {"stream": is_streamed, "temperature": 0}).encode()

    def asked(name: str) -> bytes:
        head = {"content-type": "application/json", "x-request-id": name}
        with connected(thinker.port) as connection:
            connection.request("POST", path, body, head)
            response = connection.getresponse()
            text = without_signs(response.read())
        assert response.status == 200, text
        return _OF_CLOCKS.sub(rb'"\1":0', text)

    first, again, other = asked("one"), asked("one"), asked("two")
    ids = set(re.findall(rb'"((?:call|fc|msg|rs|toolu)_[0-9a-f]{24})"', again))
    assert ids or path == "/api/chat", "there is no call to have an id"  # Ollama cannot demand one
    assert again == asked("one")
    assert ids <= set(re.findall(rb'"([a-z]+_[0-9a-f]{24})"', first))
    assert not ids & set(re.findall(rb'"([a-z]+_[0-9a-f]{24})"', other))


def test_each_turn_of_a_conversation_has_its_own_ids(thinker: Served) -> None:
    """Also where a client sends one name for all of them."""
    ids = []
    for content in ("Hello", "Hello there"):
        body = ASK | {"messages": [{"role": "user", "content": content}], "tool_choice": "required"}
        _, answer, _ = thinker.call(CHAT, body, x_request_id="session-7")
        ids += [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) >= 2
