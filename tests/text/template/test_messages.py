"""Messages of all kinds before a template: no field is invented, no null arrives, and what other
models and servers wrote is text or a call.

The templates are small ones of ours. Each does one thing that templates of well-known models do.
"""

from __future__ import annotations

import base64
import copy
import json
from functools import cache
from typing import Any

import pytest

from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.template.messages import familiar, is_text, readable
from tests.model.files.vocabularies import byte_level, ours

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SAID: dict[str, Any] = {"role": "assistant", "content": "Yes"}
_EMPTY = "name tool_calls tool_call_id reasoning_content reasoning thinking refusal audio"
NULLS = dict.fromkeys((*_EMPTY.split(), "annotations", "function_call"))


def loop(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


ASKS_WITH_IN = loop(
    "{% if 'thinking' in m %}{{ '(' + m.thinking + ')' }}{% endif %}{{ m.content }}"
)
ASKS_IF_DEFINED = loop(
    "{% if m.thinking is defined %}{{ '(' + m.thinking + ')' }}{% endif %}{{ m.content }}"
)
ADDS_CONTENT = loop("{{ '<' + m.content + '>' }}")
COUNTS_CALLS = loop(
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
    "{% endif %}[{{ m.tool_calls[0].function.name }}]{% else %}{{ m.content }}{% endif %}"
)
CALLS_IF_DEFINED = loop(
    "{% if m.tool_calls is defined %}[{{ m.tool_calls[0].function.name }}]{% endif %}"
    "{{ m.content }}"
)
NAMES = loop("{{ m.role }}{% if 'name' in m %}{{ '@' + m.name }}{% endif %}:{{ m.content }} ")
SHOWS = loop("{{ m | tojson }}")
# A template that writes tools is told of them and of calls; any other has them in words.
SHOWS_CALLS = "{{ tools | tojson }}" + loop("{{ m.tool_calls | tojson if m.tool_calls }}")


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, ours(byte_level))


def text(source: str, messages: Any, **variables: Any) -> str:
    before = copy.deepcopy((messages, variables))
    found = template(source).render_text(messages, **variables)
    assert (messages, variables) == before, "what was given has changed"
    return found


@pytest.mark.parametrize("source", [ASKS_WITH_IN, ASKS_IF_DEFINED], ids=["in", "is defined"])
@pytest.mark.parametrize("extra", [{}, NULLS, {"reasoning_content": ""}], ids=["", "null", "empty"])
def test_a_message_without_thoughts_has_no_field_for_them(
    source: str, extra: dict[str, Any]
) -> None:
    assert text(source, [USER, SAID | extra, USER]) == "HiYesHi"


@pytest.mark.parametrize("own", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_thoughts_have_the_name_that_the_template_reads(own: str, read: str) -> None:
    for source in (ASKS_WITH_IN, ASKS_IF_DEFINED):
        source = source.replace("thinking", read)
        assert text(source, [USER, SAID | {own: "Hm"}, USER]) == "Hi(Hm)YesHi"


@pytest.mark.parametrize(
    "source",
    [ADDS_CONTENT, COUNTS_CALLS, CALLS_IF_DEFINED, NAMES, SHOWS, ASKS_WITH_IN, ASKS_IF_DEFINED],
)
def test_a_null_is_absence(source: str) -> None:
    chat = [USER, SAID, USER]
    plain = text(source, chat)
    assert text(source, [NULLS | one for one in chat]) == plain
    for name in NULLS:
        assert text(source, [one | {name: None} for one in chat]) == plain
    if source != SHOWS:
        assert text(source, [USER, SAID | {"tool_calls": []}, USER]) == plain
    assert "tool_calls" not in text(SHOWS, [USER, SAID | {"tool_calls": []}])


CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": null}'},
}


