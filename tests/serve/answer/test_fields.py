"""Each row of the table of fields, as a server does it: default, and held to the letter."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.protocol import ChatRequest, CompletionRequest
from ridgeline.serve.dialects.llamacpp.infill import InfillRequest
from ridgeline.serve.dialects.ollama.protocol import GenerateRequest, OllamaChatRequest
from ridgeline.serve.dialects.openai.embeddings import EmbeddingsRequest
from ridgeline.serve.dialects.responses.protocol import ResponsesRequest
from ridgeline.serve.http.request_body import DroppedField, RequestModel
from tests.engine.test_llm import HELLO
from tests.serve.conftest import write_coder
from tests.serve.serving import Served, serving

ROOT = Path(__file__).parents[3]
CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TALK, GENERATE, EMBED = "/v1/messages", "/api/chat", "/api/generate", "/v1/embeddings"
WRITE, INFER = "/v2/models/tiny/generate", "/v2/models/tiny/infer"
NAME = {"model": "tiny"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
NO_CALL = {"tool_choice": "none"}  # of tools the prompt has none then
TEXT = {"type": "text", "text": "a"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETE: {"prompt": "a", "max_tokens": 1},
    RESPOND: {"input": "Hello", "max_output_tokens": 1},
    MESSAGES: NAME | {"messages": HELLO, "max_tokens": 1},
    TALK: NAME | {"messages": HELLO, "stream": False, "options": {"num_predict": 1}},
    GENERATE: NAME | {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    EMBED: {"input": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    WRITE: {"text_input": "a", "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's messages with these blocks of the assistant, and their results."""
    results = [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]
    assistant = {"role": "assistant", "content": list(blocks)}
    return {"messages": [*HELLO, assistant, {"role": "user", "content": results}]}


