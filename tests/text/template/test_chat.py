"""Chat templates: what they render, what users cannot forge, and what is refused."""

from __future__ import annotations

import gc
import io
import json
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import Tokenizer
from tests.model.files.vocabularies import VOCABULARIES, byte_level, mixed, ours, vocabulary

CHATML = (
    "{% for message in messages %}{{ '<|end|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|end|>x\n' }}{% endfor %}{% if add_generation_prompt %}<|end|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


@cache
def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, ours(byte_level), bos_token="<|end|>x", eos_token="<|end|>")


def text(source: str, messages: Any = HELLO, **options: Any) -> str:
    return template(source).render_text(messages, **options)


def test_a_conversation() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}],
        },
    ]
    expected = "<|end|>system\nBe brief.<|end|>x\n<|end|>user\nHi\n!<|end|>x\n"
    assert text(CHATML, messages, add_generation_prompt=False) == expected
    assert text(CHATML, messages) == expected + "<|end|>assistant\n"
    assert template(CHATML).render_ids(messages) == ours(byte_level).encode(text(CHATML, messages))


OSS = (  # as gpt-oss's template reads an assistant's message
    "{% if tools %}T{% endif %}{% for m in messages %}"
    "{% if 'thinking' in m and m.thinking %}({{ m.thinking }}){% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_thoughts_have_the_name_that_a_template_reads() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call]}
    assert text(OSS, [*HELLO, thought]) == "Hello(Hm)"
    both = text(OSS, [*HELLO, thought | {"content": "Well"}])
    assert both.endswith("Well"), "of both before calls gpt-oss's template takes one"
    assert "(" not in both
    usual = OSS.replace("thinking", "reasoning_content")
    assert text(usual, [*HELLO, thought]) == "Hello(Hm)"
    assert template(OSS).knows_thoughts
    assert template(usual).knows_thoughts
    assert not template(CHATML + "{{ enable_thinking }}").knows_thoughts


@given(contents=st.lists(mixed, min_size=1, max_size=3), role=st.sampled_from(["user", "system"]))
def test_content_makes_no_control_tokens(contents: list[str], role: str) -> None:
    tokenizer = ours(byte_level)
    start, end = tokenizer.encode("<|end|>")[0], tokenizer.encode("<|end|>x")[0]
    ids = template(CHATML).render_ids([{"role": role, "content": c} for c in contents])
    assert ids.count(start) == len(contents) + 1
    assert ids.count(end) == len(contents)
    assert tokenizer.encode("<think>")[0] not in ids


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_control_token_in_content_has_the_ids_of_plain_text(name: str) -> None:
    metadata, tokenizer = vocabulary(name)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = [i for i, kind in enumerate(types) if kind == 3]
    mark = tokens[control[0]]
    chat = ChatTemplate(
        f"{mark}{{% for m in messages %}}u: {{{{ m.content | trim }}}}{mark}{{% endfor %}}",
        tokenizer,
    )
    for i in control[:40]:
        for content in (f"{tokens[i]}", f"a {tokens[i]} b", f"x{tokens[i][:-1]}", tokens[i] * 2):
            plain = tokenizer.encode(f"u: {content}", parse_special=False)
            ids = chat.render_ids(
                [{"role": "user", "content": content}], add_generation_prompt=False
            )
            assert ids == [control[0], *plain, control[0]]


def test_fields_and_variables_make_no_control_tokens() -> None:
    source = "{{ tools | tojson }}{{ messages[0].name }}{{ messages[0].tool_calls | tojson }}"
    source += "{{ extra[0] }}"
    message = {
        "role": "assistant",
        "content": None,
        "name": "<|end|>",
        "tool_calls": [{"<|end|>": 1}],
    }
    ids = template(source).render_ids([message], tools=[{"a": "<|end|>"}], extra=("<think>", 1.5))
    assert not set(ids) & {ours(byte_level).encode(s)[0] for s in ("<|end|>", "<think>")}
    assert ours(byte_level).decode(ids).count("<|end|>") == 3


def test_what_an_assistant_wrote_keeps_its_visible_tags() -> None:
    source = "{% for m in messages %}{{ m.content.split('<think>')[-1] }}{% endfor %}"
    said = [{"role": "assistant", "content": "no<think>yes<|end|>"}]
    assert text(source, said) == "yes<|end|>"
    assert ours(byte_level).encode("<|end|>")[0] not in template(source).render_ids(said)
    asked = [{"role": "user", "content": "no<think>yes"}]
    assert text(source, asked) == "no<think>yes"


def test_noncharacters_of_users_become_replacement_characters() -> None:
    assert text("{{ messages[0].content }}", [{"role": "user", "content": "a\ufdd0\ufdd1"}]) == (
        "a\ufffd\ufffd"
    )


def test_a_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    rendered = text(CHATML, messages, **options)
    assert rendered.endswith("<|end|>assistant\nThe answer is ")
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    assert text(trimming, messages, **options) == rendered
    with pytest.raises(ValueError, match="exclude each other"):
        text(CHATML, messages, continue_final_message=True)
    with pytest.raises(ValueError, match="leaves out the last message"):
        text("{{ messages[0].content }}", messages, **options)


def test_developer_is_the_system_where_a_template_knows_no_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert text(plain, messages).startswith("system: Be brief.")
    knowing = "{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}"
    assert text(knowing, messages) == "developer"


def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer(byte_level(), bos_id=1, begin_ids=(1,))
    for source in ("Hi", "{{ bos_token }}Hi"):
        ids = ChatTemplate(source, tokenizer, bos_token="<|end|>x").render_ids(HELLO)
        assert ids == [1, *tokenizer.encode("Hi", add_bos=False)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<|end|>x|<|end|>"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # trim_blocks, lstrip_blocks
        ("{{ {'b': '<é>&', 'a': 1} | tojson }}", '{"b": "<é>&", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ undefined_name }}-", "-"),
    ],
)
def test_what_templates_expect_of_hugging_face(source: str, expected: str) -> None:
    assert text(source) == expected


def test_each_text_of_a_conversation_is_shielded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is half of what a prompt of many messages costs beside its ids."""
    shielded, shield = Counter[str](), Tokenizer.shield

    def counted(self: Tokenizer, text: str, *, special_only: bool = False) -> str:
        shielded[text] += 1
        return shield(self, text, special_only=special_only)

    monkeypatch.setattr(Tokenizer, "shield", counted)
    words = {"user": "one", "assistant": "two", "tool": "three"}
    messages = [{"role": role, "content": word, "name": f"n{word}"} for role, word in words.items()]
    assert "two" in text(CHATML, messages)
    names = (f"n{word}" for word in words.values())
    assert shielded == Counter([*words.values(), *names])


def test_the_fields_of_a_message_keep_their_order() -> None:
    one = {"content": "<|end|>", "name": "n", "role": "user"}
    assert text("{{ messages[0] | tojson }}", [one]) == json.dumps(
        {"content": "<|end|>", "name": "n", "role": "user"}
    )


def test_a_template_tells_the_time_that_it_is_given_and_has_no_clock() -> None:
    now = datetime(2027, 12, 31, 23, 59, 59, 250, tzinfo=timezone(timedelta(hours=14)))
    many = "{% for i in range(2000) %}{{ strftime_now('%Y-%m-%d %H:%M:%S.%f%Z') }} {% endfor %}"
    assert set(text(many, strftime_now=now).split("\n")[0].split(" ")) == {
        *["2027-12-31", "23:59:59.000250"],
        "",
    }
    assert len(set(text("{{ strftime_now('%f') }} " * 2000).split())) == 1
    with pytest.raises(ValueError, match="strftime_now is 'today': give a datetime"):
        text("", strftime_now="today")


def test_the_clock_and_variables() -> None:
    assert re.fullmatch(r"20\d\d-\d\d", text("{{ strftime_now('%Y-%m') }}"))
    assert text("{{ enable_thinking }}", enable_thinking=False) == "False"
    with pytest.raises(ValueError, match="variable 'bos_token' cannot be set"):
        text("", bos_token="x")
    with pytest.raises(ValueError, match="extra holds object, which is not a JSON value"):
        text("", extra=object())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "has no chat template; use a plain completion"),
        ("{{ raise_exception('Roles must alternate\nat least') }}", "fails: Roles must alternate"),
        ("{% if %}", "fails: Expected an expression"),
        ("{{ messages[0].content + 1 }}", "fails: "),
        ("{{ messages.append(1) }}", "fails: .*unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "fails: .*unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: .*recursion"),
        ("{{ 'x' * 10**10 }}", "fails: MemoryError"),
        ("{{ ([1] * 10**9) | length }}", "fails: MemoryError"),
        ("{% for i in range(10**12) %}{% endfor %}", "fails: Range too big"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "output exceeds 16777216"),
        ("{% include 'other' %}", "fails: "),
    ],
)
def test_templates_that_fail(source: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        template(source).render_ids(HELLO)
    assert "\n" not in str(caught.value)


def test_a_template_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces of its output or inside of one expression; and a new one takes over."""
    monkeypatch.setattr("ridgeline.text.template.chat._MAX_CPU_S", 0.3)
    doubling = "{% set a = namespace(x=[1]) %}" + "{% set a.x = [a.x, a.x] %}" * 40
    for bomb in (
        "{% for a in messages %}{% for b in messages %}{{ 1 }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages | length ** 1000000000 }}",
        doubling + "{{ a.x | tojson }}",
    ):
        source = "{% if messages[0].content == 'boom' %}" + bomb + "{% endif %}fine"
        chat = template(source)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"takes more than 0.3 s of computing"):
                chat.render_ids([{"role": "user", "content": "boom"}] * 3000)
            assert chat.render_text(HELLO) == "fine"


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process's computing is limited")
def test_a_template_is_ended_by_what_it_computes() -> None:
    chat = template(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="2 s of computing"):
        chat.render_text(HELLO)


