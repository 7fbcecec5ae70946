"""The help of commands: flags in sections, and the kinds of their values in plain words."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from ridgeline.cli.flags import UsageError

# A flag that is in no section stands under "Options", which come first.
SECTIONS = {
    "Model": (
        "dtype", "backend", "threads", "max_model_len", "speculative_config",
        "enable_contrastive_search", "served_model_name", "any_model_name", "models_dir",
        "keep_alive", "models_memory", "guard", "chat_template", "tool_call_parser",
        "reasoning_parser", "override_generation_config",
    ),
    "Adapters": (
        "lora", "enable_lora", "max_lora_rank", "lora_memory", "allow_lora_loading",
    ),
    "Memory and steps": (
        "kv_cache_memory", "kv_cache_dtype", "block_size", "enable_prefix_caching", "max_num_seqs",
        "max_num_batched_tokens", "policy",
    ),
    "Address": (
        "host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile",
        "ssl_keyfile_password", "page",
    ),
    "Fleet": (
        "replicas", "place", "ray", "target_requests", "join", "spot", "fleet_key_file", "fleet_ca",
        "fleet_plain", "silence_timeout",
    ),
    "Access": (
        "allowed_host", "cors_origin", "api_key", "api_key_file", "admin_api_key",
        "isolate_keys", "max_requests_per_minute", "max_tokens_per_minute",
        "max_concurrent_requests",
    ),
    "Limits": (
        "max_queued_requests", "max_n", "max_stop", "max_logprobs", "max_temperature",
        "max_logit_bias", "strict", "max_grammar_bytes", "grammar_timeout", "max_body", "max_file",
        "max_stored", "receive_timeout", "stall_timeout", "step_timeout", "shutdown_timeout",
    ),
    "Load": (
        "request_rate", "burstiness", "max_concurrency", "trace_file", "lengths_from",
        "num_prompts", "prompts", "prompt_words", "prompt_tokens", "new_tokens", "prefix_share",
        "turns", "think_s", "num_warmups", "like_result", "clients",
    ),
    "Choices": (
        "slo", "spot", "evictions_per_hour", "notice", "prices", "max_usd_per_hour",
    ),
    "Sampling": (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "max_tokens", "stop", "ignore_eos", "extra_body", "seed",
    ),
    "Logs": (
        "log_format", "log_content", "trace", "audit", "audit_key", "audit_rotate", "audit_keep",
        "audit_strict", "receipt_key",
    ),
}  # fmt: skip
_SECTION_OF = {name: section for section, names in SECTIONS.items() for name in names}
_KINDS = {
    "<str>": "<text>", "<list[str]>": "<text>...", "<list[int]>": "<int>...",
    "<list[Path]>": "<path>...", "<int range>": "<int>", "<float range>": "<float>",
}  # fmt: skip


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose help has its flags in sections, and which answers old lines with new ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise UsageError for a line that was of this command, and is another's now."""
        if self.name == "simulate" and (line := _line_now(args)):
            raise UsageError(f"simulate asks one question: write {line}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, flags of no section, then each section that has any."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        rows |= {section: [] for section in SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                section = "Arguments" if is_argument else _SECTION_OF.get(param.name or "")
                rows[section or "Options"].append((_plain(record[0]), record[1]))
        for section, entries in rows.items():
            if entries:
                with formatter.section(section):
                    formatter.write_dl(entries)


def _line_now(args: list[str]) -> str:
    """Return what a line of ``simulate`` that swept or replayed is now; empty for all others."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg[:2] == "--" else [arg])]
    if "--sweep" in words:
        words = ["--set" if word == "--sweep" else word for word in words]
        return shlex.join(["ridgeline", "sweep", *words])
    if "--replay" not in words[:-1]:
        return ""
    at = words.index("--replay")
    trace, others = words[at + 1], words[:at] + words[at + 2 :]
    if others and not others[0].startswith("-"):
        others = ["--model", *others]
    elif not others:
        others = ["--diff"]  # without a flag a replay asks whether all decisions are the same
    return shlex.join(["ridgeline", "replay", trace, *others])


def _plain(flag: str) -> str:
    for kind, words in _KINDS.items():
        flag = flag.replace(kind, words)
    return flag


class App(typer.Typer):
    """Commands with such a help."""

    def command(  # type: ignore[override]  # typer takes more, which is not needed here
        self, name: str | None = None, *, hidden: bool = False
    ) -> Callable[[_Function], _Function]:
        """Add a command, as typer does."""
        return super().command(name, cls=Command, hidden=hidden)