def test_nulls_in_calls_and_tools_are_absent_and_those_in_their_values_stay() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    nulls = {"type": "function", "strict": None,
             "function": tool["function"] | {"description": None, "strict": None}}  # fmt: skip
    chat = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    call = CALL | {"index": None, "function": CALL["function"] | {"parsed_arguments": None}}
    plain = text(SHOWS_CALLS, chat, tools=[tool])
    assert json.dumps([tool]) in plain
    assert '"arguments": {"a": null}' in plain
    odd = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert text(SHOWS_CALLS, odd, tools=[nulls]) == plain


def test_a_variable_that_is_null_is_absent() -> None:
    source = "{% if thinking is defined %}{{ thinking }}{% endif %}-"
    assert text(source, [USER], thinking=None) == "-"
    assert text(source, [USER], thinking=False) == "False-"
    assert text("{{ tools is none }}{{ documents is none }}", [USER], tools=None) == "TrueTrue"


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_content_is_always_a_text_where_there_may_be_none(role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}, {"role": role, "content": []}):
        assert text(ADDS_CONTENT, [USER, message]) == "<Hi><>"
    for message in ({"role": "user"}, {"role": "system", "content": None}):
        with pytest.raises(ValueError, match=r"messages\[0\]\.content must be a string"):
            text(ADDS_CONTENT, [message])


def test_calls_that_are_no_list_are_refused() -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]\.tool_calls must be a list"):
        text(ADDS_CONTENT, [{"role": "assistant", "tool_calls": 1}])


def test_ids_of_calls_have_the_length_that_the_template_wants() -> None:
    """Mistral's take no others, and every server has ids of its own."""
    source = "{{ tools }}" + loop(
        "{% for one in [m.tool_call_id] if m.role == 'tool' %}{% if one | length != 9 %}"
        "{{ raise_exception('9') }}{% endif %}{{ '=' + one }}{% endfor %}"
        "{% for one in m.tool_calls or [] %}{% if one.id | length != 9 %}"
        "{{ raise_exception('9') }}{% endif %}{{ '+' + one.id }}{% endfor %}"
    )

    def ids(*own: str) -> str:
        chat = [USER, {"role": "assistant", "tool_calls": [CALL | {"id": one} for one in own]}]
        chat += [{"role": "tool", "tool_call_id": one, "content": ""} for one in own]
        return text(source, chat).removeprefix("None")

    first, second = ids("call_1", "toolu_2").split("+")[1:]
    assert ids("call_1") == f"+{first}={first}", "the same for the same"
    assert first != second.split("=")[0]
    assert ids("abcDEF123") == "+abcDEF123=abcDEF123"
    assert text(SHOWS, [USER | {"tool_call_id": "call_1"}]).count("call_1") == 1


def test_arguments_are_json_where_a_template_adds_them_to_text() -> None:
    source = "{{ tools }}" + loop(
        "{% for one in m.tool_calls or [] %}{{ '!' + one.function.arguments }}{% endfor %}"
    )
    for arguments in ('{"a": null}', {"a": None}):
        function = {"name": "f", "arguments": arguments}
        chat = [USER, {"role": "assistant", "tool_calls": [CALL | {"function": function}]}]
        assert text(source, chat).removeprefix("None") == '!{"a": null}'


def test_older_calls_and_calls_of_custom_tools_are_calls() -> None:
    old = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    ]
    shown = text(SHOWS_CALLS + loop("{{ m.role }}={{ m.tool_call_id }} "), old)
    assert '"id": "call_f"' in shown
    assert "tool=call_f" in shown
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    shown = text(SHOWS_CALLS, [USER, {"role": "assistant", "tool_calls": [custom, CALL]}])
    assert '"name": "patch", "arguments": {"input": "*** Begin"}' in shown
    assert '"custom"' not in shown