def process_of(chat: ChatTemplate) -> subprocess.Popen[bytes] | None:
    """Return the process that is asked next."""
    assert chat._renderer is not None
    return chat._renderer._children._idle[-1]._process


def test_the_process_ends_with_its_template() -> None:
    chat = ChatTemplate(CHATML, ours(byte_level))
    chat.render_ids(HELLO)
    process = process_of(chat)
    assert process is not None
    assert process.poll() is None
    chat.close()
    assert process.returncode == 0
    chat.start()  # it may be used again
    second = process_of(chat)
    assert second is not None
    del chat
    gc.collect()
    assert second.returncode == 0


def test_an_interrupted_rendering_leaves_no_answer_behind() -> None:
    chat = ChatTemplate("{{ messages[0].content }}", ours(byte_level))
    chat.start()

    process = process_of(chat)
    assert process is not None
    assert process.stdout is not None

    class Interrupted(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise KeyboardInterrupt

    with process.stdout:
        process.stdout = Interrupted()  # the question was sent
        with pytest.raises(KeyboardInterrupt):
            chat.render_text([{"role": "user", "content": "first"}])
    assert chat.render_text([{"role": "user", "content": "second"}]) == "second"


def test_a_process_that_was_killed_is_replaced() -> None:
    chat = ChatTemplate("fine", ours(byte_level))
    chat.start()
    process = process_of(chat)
    assert process is not None
    process.kill()
    process.wait()
    assert chat.render_text(HELLO) == "fine"


def test_who_renders_side_by_side_gets_their_own() -> None:
    chat = template("{{ messages[0].content }}")

    def ask(number: int) -> bool:
        return chat.render_text([{"role": "user", "content": str(number)}]) == str(number)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(200)))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("Hello", "must be a list"),
        ([*HELLO, "Hello"], r"messages\[1\] must be an object"),
        ([{"role": "robot", "content": ""}], r"messages\[0\]\.role is 'robot'; use one of system"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([{"role": [], "content": "x"}], r"messages\[0\]\.role is \[\]"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is not of type"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is not of type 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "user", "content": "x", "name": object()}], r"messages\[0\]\.name holds object"),
        ([{"role": "user", "content": "\ud83d"}], "lone surrogate"),
    ],
)
def test_messages_that_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        template(CHATML).render_ids(messages)


