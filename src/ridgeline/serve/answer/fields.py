"""What becomes of the fields that clients send and no body here has: one table for all APIs.

The bodies read it (``http.request_body``), and docs/fields.md is made of both. Fields that are
honoured stand in the bodies themselves. What no row names is "lost": dropped by name, and refused
under ``--strict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from ridgeline.serve.http.request_body import DroppedField

Table = dict[str, DroppedField]


def _rows(
    fate: Literal["hint", "lost", "refused"],
    of: str,
    names: str,
    why: str,
    *off: Any,
    most_off: float | None = None,
) -> Table:
    return dict.fromkeys(names.split(), DroppedField(fate, why, of, off, most_off))


_ignore, _drop, _refuse = (partial(_rows, fate) for fate in ("hint", "lost", "refused"))

_CACHED = "prefixes are cached without being asked"
_MACHINE = "the server decides how the model runs"
_ONE_MODEL = "the model that is named answers"
_NEVER_CUT = "a prompt is never cut: shorten it yourself"
_NO_TOOLS = "no tools run on this server"
_ONLY_TEXT = "this model reads and writes only text, so send what matters as text"
_SEND_ALL = "nothing is stored here, so send all items of the conversation as input"
_NO_MIROSTAT = "a draw must not depend on earlier ones: use top_n_sigma or min_p"
_NO_DYNATEMP = "use temperature with min_p or top_n_sigma"
_NO_ADAPTIVE = "a draw must not depend on earlier ones: use xtc_probability"

# Samplers that we do not have. A field that only tunes one of them changes nothing.
SAMPLERS: Table = {
    **_refuse("llama.cpp", "mirostat", _NO_MIROSTAT, most_off=0),
    **_ignore("llama.cpp", "mirostat_tau mirostat_eta", "they only tune mirostat"),
    **_refuse("llama.cpp", "dynatemp_range", _NO_DYNATEMP, most_off=0),
    **_ignore("llama.cpp", "dynatemp_exponent", "it only tunes dynatemp_range"),
    **_refuse("llama.cpp", "adaptive_target", _NO_ADAPTIVE, most_off=-1e-9),
    **_ignore("llama.cpp", "adaptive_decay", "it only tunes adaptive_target"),
    **_refuse("llama.cpp", "tfs_z", "use min_p or typical_p", 1, 1.0),
    **_refuse("others", "smoothing_factor", _NO_DYNATEMP, most_off=0),
    **_refuse("OpenRouter", "top_a", "use min_p", most_off=0),
    **_refuse("TGI", "watermark guidance_scale", "leave it out", False, 1, 1.0),
    **_refuse(
        "vLLM",
        "logits_processors custom_logit_processor",
        "no code runs per request: "
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
        [],
    ),
}

_OPENAI: Table = {
    **_ignore("OpenAI", "audio", "it only says how speech sounds, and the answer is text"),
    **_refuse("OpenAI", "modalities", _ONLY_TEXT, ["text"]),
    **_refuse("OpenAI", "functions", "send them as tools", []),
    **_refuse("OpenAI", "function_call", "send tools and tool_choice", "none", "auto"),
    **_drop("OpenAI", "moderation", "nothing is moderated here"),
    **_drop("OpenAI", "priority", "requests are served in fair order", 0),
    **_ignore("OpenAI", "prompt_cache_retention prompt_cache_options", _CACHED),
    **_drop("OpenAI", "service_tier", "there is one tier", "auto", "default"),
    **_drop("OpenAI", "store", "nothing is stored here, so keep the answer yourself", False),
    **_drop("OpenAI", "verbosity", "no model here knows it: ask for it in words", "medium"),
    **_drop("OpenAI", "web_search_options", _NO_TOOLS),
}
_VLLM: Table = {
    **_ignore("vLLM", "spaces_between_special_tokens", "special tokens are no text of an answer"),
    **_refuse("vLLM", "documents", "put them into a message", []),
    **_ignore("vLLM", "mm_processor_kwargs media_io_kwargs", "there is nothing but text"),
    **_ignore("vLLM", "request_id", "send the header x-request-id"),
    **_ignore("vLLM", "guided_decoding_backend", _MACHINE),
    **_ignore("vLLM", "kv_transfer_params data_parallel_rank", _MACHINE),
    **_drop("vLLM", "vllm_xargs", "nothing here reads them", {}),
    **_drop("vLLM", "response_role", "answers are the assistant's", "assistant"),
    **_drop("vLLM", "thinking_token_budget", "how long a model thinks is not limited"),
    **_drop("vLLM", "structural_tag", "send structured_outputs"),
    **_drop("vLLM", "repetition_detection", "use repetition_penalty or dry_multiplier"),
}
_LLAMA_CPP: Table = {
    **_ignore("llama.cpp", "cache_prompt id_slot n_keep n_cache_reuse", _CACHED),
    **_ignore("llama.cpp", "n_discard t_max_prompt_ms backend_sampling", _MACHINE),
    **_ignore(
        "llama.cpp", "thinking_forced_open chat_format preserved_tokens", "the template says"
    ),
    **_refuse("llama.cpp", "grammar_lazy", "send tools", False),
    **_ignore("llama.cpp", "grammar_triggers", "they only tune grammar_lazy"),
    **_refuse("llama.cpp", "reasoning_format", "set --reasoning-parser none", "auto", "deepseek"),
    **_drop("llama.cpp", "t_max_predict_ms", "use deadline, or max_tokens", most_off=0),
    **_drop("llama.cpp", "response_fields", "the whole answer comes"),
    **_refuse("llama.cpp", "n_probs", "use logprobs and top_logprobs", most_off=0),
    **_refuse("llama.cpp", "min_keep", "a sampler always leaves one token", most_off=1),
    **_refuse("llama.cpp", "post_sampling_probs", "ask /completion", False),
    **_drop("llama.cpp", "return_tokens", "use return_token_ids", False),
    **_refuse("llama.cpp", "lora", "name an adapter as the model", []),
    **_drop("llama.cpp", "parse_tool_calls", "calls are always read", True),
    **_drop("llama.cpp", "reasoning_budget", "how long a model thinks is not limited", -1),
}
_OTHERS: Table = {
    **_ignore("LM Studio", "ttl draft_model context_length", _MACHINE),
    **_ignore("LM Studio", "context_overflow_policy", "no prompt is cut, and no answer goes on"),
    **_ignore("Ollama", "keep_alive num_ctx num_gpu num_thread", _MACHINE),
    **_drop("Ollama", "options", "send each by its own name, or ask /api/chat"),
    **_refuse("SGLang", "separate_reasoning", "reasoning_content has it", True),
    **_ignore("SGLang", "stream_reasoning", "it comes as it is made"),
    **_ignore("SGLang", "rid", "send the header x-request-id"),
    **_refuse("SGLang", "lora_path", "name an adapter as the model"),
    **_drop("SGLang", "session_params", "no sessions are kept", {}),
    **_refuse("SGLang", "return_hidden_states", "they are not shown", False),
    **_refuse("SGLang", "stop_regex", "use stop"),
    **_refuse("TGI", "do_sample", "set temperature to 0", True),
    **_refuse("TGI", "truncate", _NEVER_CUT),
    **_refuse("TGI", "adapter_id", "name an adapter as the model"),
    **_drop("TGI", "details decoder_input_details", "use logprobs", False),
    **_ignore("OpenRouter", "transforms", "no prompt is cut"),
    **_ignore("OpenRouter", "models route provider", _ONE_MODEL),
    **_drop("OpenRouter", "plugins", _NO_TOOLS, []),
    **_ignore("OpenRouter", "usage", "it stands in each answer: for streams send stream_options"),
    **_ignore("Open WebUI", "user_id chat_id session_id", "send user"),
    **_ignore("litellm", "extra_body", "its fields belong into the body itself"),
}
COMPLETION: Table = {
    **SAMPLERS,
    **_OPENAI,
    **_VLLM,
    **_LLAMA_CPP,
    **_OTHERS,
    **_ignore("OpenAI", "parallel_tool_calls", "nothing is called here", True, False),
    **_refuse("OpenAI", "tools", "send the conversation to /v1/chat/completions", []),
    **_refuse("OpenAI", "tool_choice", "nothing is called here", "none", "auto"),
    **_drop("OpenAI", "prediction", "send the conversation to /v1/chat/completions"),
    **_drop(
        "OpenAI",
        "reasoning_effort",
        "a plain prompt has no reasoning switch: write it into the prompt",
        "none",
    ),
    **_refuse("vLLM", "add_special_tokens", "send token ids", True),
}
CHAT: Table = {
    **SAMPLERS,
    **_OPENAI,
    **_VLLM,
    **_LLAMA_CPP,
    **_OTHERS,
    **_refuse("vLLM", "add_special_tokens", "the template has them all", False),
}
_OF_INFILL = (  # its own
    *("id_slot", "n_probs", "post_sampling_probs", "response_fields", "return_tokens"),
    "t_max_predict_ms",
)
INFILL: Table = {
    **_refuse("vLLM", "truncate_prompt_tokens", _NEVER_CUT),
    **{name: extra for name, extra in COMPLETION.items() if name not in _OF_INFILL},
    **_ignore(
        "llama.cpp", "echo suffix include_timings stream_options verbose", "the answer has its form"
    ),
    **_refuse("OpenAI", "n", "the answer is one", 1),
    **_refuse("OpenAI", "logprobs", "ask /v1/completions, which has a suffix"),
    **_drop("OpenAI", "max_tokens", "send n_predict"),
}

TRITON: Table = {
    **COMPLETION,
    **_ignore("OpenAI", "model", "the path names it"),
    **_ignore("OpenAI", "prompt", "send text_input"),
    **_ignore("OpenAI", "stream_options", "the answer has its form"),
    **_ignore("vLLM", "include_timings return_token_ids return_tokens_as_token_ids", "ask /v1"),
    **_ignore("llama.cpp", "return_progress timings_per_token verbose", "ask /v1"),
    **_drop("OpenAI", "logprobs", "ask /v1/completions"),
    **_drop("vLLM", "prompt_logprobs", "ask /v1/completions"),
    **_drop("OpenAI", "echo", "send exclude_input_in_output: false", False),
    **_refuse("Triton", "image", _ONLY_TEXT, ""),
    **_refuse("Triton", "sequence_id", "no request follows another: send the whole text", 0, ""),
    **_ignore("Triton", "sequence_start sequence_end", "no request follows another"),
    **_drop("Triton", "priority", "requests are served in fair order", 0),
    **_drop("Triton", "timeout", "end the request yourself, or send deadline", 0),
    **_drop("Triton", "return_cumulative_logprob", "ask /v1/completions", False),
    **_refuse("Triton", "stop_words", "send stop", "", []),
    **_ignore("Triton", "triton_enable_empty_final_response", "over gRPC it is honoured"),
}
TRITON_TENSOR: Table = {
    **_refuse(
        "Triton",
        "shared_memory_region shared_memory_byte_size shared_memory_offset",
        "no memory is shared with clients: send the data",
    ),
    **_refuse("Triton", "classification", "there are no classes", 0),
}

# Parts of conversations.
CONTENT_PART: Table = _ignore("Anthropic", "cache_control", _CACHED)
MESSAGE: Table = {
    **_ignore("OpenAI", "annotations audio refusal parsed", "they came with an answer"),
    **_ignore("litellm", "thinking_blocks provider_specific_fields", "reasoning_content has it"),
    **_ignore("Anthropic", "cache_control", _CACHED),
    **_refuse("DeepSeek", "prefix", "send continue_final_message", False),
}
TOOL: Table = _ignore("Anthropic", "cache_control", _CACHED)
FUNCTION: Table = _ignore("OpenAI", "defer_loading output_schema", "all tools are shown")
RENDERING: Table = _refuse("vLLM", "add_special_tokens", "the template has them all", False)
STREAM_OPTIONS: Table = _ignore("OpenAI", "include_obfuscation", "nothing is padded", False)

RESPONSES: Table = {
    **_refuse(
        "OpenAI", "background", "nothing is stored here, so use stream, and stay connected", False
    ),
    **_ignore("OpenAI", "client_metadata", "it says who asks"),
    **_drop("OpenAI", "context_management", "shorten the input yourself", []),
    **_refuse("OpenAI", "conversation previous_response_id", _SEND_ALL),
    **_ignore("OpenAI", "max_tool_calls", "it limits tools that a server runs, and here are none"),
    **_refuse("OpenAI", "prompt", "no prompts are stored here, so send instructions and input"),
    **_ignore("OpenAI", "prompt_cache_retention prompt_cache_options", _CACHED),
    **_drop("OpenAI", "service_tier", "there is one tier", "auto", "default"),
    **_drop("OpenAI", "store", "nothing is stored here, so keep the response yourself", False),
    **_drop("OpenAI", "truncation", _NEVER_CUT, "disabled"),
    **_ignore("OpenAI", "stream_options", "it only asks for padding"),
    **_drop("OpenAI", "moderation", "nothing is moderated here"),
    **_drop("OpenAI", "image", _ONLY_TEXT),
    **_ignore("OpenAI", "access_programs", "who may ask is the server's to say"),
}
_ITEM = _ignore("OpenAI", "id status", "they came with an answer")
RESPONSE_PART: Table = _ignore("OpenAI", "annotations logprobs", "they came with an answer")
RESPONSE_MESSAGE: Table = _ITEM | _ignore("OpenAI", "phase", "it came with an answer")
RESPONSE_CALL: Table = _ITEM | _ignore("OpenAI", "namespace", "functions have one")
RESPONSE_OUTPUT: Table = _ITEM | _ignore("OpenAI", "name", "call_id says which call")
RESPONSE_REASONING: Table = {
    **_ITEM,
    **_ignore("OpenAI", "summary", "content has the text itself"),
    **_drop("OpenAI", "encrypted_content", "it cannot be read here, so send content"),
}
RESPONSE_THINKING: Table = _ignore(
    "OpenAI", "summary generate_summary context", "reasoning is shown whole"
)
RESPONSE_TEXT: Table = _drop(
    "OpenAI", "verbosity", "no model here knows it: ask for it in words", "medium"
)

MESSAGES: Table = {
    **_ignore("Anthropic", "cache_control diagnostics", _CACHED),
    **_ignore("Anthropic", "service_tier speed inference_geo", _MACHINE),
    **_ignore("Anthropic", "user_profile_id workspace_id", "send metadata.user_id"),
    **_drop("Anthropic", "container mcp_servers", _NO_TOOLS, []),
    **_drop("Anthropic", "context_management", "shorten the conversation yourself", {"edits": []}),
}
BLOCK: Table = _ignore("Anthropic", "cache_control citations", _CACHED)
TOOL_USE: Table = _ignore("Anthropic", "cache_control caller", _CACHED)
TOOL_RESULT: Table = {
    **_ignore("Anthropic", "cache_control", _CACHED),
    **_ignore("Anthropic", "is_error", "its text says so"),
}
THINKING_BLOCK: Table = _ignore("Anthropic", "signature", "nothing is signed here")
MESSAGES_TOOL: Table = {
    **_ignore("Anthropic", "cache_control eager_input_streaming", _CACHED),
    **_drop("Anthropic", "allowed_callers", "the client calls", ["direct"]),
    **_drop("Anthropic", "defer_loading", "all tools are shown", False),
    **_drop("Anthropic", "input_examples", "put them into the description", []),
}
THINKING: Table = _ignore("Anthropic", "budget_tokens display", "reasoning is shown whole")
REASONING: Table = _ignore("OpenRouter", "max_tokens exclude summary", "reasoning is shown whole")
OUTPUT_CONFIG: Table = _drop("Anthropic", "task_budget", "use max_tokens")

OLLAMA: Table = {
    **_ignore("Ollama", "shift truncate", "no prompt is cut, and no answer goes on"),
}
OLLAMA_GENERATE: Table = {
    **OLLAMA,
    **_refuse("Ollama", "context", "send the conversation to /api/chat", []),
    **_refuse("Ollama", "images", _ONLY_TEXT, []),
    **_refuse("Ollama", "template", "the model's own is used, or none with raw: true", ""),
}
OLLAMA_OPTIONS: Table = {
    **SAMPLERS,
    **_ignore(
        "Ollama",
        "draft_num_predict f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep "
        "num_thread numa penalize_newline use_mlock use_mmap vocab_only",
        _MACHINE,
    ),
}
OLLAMA_MESSAGE: Table = _refuse("Ollama", "images", _ONLY_TEXT, [])
OLLAMA_CALL: Table = _ignore("Ollama", "type index description", "a call is its name and arguments")
OLLAMA_SHOW: Table = _ignore("Ollama", "verbose system template options", "all is shown")
OLLAMA_PULL: Table = _ignore("Ollama", "insecure username password", "the hub's own settings count")
OLLAMA_CREATE: Table = {
    **_ignore("Ollama", "license info requires renderer parser", "the model's files say it"),
    **_refuse("Ollama", "files adapters", "no files are taken over HTTP: send from", {}),
    **_refuse("Ollama", "quantize quantization", "use ridgeline quantize", ""),
    **_refuse("Ollama", "modelfile path", "send from, system and parameters", ""),
}
OLLAMA_EMBED: Table = _ignore("Ollama", "keep_alive options", _MACHINE)
OLLAMA_EMBEDDING: Table = _ignore("Ollama", "keep_alive options truncate", _MACHINE)

VECTORS: Table = {
    **_drop("vLLM", "priority", "requests are served in fair order", 0),
    **_refuse("vLLM", "add_special_tokens", "send token ids", True),
    **_refuse("vLLM", "embed_dtype", "send encoding_format", "float32"),
    **_ignore("vLLM", "request_id", "send the header x-request-id"),
    **_ignore("others", "input_type", "put what a model card asks for before the text yourself"),
}
TIME_OF_FILE: Table = _ignore("llama.cpp", "time", "the order says which is newer")
LORA: Table = _ignore("vLLM", "lora_int_id", "adapters have names")
BATCH: Table = _ignore("OpenAI", "output_expires_after", "files stay until they are deleted")
ANY: Mapping[str, DroppedField] = {}
