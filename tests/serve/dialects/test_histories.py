"""Conversations that began with another model go on: no type of item, part or message of the
clients' own packages is a 400, what is text is read, and what is not is named.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import UnionType
from typing import Any

import pytest
import typing_extensions
from pydantic import ValidationError

from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.dialects.anthropic import request as anthropic
from ridgeline.serve.dialects.anthropic.protocol import MessagesRequest
from ridgeline.serve.dialects.ollama import request as ollama
from ridgeline.serve.dialects.ollama.protocol import OllamaChatRequest
from ridgeline.serve.dialects.responses import request as responses
from ridgeline.serve.dialects.responses.protocol import ResponsesRequest
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import STRICT, RequestModel
from tests.serve.dialects import histories
from tests.serve.dialects.histories import Row
from tests.serve.serving import Served, serving

ASK = {"role": "user", "content": "Go on."}
CHAT, RESPOND, MESSAGES, TALK = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"),
)
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
KINDS: dict[str, type[RequestModel]] = {
    CHAT: ChatRequest,
    RESPOND: ResponsesRequest,
    MESSAGES: MessagesRequest,
    TALK: OllamaChatRequest,
}


def chat(messages: list[Any]) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 1, "messages": [ASK, *messages, ASK]}


def respond(items: list[Any]) -> dict[str, Any]:
    return {"model": "tiny", "max_output_tokens": 16, "input": [ASK, *items, ASK]}


def result(content: list[Any]) -> list[Any]:
    answer = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    return [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [answer]}]


def talk(messages: list[Any]) -> dict[str, Any]:
    return {"model": "tiny", "stream": False, "options": {"num_predict": 1},
            "messages": [ASK, *messages, ASK]}  # fmt: skip


def parts(kind: str, role: str, content: list[Any]) -> list[Any]:
    return [{"type": kind, "role": role, "content": content}]


def _bodies() -> Iterator[tuple[str, str, dict[str, Any], Row, str]]:
    """Yield a name, a route, a body with a row's items, the row, and where they are named."""
    for row in histories.ITEMS:
        yield row.types, RESPOND, respond(row.items), row, "input"
    for row in histories.OUTPUT_PARTS:
        yield row.types, RESPOND, respond(parts("message", "assistant", row.items)), row, "input"
    for role, table in (("assistant", histories.BLOCKS), ("user", histories.USER_BLOCKS)):
        for row in table:
            said = {"role": role, "content": row.items}
            yield row.types, MESSAGES, chat([said]), row, "messages.content"
    for row in histories.RESULT_BLOCKS:
        yield f"result {row.types}", MESSAGES, chat(result(row.items)), row, "messages.content"
    for row in (*histories.MESSAGES, *histories.CALLS):
        yield row.types, CHAT, chat(row.items), row, "messages.content"
    for row in histories.ANSWER_PARTS:
        said = {"role": "assistant", "content": row.items}
        yield f"part {row.types}", CHAT, chat([said]), row, "messages.content"
    shown = Row("", [], ("a.png", "[image: not shown"), ("images",))
    said = {"role": "tool", "content": "a.png", "tool_name": "f", "images": ["AAAA"]}
    yield "images of a tool", TALK, talk([said]), shown, "messages"


BODIES = list(_bodies())


def names(row: Row, where: str) -> list[str]:
    """What the header says of a row."""
    return [f"{where}.images" if where == "messages" else f"{where} ({one})" for one in row.lost]