def test_what_an_assistant_refused_or_thought_in_parts_is_text() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert text(ADDS_CONTENT, [USER, refused]) == "<Hi><No.>"
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
        {"type": "refusal", "refusal": "No."},
        {"type": "output_text", "text": "Sorry."},
    ]
    said = text(ASKS_WITH_IN, [USER, {"role": "assistant", "content": parts}])
    assert said == "Hi(Hm)No.\nSorry."


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def test_an_image_is_a_line_in_a_result_nothing_in_an_answer_and_refused_of_a_user() -> None:
    result = {"role": "tool", "content": [{"type": "text", "text": "a.png"}, IMAGE]}
    read, lost = familiar(result)
    assert read["content"][0]["text"] == "a.png"
    assert "image_url: not shown" in read["content"][1]["text"]
    assert lost == ["content (image_url)"]
    assert familiar(result, may_lose=False) == (result, [])
    answer = {"role": "assistant", "content": [IMAGE, {"type": "text", "text": "See."}]}
    assert familiar(answer) == (
        {"role": "assistant", "content": [{"type": "text", "text": "See."}]},
        ["content (image_url)"],
    )
    for role in ("user", "system", "developer"):
        message = {"role": role, "content": [IMAGE]}
        assert familiar(message) == (message, [])


WORDS = "data:text/plain;base64," + base64.b64encode("Größe".encode()).decode()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "document", "title": "T", "context": "C",
          "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "T\nC\nwords"),
        ({"type": "document", "source": {"type": "content", "content": "words"}}, "words"),
        ({"type": "document", "source": {"type": "content", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}}, "a\nb"),
        ({"type": "search_result", "source": "https://a.example", "title": "T",
          "content": [{"type": "text", "text": "words"}]}, "T\nhttps://a.example\nwords"),
        ({"type": "input_file", "filename": "a.txt", "file_data": WORDS}, "a.txt\nGröße"),
        ({"type": "file", "file": {"filename": "a.txt", "file_data": WORDS}}, "a.txt\nGröße"),
        ({"type": "refusal", "refusal": "No."}, "No."),
    ],
    ids=lambda one: one if isinstance(one, str) else one["type"],
)  # fmt: skip
def test_parts_that_are_text(part: dict[str, Any], expected: str) -> None:
    assert is_text(part)
    assert readable(part) == (expected, ())
    user = {"role": "user", "content": [part, {"type": "text", "text": "?"}]}
    assert text(ADDS_CONTENT, [user]) == f"<{expected}\n?>"


PDF = {"type": "document", "title": "T", "source": {"type": "base64", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (PDF, "document"),
        ({"type": "document", "source": {"type": "content", "content": [IMAGE]}}, "image_url"),
        ({"type": "input_file", "file_id": "file_1"}, "input_file"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}}, "file"),
        ({"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}}, "file"),
        ({"type": "file", "file": {"file_data": "data:text/plain;base64,?"}}, "file"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_parts_that_are_no_text(part: dict[str, Any], kind: str) -> None:
    assert not is_text(part)
    found = readable(part)
    assert found.left_out == (kind,)
    assert f"[{kind}" in found.text
    assert "AA" not in found.text
    with pytest.raises(ValueError, match="is not of type 'text'"):
        text(ADDS_CONTENT, [{"role": "user", "content": [part]}])


def test_what_is_no_part_stays_json_without_ciphers() -> None:
    value = [
        {"type": "web_search_result", "url": "u", "title": "é", "encrypted_content": "xyz"},
        {"type": "code_execution_result", "stdout": "1\n", "return_code": 0, "content": [PDF]},
        {"type": "text", "text": "plain"}, None, 3,
    ]  # fmt: skip
    found = readable(value)
    assert found.left_out == ("encrypted_content", "document")
    first, second, third, fourth = found.text.split("\n")
    assert json.loads(first) == {"type": "web_search_result", "url": "u", "title": "é"}
    assert json.loads(second)["stdout"] == "1\n"
    assert json.loads(second)["content"][0].startswith("[document T: not shown")
    assert (third, fourth) == ("plain", "3")