# A table, a route, where its fields stand in the body, and the body around them.
PLACES: list[tuple[str, fields.Table, str, str, Any]] = [
    ("chat", fields.CHAT, CHAT, "", lambda one: one),
    ("completion", fields.COMPLETION, COMPLETE, "", lambda one: one),
    ("infill", fields.INFILL, "/infill", "", lambda one: one),
    ("message", fields.MESSAGE, CHAT, "messages.",
     lambda one: {"messages": [{"role": "user", "content": "a"} | one]}),
    ("part", fields.CONTENT_PART, CHAT, "messages.content.",
     lambda one: {"messages": [{"role": "user", "content": [TEXT | one]}]}),
    ("tool", fields.TOOL, CHAT, "tools.",
     lambda one: NO_CALL | {"tools": [{"type": "function", "function": FUNCTION} | one]}),
    ("function", fields.FUNCTION, CHAT, "tools.function.",
     lambda one: NO_CALL | {"tools": [{"type": "function", "function": FUNCTION | one}]}),
    ("stream options", fields.STREAM_OPTIONS, COMPLETE, "stream_options.",
     lambda one: {"stream": True, "stream_options": one}),
    ("reasoning of chats", fields.REASONING, CHAT, "reasoning.", lambda one: {"reasoning": one}),
    ("thinking of chats", fields.THINKING, CHAT, "thinking.",
     lambda one: {"thinking": {"type": "disabled"} | one}),
    ("tokenize a chat", fields.RENDERING, "/tokenize", "",
     lambda one: {"prompt": None, "messages": HELLO} | one),
    ("responses", fields.RESPONSES, RESPOND, "", lambda one: one),
    ("text part", fields.RESPONSE_PART, RESPOND, "input.content.",
     lambda one: {"input": [{"role": "user", "content": [
         {"type": "input_text", "text": "a"} | one]}]}),
    ("message item", fields.RESPONSE_MESSAGE, RESPOND, "input.",
     lambda one: {"input": [{"role": "user", "content": "a"} | one]}),
    ("call item", fields.RESPONSE_CALL, RESPOND, "input.",
     lambda one: {"input": [{"type": "function_call", "call_id": "a", "name": "f",
                             "arguments": "{}"} | one]}),
    ("output item", fields.RESPONSE_OUTPUT, RESPOND, "input.",
     lambda one: {"input": [
         {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
         {"type": "function_call_output", "call_id": "a", "output": "1"} | one]}),
    ("reasoning item", fields.RESPONSE_REASONING, RESPOND, "input.",
     lambda one: {"input": [{"role": "user", "content": "a"}, {"type": "reasoning"} | one]}),
    ("reasoning", fields.RESPONSE_THINKING, RESPOND, "reasoning.", lambda one: {"reasoning": one}),
    ("text options", fields.RESPONSE_TEXT, RESPOND, "text.", lambda one: {"text": one}),
    ("messages", fields.MESSAGES, MESSAGES, "", lambda one: one),
    ("block", fields.BLOCK, MESSAGES, "messages.content.",
     lambda one: {"messages": [{"role": "user", "content": [TEXT | one]}]}),
    ("tool use", fields.TOOL_USE, MESSAGES, "messages.content.", lambda one: said(USE | one)),
    ("tool result", fields.TOOL_RESULT, MESSAGES, "messages.content.",
     lambda one: {"messages": [*said(USE)["messages"][:-1], {"role": "user", "content": [
         {"type": "tool_result", "tool_use_id": "a"} | one]}]}),
    ("thinking block", fields.THINKING_BLOCK, MESSAGES, "messages.content.",
     lambda one: said({"type": "thinking", "thinking": ""} | one, USE)),
    ("tool of messages", fields.MESSAGES_TOOL, MESSAGES, "tools.",
     lambda one: {"tools": [{"name": "f", "input_schema": {"type": "object"}} | one],
                  "tool_choice": {"type": "none"}}),
    ("thinking", fields.THINKING, MESSAGES, "thinking.",
     lambda one: {"thinking": {"type": "disabled"} | one}),
    ("output config", fields.OUTPUT_CONFIG, MESSAGES, "output_config.",
     lambda one: {"output_config": one}),
    ("ollama", fields.OLLAMA, TALK, "", lambda one: one),
    ("ollama generates", fields.OLLAMA_GENERATE, GENERATE, "", lambda one: one),
    ("ollama options", fields.OLLAMA_OPTIONS, TALK, "options.", lambda one: {"options": one}),
    ("ollama message", fields.OLLAMA_MESSAGE, TALK, "messages.",
     lambda one: {"messages": [{"role": "user", "content": "a"} | one]}),
    ("ollama call", fields.OLLAMA_CALL, TALK, "messages.tool_calls.",
     lambda one: {"messages": [{"role": "assistant", "tool_calls": [
         {"function": {"name": "f", "arguments": {}}} | one]}]}),
    ("ollama show", fields.OLLAMA_SHOW, "/api/show", "", lambda one: NAME | one),
    ("ollama pull", fields.OLLAMA_PULL, "/api/pull", "", lambda one: NAME | one),
    ("ollama embed", fields.OLLAMA_EMBED, "/api/embed", "", lambda one: NAME | {"input": ""} | one),
    ("ollama embedding", fields.OLLAMA_EMBEDDING, "/api/embeddings", "", lambda one: NAME | one),
    ("triton", fields.TRITON, WRITE, "", lambda one: one),
    ("triton's tensor", fields.TRITON_TENSOR, INFER, "inputs.parameters.",
     lambda one: {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1],
                              "data": ["a"], "parameters": one}]}),
    ("vectors", fields.VECTORS, EMBED, "", lambda one: one),
    ("file", fields.TIME_OF_FILE, "/infill", "input_extra.",
     lambda one: {"input_extra": [{"text": "a"} | one]}),
]  # fmt: skip
# Nothing, and bodies that need a folder.
AWAY = ({}, fields.LORA, fields.BATCH, fields.OLLAMA_CREATE)
WANTED = {"any": "thing"}  # is no value of any row that asks for nothing


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(write_coder(tmp_path_factory.mktemp("models") / "coder"), strict=True) as served:
        yield served


@pytest.fixture(scope="module")
def coder(coder_path: Path) -> Iterator[Served]:
    with serving(coder_path) as served:
        yield served


def sent(served: Served, path: str, body: dict[str, Any]) -> tuple[int, str, list[str]]:
    """Return status, the error's words, and what was dropped."""
    status, answer, headers = served.call(path, BASES.get(path, {}) | body)
    named = [one for one in headers.get("x-ridgeline-ignored", "").split(", ") if one]
    return status, "" if status == 200 else str(answer["error"]), named


def nothing(extra: DroppedField) -> list[Any]:
    """The values that ask for nothing."""
    return [*extra.off, *([extra.most_off] if extra.most_off is not None else [])]


