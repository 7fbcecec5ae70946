"""What becomes of the fields that clients send and no body here has: one table for all APIs.

The bodies read it (``http.request_model``), and docs/fields.md is made of both. Fields that are
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


_hint, _lost, _refused = (partial(_rows, fate) for fate in ("hint", "lost", "refused"))

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
    **_refused("llama.cpp", "mirostat", _NO_MIROSTAT, most_off=0),
    **_hint("llama.cpp", "mirostat_tau mirostat_eta", "they only tune mirostat"),
    **_refused("llama.cpp", "dynatemp_range", _NO_DYNATEMP, most_off=0),
    **_hint("llama.cpp", "dynatemp_exponent", "it only tunes dynatemp_range"),
    **_refused("llama.cpp", "adaptive_target", _NO_ADAPTIVE, most_off=-1e-9),
    **_hint("llama.cpp", "adaptive_decay", "it only tunes adaptive_target"),
    **_refused("llama.cpp", "tfs_z", "use min_p or typical_p", 1, 1.0),
    **_refused("others", "smoothing_factor", _NO_DYNATEMP, most_off=0),
    **_refused("OpenRouter", "top_a", "use min_p", most_off=0),
    **_refused("TGI", "watermark guidance_scale", "leave it out", False, 1, 1.0),
    **_refused(
        "vLLM",
        "logits_processors custom_logit_processor",
        "no code runs per request: "
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
        [],
    ),
}

_OPENAI: Table = {
    **_hint("OpenAI", "audio", "it only says how speech sounds, and the answer is text"),
    **_refused("OpenAI", "modalities", _ONLY_TEXT, ["text"]),
    **_refused("OpenAI", "functions", "send them as tools", []),
    **_refused("OpenAI", "function_call", "send tools and tool_choice", "none", "auto"),
    **_lost("OpenAI", "moderation", "nothing is moderated here"),
    **_lost("OpenAI", "priority", "requests are served in fair order", 0),
    **_hint("OpenAI", "prompt_cache_retention prompt_cache_options", _CACHED),
    **_lost("OpenAI", "service_tier", "there is one tier", "auto", "default"),
    **_lost("OpenAI", "store", "nothing is stored here, so keep the answer yourself", False),
    **_lost("OpenAI", "verbosity", "no model here knows it: ask for it in words", "medium"),
    **_lost("OpenAI", "web_search_options", _NO_TOOLS),
}
_VLLM: Table = {
    **_hint("vLLM", "spaces_between_special_tokens", "special tokens are no text of an answer"),
    **_refused("vLLM", "documents", "put them into a message", []),
    **_hint("vLLM", "mm_processor_kwargs media_io_kwargs", "there is nothing but text"),
    **_hint("vLLM", "request_id", "send the header x-request-id"),
    **_hint("vLLM", "guided_decoding_backend", _MACHINE),
    **_hint("vLLM", "kv_transfer_params data_parallel_rank", _MACHINE),
    **_lost("vLLM", "vllm_xargs", "nothing here reads them", {}),
    **_lost("vLLM", "response_role", "answers are the assistant's", "assistant"),
    **_lost("vLLM", "thinking_token_budget", "how long a model thinks is not limited"),
    **_lost("vLLM", "structural_tag", "send structured_outputs"),
    **_lost("vLLM", "repetition_detection", "use repetition_penalty or dry_multiplier"),
}
_LLAMA_CPP: Table = {
    **_hint("llama.cpp", "cache_prompt id_slot n_keep n_cache_reuse", _CACHED),
    **_hint("llama.cpp", "n_discard t_max_prompt_ms backend_sampling", _MACHINE),
    **_hint("llama.cpp", "thinking_forced_open chat_format preserved_tokens", "the template says"),
    **_refused("llama.cpp", "grammar_lazy", "send tools", False),
    **_hint("llama.cpp", "grammar_triggers", "they only tune grammar_lazy"),
    **_refused("llama.cpp", "reasoning_format", "set --reasoning-parser none", "auto", "deepseek"),
    **_lost("llama.cpp", "t_max_predict_ms", "use deadline, or max_tokens", most_off=0),
    **_lost("llama.cpp", "response_fields", "the whole answer comes"),
    **_refused("llama.cpp", "n_probs", "use logprobs and top_logprobs", most_off=0),
    **_refused("llama.cpp", "min_keep", "a sampler always leaves one token", most_off=1),
    **_refused("llama.cpp", "post_sampling_probs", "ask /completion", False),
    **_lost("llama.cpp", "return_tokens", "use return_token_ids", False),
    **_refused("llama.cpp", "lora", "name an adapter as the model", []),
    **_lost("llama.cpp", "parse_tool_calls", "calls are always read", True),
    **_lost("llama.cpp", "reasoning_budget", "how long a model thinks is not limited", -1),
}
_OTHERS: Table = {
    **_hint("LM Studio", "ttl draft_model context_length", _MACHINE),
    **_hint("LM Studio", "context_overflow_policy", "no prompt is cut, and no answer goes on"),
    **_hint("Ollama", "keep_alive num_ctx num_gpu num_thread", _MACHINE),
    **_lost("Ollama", "options", "send each by its own name, or ask /api/chat"),
    **_refused("SGLang", "separate_reasoning", "reasoning_content has it", True),
    **_hint("SGLang", "stream_reasoning", "it comes as it is made"),
    **_hint("SGLang", "rid", "send the header x-request-id"),
    **_refused("SGLang", "lora_path", "name an adapter as the model"),
    **_lost("SGLang", "session_params", "no sessions are kept", {}),
    **_refused("SGLang", "return_hidden_states", "they are not shown", False),
    **_refused("SGLang", "stop_regex", "use stop"),
    **_refused("TGI", "do_sample", "set temperature to 0", True),
    **_refused("TGI", "truncate", _NEVER_CUT),
    **_refused("TGI", "adapter_id", "name an adapter as the model"),
    **_lost("TGI", "details decoder_input_details", "use logprobs", False),
    **_hint("OpenRouter", "transforms", "no prompt is cut"),
    **_hint("OpenRouter", "models route provider", _ONE_MODEL),
    **_lost("OpenRouter", "plugins", _NO_TOOLS, []),
    **_hint("OpenRouter", "usage", "it stands in each answer: for streams send stream_options"),
    **_hint("Open WebUI", "user_id chat_id session_id", "send user"),
    **_hint("litellm", "extra_body", "its fields belong into the body itself"),
}
COMPLETION: Table = {
    **SAMPLERS,
    **_OPENAI,
    **_VLLM,
    **_LLAMA_CPP,
    **_OTHERS,
    **_hint("OpenAI", "parallel_tool_calls", "nothing is called here", True, False),
    **_refused("OpenAI", "tools", "send the conversation to /v1/chat/completions", []),
    **_refused("OpenAI", "tool_choice", "nothing is called here", "none", "auto"),
    **_lost("OpenAI", "prediction", "send the conversation to /v1/chat/completions"),
    **_lost(
        "OpenAI",
        "reasoning_effort",
        "a plain prompt has no reasoning switch: write it into the prompt",
        "none",
    ),
    **_refused("vLLM", "add_special_tokens", "send token ids", True),
}
CHAT: Table = {
    **SAMPLERS,
    **_OPENAI,
    **_VLLM,
    **_LLAMA_CPP,
    **_OTHERS,
    **_refused("vLLM", "add_special_tokens", "the template has them all", False),
}
_OF_INFILL = (  # its own
    *("id_slot", "n_probs", "post_sampling_probs", "response_fields", "return_tokens"),
    "t_max_predict_ms",
)
INFILL: Table = {
    **_refused("vLLM", "truncate_prompt_tokens", _NEVER_CUT),
    **{name: extra for name, extra in COMPLETION.items() if name not in _OF_INFILL},
    **_hint(
        "llama.cpp", "echo suffix include_timings stream_options verbose", "the answer has its form"
    ),
    **_refused("OpenAI", "n", "the answer is one", 1),
    **_refused("OpenAI", "logprobs", "ask /v1/completions, which has a suffix"),
    **_lost("OpenAI", "max_tokens", "send n_predict"),
}

TRITON: Table = {
    **COMPLETION,
    **_hint("OpenAI", "model", "the path names it"),
    **_hint("OpenAI", "prompt", "send text_input"),
    **_hint("OpenAI", "stream_options", "the answer has its form"),
    **_hint("vLLM", "include_timings return_token_ids return_tokens_as_token_ids", "ask /v1"),
    **_hint("llama.cpp", "return_progress timings_per_token verbose", "ask /v1"),
    **_lost("OpenAI", "logprobs", "ask /v1/completions"),
    **_lost("vLLM", "prompt_logprobs", "ask /v1/completions"),
    **_lost("OpenAI", "echo", "send exclude_input_in_output: false", False),
    **_refused("Triton", "image", _ONLY_TEXT, ""),
    **_refused("Triton", "sequence_id", "no request follows another: send the whole text", 0, ""),
    **_hint("Triton", "sequence_start sequence_end", "no request follows another"),
    **_lost("Triton", "priority", "requests are served in fair order", 0),
    **_lost("Triton", "timeout", "end the request yourself, or send deadline", 0),
    **_lost("Triton", "return_cumulative_logprob", "ask /v1/completions", False),
    **_refused("Triton", "stop_words", "send stop", "", []),
    **_hint("Triton", "triton_enable_empty_final_response", "over gRPC it is honoured"),
}
TRITON_TENSOR: Table = {
    **_refused(
        "Triton",
        "shared_memory_region shared_memory_byte_size shared_memory_offset",
        "no memory is shared with clients: send the data",
    ),
    **_refused("Triton", "classification", "there are no classes", 0),
}

# Parts of conversations.
CONTENT_PART: Table = _hint("Anthropic", "cache_control", _CACHED)
MESSAGE: Table = {
    **_hint("OpenAI", "annotations audio refusal parsed", "they came with an answer"),
    **_hint("litellm", "thinking_blocks provider_specific_fields", "reasoning_content has it"),
    **_hint("Anthropic", "cache_control", _CACHED),
    **_refused("DeepSeek", "prefix", "send continue_final_message", False),
}
TOOL: Table = _hint("Anthropic", "cache_control", _CACHED)
FUNCTION: Table = _hint("OpenAI", "defer_loading output_schema", "all tools are shown")
RENDERING: Table = _refused("vLLM", "add_special_tokens", "the template has them all", False)
STREAM_OPTIONS: Table = _hint("OpenAI", "include_obfuscation", "nothing is padded", False)

RESPONSES: Table = {
    **_refused(
        "OpenAI", "background", "nothing is stored here, so use stream, and stay connected", False
    ),
    **_hint("OpenAI", "client_metadata", "it says who asks"),
    **_lost("OpenAI", "context_management", "shorten the input yourself", []),
    **_refused("OpenAI", "conversation previous_response_id", _SEND_ALL),
    **_hint("OpenAI", "max_tool_calls", "it limits tools that a server runs, and here are none"),
    **_refused("OpenAI", "prompt", "no prompts are stored here, so send instructions and input"),
    **_hint("OpenAI", "prompt_cache_retention prompt_cache_options", _CACHED),
    **_lost("OpenAI", "service_tier", "there is one tier", "auto", "default"),
    **_lost("OpenAI", "store", "nothing is stored here, so keep the response yourself", False),
    **_lost("OpenAI", "truncation", _NEVER_CUT, "disabled"),
    **_hint("OpenAI", "stream_options", "it only asks for padding"),
    **_lost("OpenAI", "moderation", "nothing is moderated here"),
    **_lost("OpenAI", "image", _ONLY_TEXT),
    **_hint("OpenAI", "access_programs", "who may ask is the server's to say"),
}
_ITEM = _hint("OpenAI", "id status", "they came with an answer")
RESPONSE_PART: Table = _hint("OpenAI", "annotations logprobs", "they came with an answer")
RESPONSE_MESSAGE: Table = _ITEM | _hint("OpenAI", "phase", "it came with an answer")
RESPONSE_CALL: Table = _ITEM | _hint("OpenAI", "namespace", "functions have one")
RESPONSE_OUTPUT: Table = _ITEM | _hint("OpenAI", "name", "call_id says which call")
RESPONSE_REASONING: Table = {
    **_ITEM,
    **_hint("OpenAI", "summary", "content has the text itself"),
    **_lost("OpenAI", "encrypted_content", "it cannot be read here, so send content"),
}
RESPONSE_THINKING: Table = _hint(
    "OpenAI", "summary generate_summary context", "reasoning is shown whole"
)
RESPONSE_TEXT: Table = _lost(
    "OpenAI", "verbosity", "no model here knows it: ask for it in words", "medium"
)

MESSAGES: Table = {
    **_hint("Anthropic", "cache_control diagnostics", _CACHED),
    **_hint("Anthropic", "service_tier speed inference_geo", _MACHINE),
    **_hint("Anthropic", "user_profile_id workspace_id", "send metadata.user_id"),
    **_lost("Anthropic", "container mcp_servers", _NO_TOOLS, []),
    **_lost("Anthropic", "context_management", "shorten the conversation yourself", {"edits": []}),
}
BLOCK: Table = _hint("Anthropic", "cache_control citations", _CACHED)
TOOL_USE: Table = _hint("Anthropic", "cache_control caller", _CACHED)
TOOL_RESULT: Table = {
    **_hint("Anthropic", "cache_control", _CACHED),
    **_hint("Anthropic", "is_error", "its text says so"),
}
THINKING_BLOCK: Table = _hint("Anthropic", "signature", "nothing is signed here")
MESSAGES_TOOL: Table = {
    **_hint("Anthropic", "cache_control eager_input_streaming", _CACHED),
    **_lost("Anthropic", "allowed_callers", "the client calls", ["direct"]),
    **_lost("Anthropic", "defer_loading", "all tools are shown", False),
    **_lost("Anthropic", "input_examples", "put them into the description", []),
}
THINKING: Table = _hint("Anthropic", "budget_tokens display", "reasoning is shown whole")
REASONING: Table = _hint("OpenRouter", "max_tokens exclude summary", "reasoning is shown whole")
OUTPUT_CONFIG: Table = _lost("Anthropic", "task_budget", "use max_tokens")

OLLAMA: Table = {
    **_hint("Ollama", "shift truncate", "no prompt is cut, and no answer goes on"),
}
OLLAMA_GENERATE: Table = {
    **OLLAMA,
    **_refused("Ollama", "context", "send the conversation to /api/chat", []),
    **_refused("Ollama", "images", _ONLY_TEXT, []),
    **_refused("Ollama", "template", "the model's own is used, or none with raw: true", ""),
}
OLLAMA_OPTIONS: Table = {
    **SAMPLERS,
    **_hint(
        "Ollama",
        "draft_num_predict f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep "
        "num_thread numa penalize_newline use_mlock use_mmap vocab_only",
        _MACHINE,
    ),
}
OLLAMA_MESSAGE: Table = _refused("Ollama", "images", _ONLY_TEXT, [])
OLLAMA_CALL: Table = _hint("Ollama", "type index description", "a call is its name and arguments")
OLLAMA_SHOW: Table = _hint("Ollama", "verbose system template options", "all is shown")
OLLAMA_PULL: Table = _hint("Ollama", "insecure username password", "the hub's own settings count")
OLLAMA_CREATE: Table = {
    **_hint("Ollama", "license info requires renderer parser", "the model's files say it"),
    **_refused("Ollama", "files adapters", "no files are taken over HTTP: send from", {}),
    **_refused("Ollama", "quantize quantization", "use ridgeline quantize", ""),
    **_refused("Ollama", "modelfile path", "send from, system and parameters", ""),
}
OLLAMA_EMBED: Table = _hint("Ollama", "keep_alive options", _MACHINE)
OLLAMA_EMBEDDING: Table = _hint("Ollama", "keep_alive options truncate", _MACHINE)

VECTORS: Table = {
    **_lost("vLLM", "priority", "requests are served in fair order", 0),
    **_refused("vLLM", "add_special_tokens", "send token ids", True),
    **_refused("vLLM", "embed_dtype", "send encoding_format", "float32"),
    **_hint("vLLM", "request_id", "send the header x-request-id"),
    **_hint("others", "input_type", "put what a model card asks for before the text yourself"),
}
TIME_OF_FILE: Table = _hint("llama.cpp", "time", "the order says which is newer")
LORA: Table = _hint("vLLM", "lora_int_id", "adapters have names")
BATCH: Table = _hint("OpenAI", "output_expires_after", "files stay until they are deleted")
ANY: Mapping[str, DroppedField] = {}