def test_smollm2_writes_its_own_template() -> None:
    metadata, tokenizer = vocabulary("smollm2")
    chat = ChatTemplate(metadata["tokenizer.chat_template"], tokenizer)
    ids = chat.render_ids([{"role": "user", "content": "<|im_end|>Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.decode(ids, skip_special=False) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(1), ids.count(2)) == (3, 2)


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "<|end|>", "parameters": {"type": "object"}},
}
KNOWS_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "warm"},
]  # fmt: skip


def test_a_template_that_knows_tools_gets_them_and_arguments_as_an_object() -> None:
    assert template(KNOWS_TOOLS).knows_tools
    expected = '[weather]user:Rome?assistant:({"city": "Rome"})tool:warm'
    assert text(KNOWS_TOOLS, CALLED, tools=[WEATHER]) == expected
    cut = json.loads(json.dumps(CALLED))
    cut[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Ro'
    assert '"{\\"city\\": \\"Ro"' in text(KNOWS_TOOLS, cut)


def test_a_template_that_knows_no_tools_has_them_in_words() -> None:
    assert not template(CHATML).knows_tools
    found = text(CHATML, CALLED, tools=[WEATHER], add_generation_prompt=False)
    system, user, assistant, tool = found.split("<|end|>x\n")[:4]
    assert system.startswith("<|end|>system\nYou can call")
    assert '{"name": "weather", "description": ' in system
    assert user == "<|end|>user\nRome?"
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert assistant == f"<|end|>assistant\n<tool_call>\n{call}\n</tool_call>"
    assert tool == "<|end|>user\n<tool_response>\nwarm\n</tool_response>"
    own = [{"role": "system", "content": "Be brief."}, *CALLED]
    found = text(CHATML, own, tools=[WEATHER])
    assert found.startswith("<|end|>system\nBe brief.\n\nYou can call")
    assert found.count("system") == 1


def test_conversations_with_tools_have_their_own_template_where_there_is_one() -> None:
    both = ChatTemplate(CHATML, ours(byte_level), "<|end|>x", "<|end|>", tool_source=KNOWS_TOOLS)
    assert both.render_text(CALLED, tools=[WEATHER]) == text(KNOWS_TOOLS, CALLED, tools=[WEATHER])
    assert both.render_text(HELLO) == both.render_text(HELLO, tools=[]) == text(CHATML)
    assert (both.source, both.tool_source) == (CHATML, KNOWS_TOOLS)
    assert both.sources == f"{CHATML}\n{KNOWS_TOOLS}"
    other = both.rewritten(CHATML)
    assert other.render_text(HELLO, tools=[WEATHER]) == text(CHATML, tools=[WEATHER])
    process = both._with_tools and process_of(both._with_tools)
    assert process is not None
    both.close()
    assert process.wait(timeout=60) is not None
    other.close()


def test_a_template_for_tools_alone_serves_conversations_with_tools() -> None:
    alone = ChatTemplate(None, ours(byte_level), tool_source=KNOWS_TOOLS)
    assert alone.render_text(CALLED, tools=[WEATHER]) == text(KNOWS_TOOLS, CALLED, tools=[WEATHER])
    with pytest.raises(ValueError, match="for conversations with tools alone: send tools"):
        alone.render_text(HELLO)
    assert alone.source == alone.tool_source == alone.sources == KNOWS_TOOLS
    alone.close()


def test_a_tool_makes_no_control_tokens() -> None:
    end = ours(byte_level).encode("<|end|>")[0]
    for source in (CHATML, KNOWS_TOOLS):
        ids = template(source).render_ids(CALLED, tools=[WEATHER])
        assert ids.count(end) == (5 if source == CHATML else 0)


def test_a_template_that_reads_parts_gets_parts() -> None:
    """As one text, what such a template selects from would be empty."""
    source = (
        "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text')"
        " %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text(source, [{"role": "user", "content": "a <|end|>"}]) == "[a <|end|>]"
    assert text(source, [{"role": "user", "content": parts}]) == "[a\nb]"
    # One that can read either has text, as before.
    either = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content[0]['text'] + '!' }}{% endif %}{% endfor %}"
    )
    assert text(either, HELLO) == "Hello"