@pytest.mark.parametrize(
    ("table", "path", "prefix", "around"), [one[1:] for one in PLACES], ids=[p[0] for p in PLACES]
)
def test_each_row_says_what_becomes_of_its_field(
    coder: Served, strict: Served, table: fields.Table, path: str, prefix: str, around: Any
) -> None:
    assert table
    for name, extra in table.items():
        where = prefix + name
        for value in nothing(extra):
            for served in (coder, strict):
                assert sent(served, path, around({name: value})) == (200, "", []), (where, value)
        status, words, dropped = sent(coder, path, around({name: WANTED}))
        held = sent(strict, path, around({name: WANTED}))
        if extra.fate == "refused":
            assert (status, held[0]) == (400, 400), where
            assert f"{name} is not supported: {extra.why}" in words
        else:
            assert (status, dropped) == (200, [where]), (where, words)
            assert held[0] == (200 if extra.fate == "hint" else 400), (where, held)
        if extra.fate == "lost":
            assert f"{name} is not supported: {extra.why}" in held[1]


def test_every_table_has_a_place() -> None:
    tables = [value for name, value in vars(fields).items() if name.isupper() and name[0] != "_"]
    placed = [id(one[1]) for one in PLACES]
    without = [t for t in tables if id(t) not in placed and t not in AWAY]
    assert without == [fields.SAMPLERS], "parts of others"


@pytest.mark.parametrize("path", [path for path in BASES if path != "/tokenize"])
def test_what_nobody_knows_is_dropped_by_name_and_refused_where_all_must_hold(
    coder: Served, strict: Served, path: str
) -> None:
    assert sent(coder, path, {"temprature": 1}) == (200, "", ["temprature"])
    status, words, _ = sent(strict, path, {"temprature": 1})
    assert (status, "temprature is not a parameter here" in words) == (400, True)
    assert sent(strict, path, {"temprature": None}) == (200, "", [])


def test_what_nobody_knows_in_a_part_has_its_path(coder: Served, strict: Served) -> None:
    messages = {"messages": [{"role": "user", "content": "x", "evil": 1}]}
    for path in (CHAT, MESSAGES, TALK):
        assert sent(coder, path, messages) == (200, "", ["messages.evil"])
        assert "messages[0].evil is not a parameter here" in sent(strict, path, messages)[1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"max_tokens": 32000}, "max_tokens"),
        (COMPLETE, {"max_tokens": 32000}, "max_tokens"),
        (RESPOND, {"max_output_tokens": 32000}, "max_output_tokens"),
        (MESSAGES, {"max_tokens": 32000}, "max_tokens"),
        (TALK, {"options": {"num_predict": 32000}}, "options.num_predict"),
        ("/infill", {"n_predict": 32000}, "n_predict"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (RESPOND, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (TALK, {"think": "low"}, "think"),
        (CHAT, {"repeat_penalty": 1.1}, "repeat_last_n"),
        (TALK, {"options": {"repeat_penalty": 1.1}}, "options.repeat_last_n"),
        (TALK, {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
    ],
)
def test_what_the_model_cannot_do_is_told_and_refused_where_all_must_hold(
    coder: Served, strict: Served, path: str, body: dict[str, Any], param: str
) -> None:
    status, _, headers = coder.call(path, BASES[path] | body)
    told = headers.get("x-ridgeline-ignored") or headers.get("x-ridgeline-capped", "")
    assert (status, told.split(" ")[0]) == (200, param)
    status, words, _ = sent(strict, path, body)
    assert (status, param in words) == (400, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_options_of_a_stream_that_is_none(coder: Served, strict: Served, path: str) -> None:
    wish = {"stream_options": {"include_usage": True}}
    assert sent(coder, path, wish)[::2] == (200, ["stream_options"])
    status, words, _ = sent(strict, path, wish)
    assert (status, "stream_options contradicts the rest: it needs stream" in words) == (400, True)


def test_the_document_is_made_of_the_table() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "fields.py"))["document"]()
    assert (ROOT / "docs" / "fields.md").read_text() == made, "run tools/fields.py > docs/fields.md"


def test_no_row_stands_beside_a_field_that_is_honoured() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "fields.py"))
    for body in (one for bodies in made["BODIES"].values() for one in bodies):
        honoured = body.model_fields.keys() - set(body.absent)
        assert not honoured & (body.extras or {}).keys(), body


def known(*bodies: type[RequestModel]) -> set[str]:
    """The fields that have a row, or that a body honours."""
    return {name for body in bodies for name in (*body.model_fields, *(body.extras or {}))}


@pytest.mark.parametrize(
    ("module", "name", "body"),
    [
        (chat_create_params, "CompletionCreateParamsStreaming", ChatRequest),
        (completion_create_params, "CompletionCreateParamsStreaming", CompletionRequest),
        (response_create_params, "ResponseCreateParamsStreaming", ResponsesRequest),
        (embedding_create_params, "EmbeddingCreateParams", EmbeddingsRequest),
    ],
)
def test_each_field_of_openais_client_is_known(
    module: Any, name: str, body: type[RequestModel]
) -> None:
    assert set(get_type_hints(getattr(module, name))) <= known(body)


