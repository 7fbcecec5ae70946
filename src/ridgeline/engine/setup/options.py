"""The options as people type them, where "auto" and None mean "you choose"."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ridgeline.core.scheduling.speculate import MOST_DRAFTS
from ridgeline.system.machine import available_bytes

Dtype = Literal["auto", "f32", "bf16", "int8", "int8-row", "int4"]
KvCacheDtype = Literal["auto", "f32", "f16", "bf16", "int8", "int8-int4"]
_MOST_BYTES = 1 << 60
_GUARD_CACHE_BYTES = 512 << 20
_MOST_SHOWN = 80  # letters of a value
_UNITS = {"": 1}
_UNITS |= {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def flag_field(
    default: Any,
    help: str,
    envvar: str | None = None,
    typed: Literal["text", "texts", "path"] | None = None,
) -> Any:
    """Return a dataclass field that becomes a flag with this help.

    ``typed`` says what people type where the field may have more than that.
    """
    return field(default=default, metadata={"help": help, "envvar": envvar, "typed": typed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that run, serve, bench and ``LLM`` share; the command line is made from this."""

    max_model_len: int | None = flag_field(
        None, "Maximum length of prompt and answer together, in tokens. Default: the model's."
    )
    max_num_seqs: int | None = flag_field(
        None,
        "Maximum number of sequences that run at once. Default: 256; 64 on a processor where serve "
        "has several keys.",
    )
    max_num_batched_tokens: int | None = flag_field(
        None,
        "Maximum number of tokens in one step. Default: 2048; 256 on a processor where serve has "
        "several keys.",
    )
    is_shared: bool = flag_field(  # serve knows it: no flag
        False, "Whether several keys share the engine: then nobody waits for long steps of others."
    )
    block_size: int = flag_field(16, "Tokens per block of the KV cache.")
    kv_cache_memory: int | str | None = flag_field(
        None,
        "Memory for the KV cache: bytes, or text such as 4GiB. Default: chosen by what is free.",
        typed="text",
    )
    kv_cache_dtype: KvCacheDtype = flag_field(
        "auto",
        "Format of keys and values; int8-int4 stores keys in 8 bits and values in 4. Default: "
        "f32 with --dtype f32, else int8; bf16 on a GPU.",
    )
    dtype: Dtype = flag_field("auto", "Format that the weights are computed in.")
    policy: Literal["static", "orca", "splitfuse"] = flag_field(
        "splitfuse", "Scheduling policy: how steps are filled; see docs/architecture.md."
    )
    kv_reservation: Literal["auto", "paged", "full"] = flag_field(
        "auto",
        "When a sequence gets its blocks of the KV cache: paged as it grows, or in full at first, "
        "for the longest answer it may have. Default: by the policy; only splitfuse pages.",
    )
    tensor_parallel_size: int = flag_field(
        1, "Number of GPUs that share each layer, with a process for each; needs --backend cuda."
    )
    stages: int = flag_field(
        1, "Number of processes that have some consecutive layers each; the cpu backend's."
    )
    stage_port: int | None = flag_field(
        None,
        "Port at which stages of other machines join (ridgeline stage). Default: all run here.",
    )
    stage_key_file: Path | None = flag_field(
        None, "File with the key that stages of other machines must have too."
    )
    enable_prefix_caching: bool = flag_field(True, "Reuse the KV cache of equal prefixes.")
    threads: int | None = flag_field(None, "Number of threads. Default: one for each usable core.")
    seed: int | None = flag_field(
        None, "Seed for requests without one. Default: run and serve draw one, else 0."
    )
    backend: Literal["auto", "cpu", "reference", "cuda"] = flag_field(
        "auto",
        "Backend that runs the model. Default: cuda for one model if there is an NVIDIA GPU that "
        "has passed ridgeline bench gpu, else cpu.",
    )
    speculative_config: str | Mapping[str, Any] | None = flag_field(
        None,
        "Speculative decoding, as JSON with vLLM's keys, or off. Answers stay the same. "
        "Default: prompt lookup, where it pays.",
        typed="text",
    )
    enable_contrastive_search: bool = flag_field(
        False, "Keep final hidden states beside the KV cache, for requests with penalty_alpha."
    )
    lora: Sequence[str] | Mapping[str, str | Path] | None = flag_field(
        None,
        "LoRA adapter to load, as NAME=PATH; repeatable. Requests name it as their model.",
        typed="texts",
    )
    enable_lora: bool = flag_field(False, "Reserve memory for adapters that are loaded later.")
    max_lora_rank: int | None = flag_field(
        None,
        "Largest rank of an adapter. Default: the largest of those given; 64 with --enable-lora.",
    )
    lora_memory: int | str | None = flag_field(
        None,
        "Memory for adapters. Default: the size of those given, and 256 MiB for later ones.",
        typed="text",
    )
    kv_disk: str | None = flag_field(
        None,
        "Folder for blocks of the KV cache that outlast a restart, and its size, as PATH:SIZE such "
        "as /var/cache/kv:20GiB. Default: none.",
    )
    kv_disk_min: int = flag_field(
        512, "Shortest prompt, in tokens, whose blocks are kept in that folder."
    )
    trace: str | Path | None = flag_field(
        None,
        "Write a record of every step and request to this file, as JSON lines.",
        typed="path",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for values that no model could make sense of."""
        for name, allowed in _choices().items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{_flag(name)} is {value!r}, not one of {', '.join(allowed)}")
        for name in ("block_size", "tensor_parallel_size", "stages"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_model_len", self.max_model_len, 2)
        for name in ("max_num_seqs", "max_num_batched_tokens", "threads"):
            _at_least(name, getattr(self, name), 1)
        if self.max_num_seqs and (self.max_num_batched_tokens or self.max_num_seqs) < (
            self.max_num_seqs
        ):
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than "
                f"--max-num-seqs {self.max_num_seqs}: every running sequence needs a token a step"
            )
        _at_least("stage_port", self.stage_port, 0)
        if self.stage_port is not None and self.stage_port > 65535:
            raise ValueError(f"--stage-port is {self.stage_port}: it must be from 0 to 65535")
        if self.stages == 1 and (self.stage_port is not None or self.stage_key_file):
            raise ValueError("--stage-port and --stage-key-file need --stages 2 or more")
        parse_speculative(self.speculative_config)
        _at_least("kv_disk_min", self.kv_disk_min, 1)
        if self.kv_disk_place and self.trace:
            raise ValueError(
                "--kv-disk and --trace cannot be used together: blocks read from disk are not in "
                "the trace, so it could not be replayed; leave out one of them"
            )
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        parse_bytes(self.lora_memory or 1, "--lora-memory")
        _ = self.adapters
        if isinstance(self.seed, bool) or not isinstance(self.seed, int | None):
            raise ValueError(f"seed must be a whole number, not {self.seed!r}")

    @property
    def kv_disk_place(self) -> tuple[Path, int] | None:
        """Folder and size in bytes of ``kv_disk``. Raises ValueError for what is none."""
        if self.kv_disk is None:
            return None
        path, _, size = str(self.kv_disk).rpartition(":")
        if not path:
            raise ValueError(f"--kv-disk is {self.kv_disk!r}: write PATH:SIZE")
        return Path(path).expanduser(), parse_bytes(size, "--kv-disk")

    @property
    def adapters(self) -> dict[str, str | Path]:
        """Paths of the adapters to load, by name. Raises ValueError for what is none."""
        lora = self.lora or {}
        pairs: list[tuple[str, str | Path]]
        if isinstance(lora, Mapping):
            pairs = list(lora.items())
        else:
            pairs = [(name, path) for name, _, path in (text.partition("=") for text in lora)]
        by_name: dict[str, str | Path] = {}
        for name, path in pairs:
            if not name or not str(path):
                raise ValueError(f"--lora is {f'{name}={path}'!r}: write NAME=PATH")
            if name in by_name:
                raise ValueError(f"--lora: two adapters are named {name!r}: give each its own name")
            by_name[name] = path
        return by_name


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return what an option may be, by its name, of those that have a list."""
    hints = get_type_hints(Options).items()
    return {name: get_args(kind) for name, kind in hints if get_origin(kind) is Literal}


def guard_options(options: Options) -> Options:
    """Return the options of a guard beside a model that has these.

    It has the same formats, and a cache of its own; nothing of it is traced or kept, and it has no
    adapters.
    """
    return replace(
        options,
        kv_cache_memory=min(_GUARD_CACHE_BYTES, available_bytes() // 8),
        max_model_len=None,
        speculative_config="off",
        trace=None,
        kv_disk=None,
        lora=None,
        enable_lora=False,
        enable_contrastive_search=False,
        tensor_parallel_size=1,
    )


def parse_bytes(size: int | str, flag: str) -> int:
    """Return a size in bytes: a number, or text such as "512MiB", "4GiB" or "2G".

    Raises ValueError, which names ``flag``, if it is neither, not positive, or more than any
    machine has.
    """
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]i?)?b?", str(size).strip().lower())
    num_bytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if not 1 <= num_bytes <= _MOST_BYTES:
        text = f"{size!r}" if len(str(size)) <= _MOST_SHOWN else f"{str(size)[:_MOST_SHOWN]}..."
        raise ValueError(
            f"{flag}: {text} is not a size: write bytes, or a number with MiB or GiB, "
            "up to 2**60 bytes"
        )
    return num_bytes


