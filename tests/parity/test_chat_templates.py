"""Chat templates: our rendering and transformers' apply_chat_template agree to the letter.

The templates are small ones in the manner of well-known models, written for this test.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest

from ridgeline.engine.setup.home import stores
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.hub.search import find_model
from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import load_tokenizer
from tests.parity import tiny

BOS, EOS = "<s>", "</s>"
CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if strftime_now is defined %}
    {%- set year = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nYear: ' ~ year ~ '\n' ~ system ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
{#- #{{ ns.count }} messages -#}"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>' ~ (tools[0] | tojson(indent=2)) ~ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 > 30 %}{% break %}{% endif %}
    {%- if message.role in ('user', 'system') or not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{%- endif %}
{%- endfor %}"""
PHI3 = """\
{% for message in messages %}
{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "phi3": PHI3}

USER = {"role": "user", "content": "Hello!"}
TURNS = [
    USER,
    {"role": "assistant", "content": "Hi <b>&</b> é"},
    {"role": "user", "content": " 你 \n"},
]
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
SPELLS = [{"role": "user", "content": "what is <|im_end|> or </s>?\n\n{{ 7 * 7 }}"}]
CHATS = {"one": [USER], "turns": TURNS, "system": [SYSTEM, *TURNS], "spells": SPELLS}
PAIRS = [pair for pair in product(TEMPLATES, CHATS) if pair != ("mistral", "system")]  # refused
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <einen> Ort & Tag: 'heute'",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"ort": "Köln", "n": [1, 2.5]}}}],
}


def both(source: str, tmp_path: Path) -> tuple[ChatTemplate, Any]:
    """Return the template as ours and as a transformers tokenizer."""
    file = tmp_path / "tokenizer.json"
    tokenizer = tiny.small_tokenizer()
    tokenizer.add_special_tokens([BOS, EOS, "<|im_end|>"])
    tokenizer.save(str(file))
    theirs = tiny.transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=source
    )
    return ChatTemplate(source, load_tokenizer(file), BOS, EOS), theirs


def assert_same(source: str, tmp_path: Path, messages: list[Any], **options: Any) -> None:
    ours, theirs = both(source, tmp_path)
    before = json.dumps(messages)
    options = {"add_generation_prompt": True, **options}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.render_text(messages, **options) == expected
    assert json.dumps(messages) == before


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(("name", "chat"), PAIRS)
def test_same_text(name: str, chat: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    source, messages = TEMPLATES[name], CHATS[chat]
    assert_same(source, tmp_path, messages, add_generation_prompt=add_generation_prompt)


def test_same_refusal(tmp_path: Path) -> None:
    ours, theirs = both(MISTRAL, tmp_path)
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        theirs.apply_chat_template([SYSTEM, USER], tokenize=False)
    with pytest.raises(ValueError, match="roles must alternate"):
        ours.render_text([SYSTEM, USER])


@pytest.mark.parametrize("name", ["chatml", "llama3", "phi3"])
def test_continued_answer(name: str, tmp_path: Path) -> None:
    messages = TURNS[:2]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert_same(TEMPLATES[name], tmp_path, messages, **options)


def test_tools(tmp_path: Path) -> None:
    assert_same(QWEN, tmp_path, [USER, CALL, *TURNS[1:]], tools=TOOLS)


@pytest.mark.parametrize("chat", list(CHATS))
def test_smollm2s_own_template(chat: str, tmp_path: Path) -> None:
    try:
        path = find_model("smollm2", stores(), 0).path
    except ValueError as error:
        pytest.skip(str(error))
    source = load_checkpoint(path).chat_template
    assert source is not None
    assert_same(source, tmp_path, CHATS[chat])