def read(path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Return all that a template gets to write, and what is named as dropped."""
    if path == TALK:
        asked: Any = OllamaChatRequest.model_validate(body)
        request = ollama.chat_request(asked)
    elif path == MESSAGES:
        asked = MessagesRequest.model_validate(body)
        request = anthropic.chat_request(asked)
    elif path == RESPOND:
        asked = ResponsesRequest.model_validate(body)
        request = responses.chat_request(asked)
    else:
        asked = request = ChatRequest.model_validate(body)
    words = list[str]()
    for message in request.messages:
        words.append(message.text)
        for call in message.tool_calls or ():
            words += [call["function"]["name"], call["function"]["arguments"]]
    return "\n".join(words), asked.ignored()


@pytest.mark.parametrize(
    ("path", "body", "row", "where"), [one[1:] for one in BODIES], ids=[one[0] for one in BODIES]
)
def test_what_is_text_is_read_and_what_is_not_is_named(
    path: str, body: dict[str, Any], row: Row, where: str
) -> None:
    prompt, ignored = read(path, body)
    assert prompt.startswith("Go on.")
    assert prompt.endswith("Go on.")
    for word in row.words:
        assert word in prompt
    assert "AAAA" not in prompt
    found = [one for one in ignored if "(" in one or one == "messages.images"]
    assert found == names(row, where)
    if row.lost:
        with pytest.raises(ValidationError, match="is not supported"):
            KINDS[path].model_validate(body, context=STRICT)
    else:  # with hints, which pass as well
        KINDS[path].model_validate(body, context=STRICT)


@pytest.fixture(scope="module")
def long(roomy: Any) -> Iterator[Served]:
    with serving(roomy) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "body", "row", "where"), [one[1:] for one in BODIES], ids=[one[0] for one in BODIES]
)
def test_a_server_goes_on(
    long: Served, path: str, body: dict[str, Any], row: Row, where: str
) -> None:
    status, answer, headers = long.call(path, body)
    assert status == 200, answer
    named = headers.get("x-ridgeline-ignored", "").split(", ")
    assert set(names(row, where)) <= set(named)


def test_everything_in_one_history(long: Served) -> None:
    items = [one for row in histories.ITEMS for one in row.items]
    prompt, _ = read(RESPOND, respond(items))
    assert all(word in prompt for row in histories.ITEMS for word in row.words)
    status, answer, _ = long.call("/v1/responses/input_tokens", respond(items))
    assert status == 200, answer
    blocks = [one for row in histories.BLOCKS for one in row.items]
    status, answer, _ = long.call("/v1/messages/count_tokens", {
        name: value for name, value in chat([{"role": "assistant", "content": blocks}]).items()
        if name != "max_tokens"
    })  # fmt: skip
    assert status == 200, answer


def test_hosted_calls_and_texts_keep_their_order() -> None:
    first, second = ({"type": "server_tool_use", "id": one, "name": f"tool_{one}", "input": {}}
                     for one in "ab")  # fmt: skip
    results = [{"type": "web_search_tool_result", "tool_use_id": one, "content": f"of {one}"}
               for one in "ab"]  # fmt: skip
    content = [{"type": "text", "text": "1"}, first, results[0], second, results[1],
               {"type": "text", "text": "2"}, USE]  # fmt: skip
    body = chat([{"role": "assistant", "content": content}])
    body["messages"][-1] = {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "own"}]}  # fmt: skip
    request = anthropic.chat_request(MessagesRequest.model_validate(body))
    said = [(one.role, one.text, [call["function"]["name"] for call in one.tool_calls or ()])
            for one in request.messages]  # fmt: skip
    assert said == [
        ("user", "Go on.", []),
        ("assistant", "1", ["tool_a"]),
        ("tool", "of a", []),
        ("assistant", "", ["tool_b"]),
        ("tool", "of b", []),
        ("assistant", "2", ["f"]),
        ("tool", "own", []),
    ]
    ids = [one.tool_call_id for one in request.messages if one.role == "tool"]
    assert ids == ["a", "b", "t1"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (RESPOND, respond([{"type": "custom_tool_call", "call_id": "c", "name": "f",
                            "input": "x"}]), "input (custom_tool_call)"),
        (RESPOND, respond([{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]),
         "input (custom_tool_call_output)"),
        (RESPOND, respond([{"type": "mcp_call", "id": "c", "name": "f", "arguments": "{}"}]),
         "input (mcp_call)"),
        (RESPOND, respond([{"type": "of_next_year", "id": "c"}]), "input (of_next_year)"),
        (MESSAGES, chat([{"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "f", "input": {}}]}]),
         "messages.content (server_tool_use)"),
        (MESSAGES, chat([{"role": "assistant", "content": [
            {"type": "mcp_tool_result", "tool_use_id": "s", "content": "x"}]}]),
         "messages.content (mcp_tool_result)"),
        (MESSAGES, chat([{"role": "assistant", "content": [{"type": "of_next_year"}]}]),
         "messages.content (of_next_year)"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_a_call_without_its_result_is_left_out(path: str, body: dict[str, Any], named: str) -> None:
    prompt, ignored = read(path, body)
    assert prompt.split() == ["Go", "on.", "Go", "on."]
    assert ignored == [named]


def test_what_a_user_shows_is_refused_and_not_left_out() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "A"}}
    bodies = [(MESSAGES, chat([{"role": "user", "content": [one]}])) for one in (image, pdf)]
    for kind, is_text in histories.USER_PARTS.items():
        if not is_text:
            bodies.append((CHAT, chat([{"role": "user", "content": [{"type": kind}]}])))
    for kind, is_text in histories.INPUT_PARTS.items():
        if not is_text:
            bodies.append((RESPOND, respond(parts("message", "user", [{"type": kind}]))))
    bodies.append((TALK, talk([ASK | {"images": ["AAAA"]}])))
    bodies.append((CHAT, chat([{"role": "user", "content": None}])))
    assert len(bodies) == 9
    for path, body in bodies[:-1]:
        with pytest.raises(ValidationError, match="is not supported"):
            KINDS[path].model_validate(body)


def test_items_that_alone_leave_nothing_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="is not supported"):
        ResponsesRequest.model_validate({"input": [{"type": "item_reference", "id": "x"}]})


@pytest.mark.parametrize("odd", [None, 1, "x", [], {}, {"type": []}, {"type": {}}, {"type": "x"}])
def test_odd_values_are_errors_and_no_faults(odd: Any) -> None:
    """Wherever a type may stand; the second of each pair has it deeper."""
    calls = [{"type": "mcp_call", "name": odd, "arguments": odd, "output": [odd], "id": odd},
             {"type": "shell_call", "call_id": odd, "action": odd},
             {"type": "shell_call_output", "call_id": odd, "output": odd}]  # fmt: skip
    blocks = [{"type": "server_tool_use", "id": odd, "name": odd, "input": odd},
              {"type": "x_tool_result", "tool_use_id": odd, "content": odd},
              {"type": "document", "source": odd, "title": odd},
              {"type": "search_result", "content": odd}]  # fmt: skip
    messages = [{"role": odd, "content": odd}, {"role": "assistant", "content": [odd]},
                {"role": "tool", "content": [odd], "images": odd},
                {"role": "assistant", "tool_calls": odd, "function_call": odd, "refusal": odd},
                {"role": "assistant", "tool_calls": [odd, {"custom": odd}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": odd},
                                                  {"type": "file", "file": odd}]}]  # fmt: skip
    bodies = [(RESPOND, respond([one])) for one in (odd, *calls, {"role": "user", "content": [odd]},
              {"type": "function_call_output", "call_id": "c", "output": [odd]})]  # fmt: skip
    bodies += [(RESPOND, respond(calls))]
    bodies += [(MESSAGES, chat([{"role": role, "content": [one]}]))
               for role in ("assistant", "user") for one in (odd, *blocks)]  # fmt: skip
    bodies += [(MESSAGES, chat([odd])), (MESSAGES, chat(result([odd])))]
    bodies += [(path, around([one])) for path, around in ((CHAT, chat), (TALK, talk))
               for one in (odd, *messages)]  # fmt: skip
    taken = 0
    for path, body in bodies:
        for context in (None, STRICT):
            with suppress(ValidationError):
                KINDS[path].model_validate(body, context=context)
                taken += 1
    assert 0 < taken < 2 * len(bodies)


def members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, those of unions in it too."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        yield from members(typing.get_args(hint)[0])
    elif origin in (typing.Union, UnionType):
        for one in typing.get_args(hint):
            yield from members(one)
    else:
        yield hint


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a typed dictionary, with what their hints name in other modules."""
    return typing_extensions.get_type_hints(kind, localns=vars(typing), include_extras=True)


def made(hint: Any, *, whole: bool, depth: int = 0) -> Any:
    """Return a value of a type: with all its fields, or with those that must be there."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return inner[0]
    if origin in (typing.Union, UnionType, typing.Annotated, typing.Required):
        return made(inner[0], whole=whole, depth=depth)
    if typing_extensions.is_typeddict(hint):
        return {
            name: made(one, whole=whole, depth=depth + 1)
            for name, one in fields_of(hint).items()
            if typing.get_origin(one) is typing.Required or (whole and depth < 4)
        }
    plain = {str: "x", int: 1, float: 0.5, bool: True, object: {}, type(None): None}
    if hint in plain:
        return plain[hint]
    if origin is dict or not inner:
        return {}
    return [made(inner[0], whole=whole, depth=depth + 1)]


def union(module: str, name: str) -> list[Any]:
    """The members of a union of a client's package, if that is here."""
    package = module.partition(".")[0]
    pytest.importorskip(package, reason=f"the package {package} is not installed")
    return list(members(getattr(importlib.import_module(module), name)))


def kinds_of(some: Iterable[Any], name: str = "type") -> dict[str, Any]:
    """Typed dictionaries by what their field ``name`` says."""
    some = [one for one in some if typing_extensions.is_typeddict(one) and name in fields_of(one)]
    return {made(fields_of(one)[name], whole=True): one for one in some}


ITEM_PARAMS = ("openai.types.responses.response_input_item_param", "ResponseInputItemParam")
BETA = "anthropic.types.beta.beta"
UNIONS = [  # of a package; our types; a body with one; types that a body need not take
    (ITEM_PARAMS, histories.types(histories.ITEMS), respond, ()),
    (("openai.types.responses.response_output_message_param", "Content"),
     histories.types(histories.OUTPUT_PARTS),
     lambda one: respond(parts("message", "assistant", one)), ()),
    (("openai.types.responses.response_input_content_param", "ResponseInputContentParam"),
     set(histories.INPUT_PARTS), lambda one: respond(parts("message", "user", one)),
     ("input_image", "input_file")),
    (("openai.types.chat.chat_completion_content_part_param", "ChatCompletionContentPartParam"),
     set(histories.USER_PARTS), lambda one: chat([{"role": "user", "content": one}]),
     ("image_url", "input_audio", "file")),
    (("openai.types.chat.chat_completion_assistant_message_param", "ContentArrayOfContentPart"),
     histories.types(histories.ANSWER_PARTS),
     lambda one: chat([{"role": "assistant", "content": one}]), ()),
    (("openai.types.chat.chat_completion_message_tool_call_union_param",
      "ChatCompletionMessageToolCallUnionParam"), histories.types(histories.CALLS),
     lambda one: chat([{"role": "assistant", "tool_calls": one}]), ()),
    ((f"{BETA}_content_block_param", "BetaContentBlockParam"),
     histories.types(histories.BLOCKS, histories.USER_BLOCKS) | set(histories.APART),
     lambda one: chat([{"role": "assistant", "content": one}]), ("tool_result",)),
    ((f"{BETA}_tool_result_block_param", "Content"), histories.types(histories.RESULT_BLOCKS),
     lambda one: chat(result(one)), ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "known", "around", "refused"), UNIONS, ids=[one[0][1] for one in UNIONS]
)
def test_each_type_of_a_clients_package_is_taken(
    source: tuple[str, str], known: set[str], around: Any, refused: tuple[str, ...]
) -> None:
    some = kinds_of(union(*source))
    assert set(some) == known, "a type is new or gone: say in histories.py what becomes of it"
    path = RESPOND if around is respond or "responses" in source[0] else CHAT
    path = MESSAGES if source[0].startswith("anthropic") else path
    for kind, one in some.items():
        for whole in (False, True):
            value = made(one, whole=whole)
            if kind == "function_call_output":
                value["call_id"] = "c"  # optional there, and needed here: it says which call
            body = around([value])
            if kind in refused:
                with pytest.raises((ValidationError, ApiError)):
                    read(path, body)
            else:
                read(path, body)


def test_each_message_of_openais_package_is_taken() -> None:
    module = "openai.types.chat.chat_completion_message_param"
    some = kinds_of(union(module, "ChatCompletionMessageParam"), "role")
    assert set(some) == histories.types(histories.MESSAGES)
    for one in some.values():
        for whole in (False, True):
            read(CHAT, chat([made(one, whole=whole)]))


def test_each_field_of_ollamas_messages_is_taken() -> None:
    ours = pytest.importorskip("ollama", reason="the package ollama is not installed")
    assert set(ours.Message.model_fields) == set(histories.OLLAMA_FIELDS)
    call = {"function": {"name": "f", "arguments": {}}}
    values: dict[str, Any] = {"content": "x", "thinking": "Hm", "images": [ours.Image(value=b"x")],
              "tool_name": "f", "tool_calls": [call]}  # fmt: skip
    for name, value in values.items():
        for role in ("system", "user", "assistant", "tool"):
            message = ours.Message(**{"role": role, name: value}).model_dump(mode="json")
            if name == "images" and role != "tool":
                with pytest.raises(ValidationError):
                    read(TALK, talk([message]))
            else:
                read(TALK, talk([message]))