def _at_least(name: str, value: object, least: int) -> None:
    """Raise ValueError unless ``value`` is left open (None) or large enough."""
    if value is None and name not in ("block_size", "tensor_parallel_size", "stages"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{_flag(name)} is {value!r}: it must be a whole number of at least {least}"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_METHODS = ("ngram", "suffix", "draft_model", "lookahead")
_RANGES = {
    "num_speculative_tokens": (1, MOST_DRAFTS),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What the JSON of ``--speculative-config`` may say.

    Attributes:
        method: "ngram" guesses what followed the same tokens before; "suffix" also in earlier
            answers to the same API key; "draft_model" asks a smaller model; "lookahead" guesses
            what was drawn behind wrong drafts.
        model: the draft model, named as any model; it needs the same vocabulary.
        num_speculative_tokens: most drafts of a sequence in a step.
        prompt_lookup_min: fewest tokens that must be the same as before.
        prompt_lookup_max: most that are compared.
        always: verify every draft, also where that does not pay: for tests and comparisons.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 32
    always: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not one of those above."""
        if self.method not in _METHODS:
            raise ValueError(
                f"--speculative-config: method {self.method!r} is not one of "
                f"{', '.join(_METHODS)}; 'off' in place of the JSON switches speculative "
                "decoding off"
            )
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(
                    f"--speculative-config: {name} is {value!r}, not a whole number from {low} to "
                    f"{high}"
                )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"--speculative-config: prompt_lookup_min ({self.prompt_lookup_min}) is more than "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if (self.method == "draft_model") != isinstance(self.model, str):
            raise ValueError(
                "--speculative-config: draft_model needs a model"
                if self.model is None
                else f"--speculative-config: model is {self.model!r}, but it must be the name or "
                f"path of a model, and the method draft_model"
            )
        looked_up = self.prompt_lookup_min, self.prompt_lookup_max
        if self.method in ("draft_model", "lookahead") and looked_up != (2, 32):
            raise ValueError(
                f"--speculative-config: prompt_lookup_min and prompt_lookup_max are for ngram and "
                f"suffix: {self.method} looks nothing up"
            )
        if type(self.always) is not bool:
            raise ValueError(f"--speculative-config: always is {self.always!r}, not true or false")


def parse_speculative(value: str | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Return what ``--speculative-config`` says; None for "off", the defaults for None.

    Raises ValueError, which names what is wrong.
    """
    if value is None:
        return SpeculativeConfig()
    if value == "off":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(
                f"--speculative-config is {value!r}, neither JSON nor 'off': write for example "
                f'\'{{"method": "ngram", "num_speculative_tokens": 4}}\''
            ) from None
    if not isinstance(value, Mapping):
        raise ValueError(f"--speculative-config is {value!r}: write a JSON object, or 'off'")
    names = [field.name for field in fields(SpeculativeConfig)]
    for key in value:
        if key not in names:
            raise ValueError(
                f"--speculative-config has no {key!r}; it has {', '.join(names)}; the number "
                "of drafts that pays is measured while it runs"
            )
    return SpeculativeConfig(**value)
