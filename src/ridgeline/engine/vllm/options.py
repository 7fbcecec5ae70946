"""vLLM's options of ``LLM``, and methods of it: what each means here, or what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ridgeline.engine.setup.options import Options

# Its names of formats. Weights in 16-bit floats stay as their file has them, so no bit is lost.
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "auto",
    "half": "auto",
    "float32": "f32",
    "float": "f32",
}
_RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
# Nothing here hangs on these, whatever their value.
_DROPPED = frozenset(
    {
        "async_scheduling", "attention_backend", "code_revision", "compilation_config",
        "config_format", "convert", "cpu_offload_gb", "cudagraph_capture_sizes",
        "disable_async_output_proc", "disable_custom_all_reduce", "disable_sliding_window",
        "download_dir", "enable_chunked_prefill", "enable_sleep_mode", "enforce_eager",
        "gpu_memory_utilization", "guided_decoding_backend", "hf_token",
        "limit_mm_per_prompt", "load_format", "max_loras", "max_logprobs",
        "max_seq_len_to_capture", "media_io_kwargs", "mm_encoder_tp_mode", "mm_processor_kwargs",
        "model_loader_extra_config", "profiler_config", "quantization", "runner",
        "served_model_name", "structured_outputs_config", "swap_space", "task", "tokenizer_mode",
        "tokenizer_revision", "trust_remote_code", "use_tqdm_on_load", "worker_cls",
    }
)  # fmt: skip
# These would change what is computed: a value that changes nothing passes.
_ONE_VALUE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": ((1,), "a model runs in one process"),
    "data_parallel_size": ((1,), "a model runs in one process"),
    "distributed_executor_backend": ((None, "uni", "mp"), "a model runs in one process"),
    "device": (("auto", "cpu"), "see backend"),
    "hf_overrides": (({},), "a model is what its files say"),
    "generation_config": (("auto",), "give SamplingParams to ignore what a model recommends"),
    "skip_tokenizer_init": ((False,), "prompts may be token ids all the same"),
}

_TRACED = "LLM(..., trace=FILE) records every step, and `ridgeline explain FILE` reads that"
_ONE_PROCESS = "a model runs in one process, with the weights that its files have"
INSTEAD = {  # methods of vLLM's LLM that are not here
    "apply_model": _ONE_PROCESS,
    "classify": "no model that sorts texts runs here; a text model answers with one of several "
    "words by StructuredOutputsParams(choice=[...])",
    "collective_rpc": _ONE_PROCESS,
    "llm_engine": _ONE_PROCESS,
    "load_weights": _ONE_PROCESS,
    "start_profile": _TRACED,
    "stop_profile": _TRACED,
}


def vllm_options() -> list[str]:
    """Return vLLM's names of options that are not the same here."""
    return sorted({*_DROPPED, *_ONE_VALUE, *_RENAMED, "disable_log_stats", "revision", "tokenizer"})


def taken(model: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the model and our own options that vLLM's stand for, and what is to be said.

    Raises ValueError for a value that would change what is computed, and TypeError, with the
    nearest name, for an option that neither knows.
    """
    options, dropped = dict[str, Any](), list[str]()
    known = [field.name for field in fields(Options)]
    for name, value in given.items():
        if name == "dtype":
            plain = str(value).removeprefix("torch.")
            options[name] = _DTYPES.get(plain, plain)
        elif name in known:
            options[name] = value
        elif name in _RENAMED:
            options[_RENAMED[name]] = value
        elif name == "revision":
            model = model if value is None else f"{model}@{value}"
        elif name == "tokenizer":
            if value not in (None, model):
                raise ValueError(f"tokenizer is {value!r}: a model has its own, leave it out")
        elif name in _ONE_VALUE:
            neutral, instead = _ONE_VALUE[name]
            if value is not None and value not in neutral:
                raise ValueError(f"{name} is {value!r:.80}: {instead}; leave it out")
        elif name in _DROPPED:
            dropped += [name] if value is not None else []
        else:
            raise TypeError(f"LLM has no option {name!r}{_nearest(name, known)}")
    notes = [f"nothing here depends on {', '.join(dropped)}"] if dropped else []
    return model, options, notes


UseTqdm = bool | Callable[..., Any] | None


def wants_progress(progress: bool | None, use_tqdm: UseTqdm) -> bool | None:
    """Return whether a bar is shown: vLLM's name for it counts where ours says nothing."""
    return bool(use_tqdm) if progress is None and use_tqdm is not None else progress


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, [*known, *_RENAMED, *_ONE_VALUE, *_DROPPED], n=1)
    return f": did you mean {near[0]!r}?" if near else ""
