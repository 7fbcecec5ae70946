"""What routes with OpenAI's errors refuse: a row for each body, with the field and the words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_llm import HELLO
from tests.engine.test_structured import PERSON
from tests.serve.serving import Served

CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    COMPLETE: {"prompt": "hello", "max_tokens": 4},
    EMBED: {"input": "a"},
}
Rows = list[tuple[dict[str, Any], str, str]]
NO_NUMBER: Any = [True, "5", [], {}, float("nan")]
PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
FORM = "response_format.json_schema"


def schema(schema: Any = PERSON, **more: Any) -> dict[str, Any]:
    """A form that an answer must have, as OpenAI asks for it."""
    described = {"name": "person", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, **more}}]}


# Each row: what the body has, the field at fault, and what the message says: all of it behind the
# field's name, or how it begins where "..." stands at its end.
OF_BOTH: Rows = [
    ({"temperature": 2.1}, "temperature", "is 2.1: it must be less than or equal to 2"),
    ({"temperature": -0.1}, "temperature", "is -0.1: it must be greater than or equal to 0"),
    ({"top_p": 1.1}, "top_p", "is 1.1: it must be less than or equal to 1"),
    ({"n": 0}, "n", "is 0: it must be greater than or equal to 1"),
    ({"n": 129}, "n", "is 129: it must be less than or equal to 128"),
    ({"n": 10**30}, "n", "is wrong: it must be less than or equal to 128"),
    ({"n": 1.0}, "n", "is 1.0: it must be a valid integer"),
    ({"stop": ["a"] * 65}, "stop", "asks for 65: this server allows at most 64"),
    ({"stop": ""}, "stop", "must be one or more non-empty strings, not ''"),
    ({"stop": [7]}, "stop[0]", "is 7: it must be a valid string"),
    ({"stop": "a" * 1025}, "stop", "is wrong: it must have at most 1024 characters"),
    ({"stop": ["a", "b" * 1025]}, "stop[1]", "is wrong: it must have at most 1024 characters"),
    ({"seed": 1 << 63}, "seed", "is wrong: it must be less than 9223372036854775808"),
    ({"presence_penalty": 3}, "presence_penalty", "is 3: it must be less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "is -3: it must be greater than or equal ..."),
    ({"logit_bias": {"7": 101}}, "logit_bias.7", "is wrong: it must be a number from -100 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "is wrong: it has the key 'x': keys are token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "is wrong: it has the key '-1': keys are token ids"),
    ({"logit_bias": {"bad1": 50, "bad2": 2, "ok": 0}}, "logit_bias",
     "is wrong: it has the key 'bad1', 'bad2': keys are token ids"),
    ({"logit_bias": {"foo": False}}, "logit_bias", "is wrong: it has the key 'foo': keys are ..."),
    ({"logit_bias": {"410": 1}}, "logit_bias", "names token 410: ids end at 409"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is wrong: it has the key '9999..."),
    ({"stop_token_ids": [410]}, "stop_token_ids", "names token 410: ids end at 409"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "is -1: it must be from 0 to 2147483648"),
    ({"max_tokens": -2}, "max_tokens", "is -2: it must be greater than or equal to -1"),
    ({"max_tokens": 1 << 63}, "max_tokens", "is wrong: it must be less than 9223372036854775808"),
    ({"max_tokens": "secret"}, "max_tokens", "is wrong: it must be a valid integer"),
    ({"min_tokens": 5}, "min_tokens", "is 5: over max_tokens 4"),
    ({"min_tokens": 1 << 40}, "min_tokens", f"is {1 << 40}: it must be from 0 ..."),
    ({"top_k": -2}, "top_k", "is -2: it must be greater than or equal to -1"),
    ({"min_p": 2}, "min_p", "is 2: it must be less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "is 0: it must be greater than 0"),
    ({"repetition_penalty": 0.001}, "repetition_penalty", "is 0.001: it must be from 0.01 to ..."),
    ({"metadata": {"a": 1}}, "metadata.a", "is 1: it must be a valid string"),
    ({"user": ["secret"]}, "user", "is wrong: it must be a valid string"),
    *[({name: value}, name, f"is {'true' if value is True else 'wrong'}: it must be a ...")
      for name in ("temperature", "n", "top_k") for value in NO_NUMBER],
    # Samplers of others.
    ({"typical_p": 1.1}, "typical_p", "is 1.1: it must be less than or equal to 1"),
    ({"typical_p": -0.1}, "typical_p", "is -0.1: it must be greater than or equal to 0"),
    ({"typical_p": "1"}, "typical_p", "is wrong: it must be a valid number"),
    ({"top_n_sigma": -2}, "top_n_sigma", "is -2: it must be greater than or equal to -1"),
    ({"top_n_sigma": 101}, "top_n_sigma", "is 101: it must be less than or equal to 100"),
    ({"xtc_probability": 2}, "xtc_probability", "is 2: it must be less than or equal to 1"),
    ({"xtc_probability": True}, "xtc_probability", "is true: it must be a valid number"),
    ({"xtc_threshold": -1}, "xtc_threshold", "is -1: it must be greater than or equal to 0"),
    ({"dry_multiplier": -1}, "dry_multiplier", "is -1: it must be greater than or equal to 0"),
    ({"dry_multiplier": 1e9}, "dry_multiplier", "is 1000000000.0: it must be less than or ..."),
    ({"dry_base": 0.5}, "dry_base", "is 0.5: it must be greater than or equal to 1"),
    ({"dry_allowed_length": 0}, "dry_allowed_length", "is 0: it must be greater than or equal ..."),
    ({"dry_allowed_length": 2.0}, "dry_allowed_length", "is 2.0: it must be a valid integer"),
    ({"dry_allowed_length": 1025}, "dry_allowed_length", "is 1025: it must be less than or ..."),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n", "is -2: it must be greater than or ..."),
    ({"dry_penalty_last_n": 1 << 31}, "dry_penalty_last_n", "is 2147483648: it must be less ..."),
    ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers", "is wrong: it must be a valid list"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]", "is wrong: it must have at ..."),
    ({"dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers",
     "is wrong: it must have at most 64 items, not 65"),
    ({"dry_sequence_breakers": [1]}, "dry_sequence_breakers[0]", "is 1: it must be a valid string"),
    ({"dry_sequence_breakers": ["a" * 257]}, "dry_sequence_breakers[0]",
     "is wrong: it must have at most 256 characters"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "is wrong: it must have at least 1 item, ..."),
    ({"allowed_token_ids": [410]}, "allowed_token_ids", "names token 410: ids end at 409"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "is -1: it must be from 0 to 2147483648"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]", "is wrong: it must be a valid integer"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "is 5: it must be a valid list"),
    ({"bad_words": "word"}, "bad_words", "is wrong: it must be a valid list"),
    ({"bad_words": [""]}, "bad_words[0]", "is wrong: it must have at least 1 character"),
    ({"bad_words": ["a" * 257]}, "bad_words[0]", "is wrong: it must have at most 256 characters"),
    ({"bad_words": ["a"] * 1025}, "bad_words", "is wrong: it must have at most 1024 items, ..."),
    ({"bad_words": [["a"]]}, "bad_words[0]", "is wrong: it must be a valid string"),
    ({"mirostat": 2}, "mirostat",
     "is not supported: a draw must not depend on earlier ones: use top_n_sigma or min_p"),
    ({"mirostat": True}, "mirostat",
     "is not supported: a draw must not depend on earlier ones: use top_n_sigma or min_p"),
    ({"dynatemp_range": 0.5}, "dynatemp_range", "is not supported: use temperature with min_p ..."),
    ({"adaptive_target": 0.5}, "adaptive_target",
     "is not supported: a draw must not depend on earlier ones: use xtc_probability"),
    ({"smoothing_factor": 0.2}, "smoothing_factor", "is not supported: use temperature with ..."),
    ({"logits_processors": ["x"]}, "logits_processors",
     "is not supported: no code runs per request: "
     "use logit_bias, allowed_token_ids, bad_words or structured_outputs"),
    # Forms.
    ({"response_format": {"type": "xml"}}, "response_format.type", "is wrong: it must be ..."),
    ({"response_format": {}}, "response_format.type", "is wrong: it must be text, json_object ..."),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema",
     "is wrong: it must be a JSON schema"),
    ({"response_format": {"type": "json_schema"}}, FORM, "is wrong: it must be an object with ..."),
    (schema(strict="yes"), f"{FORM}.strict", "is wrong: it must be true or false"),
    (schema("text"), f"{FORM}.schema", "is wrong: it must be a JSON schema"),
    (schema(other=1), f"{FORM}.other", "is wrong: it is not one of name, description, schema, ..."),
    (schema({}, name=5), f"{FORM}.name", "is wrong: it must be text"),
    (schema({"not": {}}), f"{FORM}.schema", "cannot be used: Unsatisfiable schema: no value ..."),
    (schema({"type": "integer", "minimum": 2, "maximum": 1}), f"{FORM}.schema",
     "cannot be used: Unsatisfiable schema: no value fits it"),
    ({"structured_outputs": {}}, "structured_outputs", "is wrong: structured_outputs sets ..."),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "cannot be used: at ..."),
    ({"structured_outputs": {"choice": []}}, "structured_outputs",
     "is wrong: structured_outputs.choice must have texts, none of them empty"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs",
     "is wrong: structured_outputs sets json and regex: it must set one of json, json_object, ..."),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag",
     "is wrong: it is not one of json, json_object, regex, choice, grammar, ..."),
    ({"guided_regex": "("}, "guided_regex", 'cannot be used: at 1(8): invalid regex "(" (in ...'),
    ({"grammar": "root ::= nothing"}, "grammar", "cannot be used: Rule 'nothing' not found"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice",
     "is wrong: guided_regex already asks for another form: leave one of them out"),
    ({"guided_grammar": 'start: "b"', "structured_outputs": {"grammar": 'start: "a"'}},
     "guided_grammar", "is wrong: structured_outputs.grammar already asks for another form: ..."),
    (schema() | {"guided_regex": "a"}, "guided_regex", f"is wrong: {FORM}.schema already ..."),
    (schema() | {"ignore_eos": True}, "ignore_eos", "contradicts structured_outputs, which ..."),
    (schema() | {"min_tokens": 3}, "min_tokens", "contradicts structured_outputs, which says ..."),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "cannot be used: the grammar has 70000 ..."),
    # Beams.
    *[({"use_beam_search": True, name: value}, name, f"is {said}: use_beam_search excludes it")
      for name, value, said in (
          ("temperature", 0.7, "0.7"), ("top_k", 4, "4"), ("top_p", 0.9, "0.9"),
          ("min_p", 0.1, "0.1"), ("typical_p", 0.5, "0.5"), ("repetition_penalty", 1.1, "1.1"),
          ("presence_penalty", 0.5, "0.5"), ("frequency_penalty", 0.5, "0.5"),
          ("logit_bias", {"3": 1}, "{3: 1.0}"), ("stop", "x", "('x',)"),
          ("bad_words", ["x"], "('x',)"))],
    ({"use_beam_search": True, "stream": True}, "stream",
     "is not possible: use_beam_search chooses among complete answers"),
    ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping", 'is "always": ...'),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "is 11: it must be ..."),
    ({"use_beam_search": True, "best_of": 0}, "best_of", "is 0: it must be from 1 to 1024"),
]  # fmt: skip
OF_CHATS: Rows = [
    ({"messages": []}, "messages", "is wrong: it must have at least 1 item, not 0"),
    ({"messages": "hi"}, "messages", "is wrong: it must be a valid list"),
    ({"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role", 'is "cat": it must ...'),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content must be a string or a ..."),
    ({"messages": [{"role": "user", "content": None}, *HELLO]}, "messages",
     "messages[0].content must be a string or a list of text parts"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "is 7: it must be ..."),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0].type",
     "is not supported: this model reads only text, so send what matters as text"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages", "has 100058 ..."),
    ({"messages": [{"role": "user", "content": "x " * 200}]}, "messages",
     "this model takes 128 tokens, prompt and answer together, but messages has 415: leave ..."),
    ({"messages": [{"role": "assistant", "content": "x", "prefix": True}, *HELLO]},
     "messages[0].prefix", "is not supported: send continue_final_message"),
    ({"top_logprobs": 2}, "top_logprobs", "contradicts the rest: it needs logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21: it must be less than or ..."),
    ({"max_completion_tokens": 5}, "max_tokens", "contradicts the rest: max_completion_tokens ..."),
    ({"max_tokens": None, "max_completion_tokens": -2}, "max_completion_tokens", "is -2: it ..."),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt",
     "contradicts the rest: continue_final_message excludes it"),
    ({"modalities": ["text", "audio"]}, "modalities", "is not supported: this model reads and ..."),
    ({"modalities": ["audio"]}, "modalities", "is not supported: this model reads and writes ..."),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages",
     "contradicts the rest: it has another place"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "contradicts the ..."),
    ({"chat_template": "{% for"}, "messages", "the chat template fails: unexpected 'end of ..."),
    ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "messages",
     "the chat template fails: Range too big. The sandbox blocks ranges larger than MAX_RANGE ..."),
    ({"format": "xml"}, "format", "is wrong: it must be json, or a JSON schema"),
    ({"lora_path": "x"}, "lora_path", "is not supported: name an adapter as the model"),
    ({"top_a": 0.1}, "top_a", "is not supported: use min_p"),
    ({"n_probs": 5}, "n_probs", "is not supported: use logprobs and top_logprobs"),
    ({"post_sampling_probs": True}, "post_sampling_probs", "is not supported: ask /completion"),
    ({"length_penalty": 2.0}, "length_penalty", "is 2.0: it needs use_beam_search"),
    ({"early_stopping": True}, "early_stopping", "is True: it needs use_beam_search"),
    # Tools.
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": tool("add")["tools"] * 2}, "tools[1].function.name", "is wrong: 'add' is there ..."),
    ({"tools": tool("add")["tools"] * 1025}, "tools", "is wrong: it must have at most 1024 ..."),
    (tool("a b"), "tools[0].function.name",
     "is \"a b\": it must match pattern '^[A-Za-z0-9_-]{1,128}$'"),
    (tool("a" * 129), "tools[0].function.name", "is wrong: it must match pattern ..."),
    (tool("secret " * 20), "tools[0].function.name",
     "is wrong: it must match pattern '^[A-Za-z0-9_-]{1,128}$'"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "is not supported: no ..."),
    ({"tool_choice": "required"}, "tool_choice", "is wrong: it requires a call, but there are ..."),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "is wrong: it requires a call, ..."),
    (tool("f") | {"tool_choice": "must"}, "tool_choice", "is wrong: it must be one of none, ..."),
    (tool("f") | {"tool_choice": {"type": "function"}}, "tool_choice", "is wrong: an object ..."),
    (tool("f") | {"tool_choice": {"type": "function", "function": {"name": "no"}}},
     "tool_choice.function.name", "is wrong: there is no tool 'no'"),
    (tool("f") | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "x", "tools": []}}}, "tool_choice.allowed_tools.mode", "is wrong: it must be ..."),
    (tool("f") | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function"}]}}}, "tool_choice.allowed_tools.tools",
     "is wrong: there is no tool {'type': 'function'}"),
    ({"functions": [{"name": "a"}]}, "functions", "is not supported: send them as tools"),
    ({"function_call": {"name": "a"}}, "function_call", "is not supported: send tools and ..."),
    ({"prediction": "text"}, "prediction", "is wrong: it must be a valid dictionary or ..."),
    ({"prediction": {"type": "other", "content": "x"}}, "prediction.type", 'is "other": it ...'),
    ({"prediction": {"type": "content"}}, "prediction.content", "is missing"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
     "prediction.content[0].type", "is not supported: this model reads only text, so send ..."),
    ({"prediction": {"type": "content", "content": "x" * 100_000}}, "prediction.content",
     "has 100000 characters; a prompt for this model (128 tokens) has at most 2304 bytes"),
]  # fmt: skip
OF_COMPLETIONS: Rows = [
    ({"prompt": ""}, "prompt", "is empty: give at least one token"),
    ({"prompt": []}, "prompt", "has 0 prompts: it must have 1 to 2048 (--max-queued-requests)"),
    ({"prompt": [[]]}, "prompt", "is empty: give at least one token"),
    ({"prompt": ["fine", ""]}, "prompt", "is empty: give at least one token"),
    ({"prompt": [410]}, "prompt", "the prompt has token 410, but this model's ids are 0 to 409"),
    ({"prompt": [-1]}, "prompt", "the prompt has token -1, but this model's ids are 0 to 409"),
    ({"prompt": [1 << 70]}, "prompt", f"the prompt has token {1 << 70}, ..."),
    ({"prompt": [True]}, "prompt[0]", "is true: it must be a valid integer"),
    ({"prompt": [1.5]}, "prompt[0]", "is 1.5: it must be a valid integer"),
    ({"prompt": [["a"]]}, "prompt[0][0]", "is wrong: it must be a valid integer"),
    ({"prompt": ["a", 5]}, "prompt[1]", "is 5: it must be a valid string"),
    ({"prompt": None}, "prompt", "is missing"),
    ({"prompt": 7}, "prompt", "is 7: it must be a valid string"),
    ({"prompt": [40] * 200}, "prompt", "this model takes 128 tokens, prompt and answer ..."),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0, which leaves nothing: ..."),
    ({"n_predict": 5}, "max_tokens", "contradicts the rest: max_tokens says something else"),
    ({"logprobs": 6}, "logprobs", "is 6: it must be less than or equal to 5"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "contradicts the rest: a ..."),
    ({"best_of": 129}, "best_of", "is 129: it must be less than or equal to 128"),
    ({"best_of": 2, "n": 3}, "best_of", "is 2: it must be at least n (3)"),
    ({"best_of": 3, "n": 2, "stream": True}, "stream", "is not possible: best_of chooses ..."),
    ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo", "contradicts the rest: ..."),
    ({"suffix": "x"}, "suffix", "cannot be used: this model has no fill-in-the-middle tokens; ..."),
    ({"tools": [{"type": "function"}]}, "tools", "is not supported: send the conversation to ..."),
    ({"tool_choice": "required"}, "tool_choice", "is not supported: nothing is called here"),
    ({"deadline": {"ttft_ms": -1}}, "deadline.ttft_ms", "is -1: it must be greater than 0"),
    ({"deadline": {"total_ms": 0}}, "deadline.total_ms", "is 0: it must be greater than 0"),
    ({"deadline": {"total_ms": "10"}}, "deadline.total_ms", "is wrong: it must be a valid number"),
    ({"deadline": {"total_ms": 1e12}}, "deadline.total_ms",
     "is 1000000000000.0: it must be less than or equal to 86400000"),
    ({"deadline": {}}, "deadline.ttft_ms", "is missing, and total_ms too: give one"),
    ({"deadline": {"total_ms": 5, "length": "short"}}, "deadline.length",
     "is \"short\": it must be 'bound' or 'expected'"),
    # No program of others sends it: a name that is wrong in it is a mistake.
    ({"deadline": {"total_ms": 5, "e2e_ms": 5}}, "deadline.e2e_ms", "is not a parameter here"),
    ({"deadline": {"total_ms": 1e6, "lenght": "bound"}}, "deadline.lenght", "is not a para..."),
    ({"deadline": 5}, "deadline", "is 5: it must be a valid dictionary or instance of Deadline"),
    ({"deadline": {"total_ms": 5000}, "use_beam_search": True, "best_of": 2}, "deadline",
     "contradicts the rest: searches, such as beam search, cannot have a deadline"),
]  # fmt: skip
OF_EMBEDDINGS: Rows = [
    ({"dimensions": 33}, "dimensions", "is 33: this model's vectors have 32, take 1 to that"),
    ({"input": ""}, "input", "has an empty text: give at least one token"),
    ({"input": []}, "input", "has 0 prompts: it must have 1 to 2048 (--max-queued-requests)"),
    ({"input": [[]]}, "input", "has an empty text: give at least one token"),
    ({"input": [[1, 10**6]]}, "input", "the prompt has token 1000000, but this model's ids ..."),
    ({"input": ["a"] * 2049}, "input", "has 2049 prompts: it must have 1 to 2048 (--max-..."),
    ({"input": "a " * 200}, "input",
     "this model takes 128 tokens, but input has a text of 400: send truncate_prompt_tokens: ..."),
    ({"encoding_format": "int8"}, "encoding_format", "is \"int8\": it must be 'float' or 'base64'"),
    ({"embed_dtype": "float16"}, "embed_dtype", "is not supported: send encoding_format"),
    ({"model": "other"}, "model", "there is no model 'other' here: this server has 'tiny'"),
]  # fmt: skip
ELSEWHERE: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/score", {"text_1": ["a"] * 2, "text_2": ["a"] * 4}, "text_1", "has 2 texts: give ..."),
    ("/tokenize", {"prompt": None}, "prompt", "is missing"),
    ("/tokenize", {}, "prompt", "is missing"),
    ("/tokenize", {"prompt": "a", "content": "b"}, "content", "contradicts the rest: prompt ..."),
    ("/apply-template", {"messages": []}, "messages", "is wrong: it must have at least 1 ..."),
    ("/completion", {"prompt": []}, "prompt", "has 0 prompts: it must have 1 to 2048 ..."),
    ("/completion", {"prompt": {}}, "prompt", "is wrong: it must be a valid string"),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["iVBORw0KGgo="]}},
     "prompt", "is wrong: it has multimodal_data, but this model reads only text"),
    ("/completion", {"prompt": ["hello", 1 << 40]}, "prompt",
     f"the prompt has token {1 << 40}, ..."),
    *[("/completion", {"prompt": "a", "logit_bias": pairs}, "logit_bias",
       "is wrong: it must have pairs of a token id, or a text, and a bias")
      for pairs in ([5], [[5, 1, 2]], [[None, 1]])],
    *[("/completion", {"prompt": "a", "logit_bias": [[5, bias]]}, "logit_bias.5",
       "is wrong: write a number, -100 to 100") for bias in ("no", 101)],
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix",
     "/infill needs a model with fill-in-the-middle tokens: this one has none"),
    ("/v1/responses/input_tokens", {"previous_response_id": "a"}, "previous_response_id",
     "is not supported: nothing is stored here, so send all items of the conversation as input"),
    ("/tokenize", {"prompt": None, "messages": []}, "messages", "is wrong: it must ..."),
]  # fmt: skip
ROUTES = [(CHAT, OF_BOTH), (CHAT, OF_CHATS), (COMPLETE, OF_BOTH), (COMPLETE, OF_COMPLETIONS)]
REFUSED = [(path, *row) for path, rows in [*ROUTES, (EMBED, OF_EMBEDDINGS)] for row in rows]
REFUSED += ELSEWHERE


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    REFUSED,
    ids=[f"{path} {param} {words}"[:80] for path, _, param, words in REFUSED],
)
def test_what_is_refused_and_how(
    served: Served, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    error = served.refused_for(param, path, BASES.get(path, {}) | fields)
    said = error["message"].removeprefix(f"{param} ")
    assert said.startswith(words.removesuffix("..."))
    assert said == words or words.endswith("...")
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    if words.startswith("is not supported"):
        assert error["code"] == "unsupported_parameter"
    assert (error["code"] == "model_not_found") == (param == "model")
    assert len(error["message"]) < 600
    assert "\n" not in error["message"]