# What programs send to servers of these kinds, with values that do no harm.
SENT: dict[str, dict[str, Any]] = {
    "vLLM": {
        "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "guided_json": {"type": "object"},
        "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": 'root ::= "a"',
        "guided_decoding_backend": "auto", "structured_outputs": {"choice": ["a"]},
        "add_generation_prompt": True, "continue_final_message": False,
        "add_special_tokens": False, "documents": [], "chat_template": "{{ 1 }}",
        "chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": {},
        "media_io_kwargs": {}, "request_id": "r", "return_tokens_as_token_ids": True,
        "return_token_ids": True, "cache_salt": "s", "kv_transfer_params": {}, "vllm_xargs": {},
        "allowed_token_ids": [1], "bad_words": ["x"], "min_tokens": 0, "stop_token_ids": [1],
        "ignore_eos": False, "length_penalty": 1.0, "best_of": 1, "use_beam_search": False,
        "prompt_logprobs": 0, "echo": False, "include_reasoning": True, "top_k": 5, "min_p": 0.1,
        "repetition_penalty": 1.1, "thinking_token_budget": 10, "priority": 0,
    },
    "llama.cpp": {
        "cache_prompt": True, "id_slot": -1, "n_predict": 3, "repeat_penalty": 1.1,
        "repeat_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1,
        "typical_p": 1.0, "dynatemp_range": 0, "dynatemp_exponent": 1, "samplers": ["top_k"],
        "timings_per_token": True, "return_progress": True, "reasoning_format": "auto",
        "thinking_forced_open": False, "grammar": 'root ::= "a"',
        "json_schema": {"type": "object"}, "n_keep": 0, "n_discard": 0, "t_max_predict_ms": 0,
        "response_fields": ["content"], "n_probs": 0, "min_keep": 0, "post_sampling_probs": False,
        "return_tokens": True, "lora": [], "xtc_probability": 0, "xtc_threshold": 0.1,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n"], "parse_tool_calls": True, "backend_sampling": False,
        "chat_template_kwargs": {}, "max_tokens": -1,
    },
    "LM Studio, Ollama": {
        "ttl": 300, "draft_model": "x", "keep_alive": "5m", "options": {"num_ctx": 2048},
        "format": "json", "think": False, "context_length": 2048, "num_ctx": 2048,
        "context_overflow_policy": "stopAtLimit",
    },
    "SGLang, TGI, OpenRouter": {
        "regex": "a+", "ebnf": 'root ::= "a"', "separate_reasoning": True,
        "stream_reasoning": True, "rid": "x", "session_params": {}, "do_sample": True, "seed": 1,
        "transforms": [], "models": ["tiny"], "route": "fallback", "provider": {"order": ["x"]},
        "usage": {"include": True}, "plugins": [], "reasoning": {"effort": "low"}, "user_id": "x",
        "chat_id": "x", "enable_thinking": False, "thinking": {"type": "disabled"},
        "top_n_sigma": 1.0, "guidance_scale": 1, "extra_body": {}, "no_stop_trim": True,
        "truncate_prompt_tokens": 10,
    },
    "OpenAI": {
        "store": False, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto",
        "parallel_tool_calls": True, "reasoning_effort": "low", "verbosity": "low",
        "modalities": ["text"], "prediction": {"type": "content", "content": "a"},
        "safety_identifier": "x", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "web_search_options": {}, "audio": None, "functions": [], "function_call": "none",
        "logit_bias": {"1": 1}, "n": 1, "stop": ["x"], "temperature": 1, "top_p": 1,
    },
}  # fmt: skip
# What is asked of these cannot be done, and the answer would be another one.


@pytest.mark.parametrize("whose", SENT)
def test_what_programs_send_to_other_servers_is_taken(coder: Served, whose: str) -> None:
    for name, value in SENT[whose].items():
        body = {"messages": HELLO, "max_tokens": 2} | {name: value}
        if name == "n_predict":
            del body["max_tokens"]
        status, answer, _ = coder.call(CHAT, body)
        assert status == 200, (name, answer)


def test_no_other_body_is_forgotten() -> None:
    """Each of these has a table, so that none refuses what it does not know."""
    for body in (InfillRequest, OllamaChatRequest, GenerateRequest, ChatRequest, CompletionRequest):
        assert body.extras is not None
