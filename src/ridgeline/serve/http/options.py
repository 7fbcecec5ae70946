"""The flags of ``ridgeline serve`` beside the engine's, checked once. It opens nothing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.core.decoding.search import with_recommended
from ridgeline.engine.setup.options import flag_field, parse_bytes
from ridgeline.engine.text_processor import REASONING_PARSERS
from ridgeline.model.files import RECOMMENDED
from ridgeline.text.messages.tools import format_named

_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Address, keys, limits and logs."""

    host: str = flag_field("127.0.0.1", "Address to listen on; 0.0.0.0 means all.")
    port: int = flag_field(8000, "Port to listen on; 0 chooses a free one.")
    grpc_port: int | None = flag_field(
        None, "Port for Triton's gRPC service on the same host, beside HTTP; 0 chooses a free one."
    )
    uds: Path | None = flag_field(None, "Unix socket to listen on, instead of host and port.")
    allowed_host: list[str] | None = flag_field(
        None,
        "Host name that clients may use for this server, such as *.example.org; repeatable; "
        "'*' is any.",
    )
    root_path: str = flag_field("", "Prefix of all paths behind a proxy, such as /llm.")
    ssl_certfile: Path | None = flag_field(None, "Certificate in PEM format, for HTTPS.")
    ssl_keyfile: Path | None = flag_field(None, "Its key, unless that is in the same file.")
    ssl_keyfile_password: str | None = flag_field(None, "Password of that key.")
    models_dir: Path | None = flag_field(
        None,
        "Folder of models to serve: .gguf files and model directories, each under its own name.",
    )
    replicas: str = flag_field(
        "1",
        "Servers of each model on this machine; they share its cores, its memory and the load. "
        "With --place a range such as 1..16 follows the load.",
    )
    place: Literal["here", "ray"] = flag_field(
        "here", "Where servers are started: ray finds machines for them. Needs --fleet-key-file."
    )
    ray: str | None = flag_field(
        None,
        "Address of Ray's head node, such as 10.0.0.1:6379. Default: RAY_ADDRESS, Ray on this "
        "machine, or a new one here.",
    )
    target_requests: int = flag_field(
        8,
        "With a range of --replicas: requests per server, running and waiting; more of them start "
        "another server.",
    )
    silence_timeout: float = flag_field(
        5.0, "Seconds of silence after which the requests of a server go to another one."
    )
    join: str | None = flag_field(
        None,
        "URL of a router, such as http://router:8000, that passes requests to this server; all "
        "connections go from here to there. Needs --fleet-key-file.",
    )
    fleet_key_file: Path | None = flag_field(
        None,
        "File with the shared key of a router and its servers on other machines; without --join, "
        "this server is the router.",
    )
    fleet_ca: Path | None = flag_field(
        None, "File of certificates by which --join knows an https router. Default: the system's."
    )
    fleet_plain: bool = flag_field(
        False, "Let prompts and answers go to other machines of the fleet without TLS."
    )
    spot: Literal["off", "auto", "aws", "azure", "gcp"] = flag_field(
        "off",
        "Leave the router when this cloud announces that it will reclaim the machine; auto "
        "detects the cloud.",
    )
    keep_alive: str | None = flag_field(
        None,
        "How long a model stays loaded after its last request; -1 means for ever. Default: 5m "
        "with several models.",
    )
    models_memory: str | None = flag_field(
        None, "Memory that several models may take together, such as 8GiB. Default: what is free."
    )
    idle_release: str | None = flag_field(
        None,
        "Time without a request, such as 10m, after which the memory of the cache and the weights "
        "is released until the next request. Default: never.",
    )
    allow_lora_loading: Path | None = flag_field(
        None, "Folder from which adapters may be loaded over HTTP. Default: none may be loaded."
    )
    served_model_name: list[str] | None = flag_field(
        None,
        "Name of the model in the API; repeatable; responses use the first. Default: the name "
        "as given.",
    )
    any_model_name: bool = flag_field(
        False, "Accept unknown model names: they mean the model; of several, the one last used."
    )
    api_key: list[str] | None = flag_field(
        None, "API key that clients must send; repeatable.", envvar="RIDGELINE_API_KEY"
    )
    api_key_file: Path | None = flag_field(
        None,
        "File with one key per line, or a label and a key, and perhaps admin; read again on "
        "SIGHUP.",
    )
    admin_api_key: list[str] | None = flag_field(
        None,
        "An operator's key, which sees all metrics and loads adapters; a server's only key is "
        "one too.",
    )
    rules: Path | None = flag_field(
        None,
        "File of rules (TOML): what each key may use, and what may be read and written; read "
        "again on SIGHUP.",
    )
    audit: Path | None = flag_field(
        None,
        "Folder for an audit log: a line for each request, chained and signed (ridgeline audit "
        "verify). Default: there is none.",
    )
    audit_key: Path | None = flag_field(
        None,
        "File with the key that signs the audit log, made if there is none. Default: audit.key in "
        "RIDGELINE_HOME.",
    )
    audit_rotate: str = flag_field(
        "64MiB", "Size after which the audit log continues in a new file; each day starts one too."
    )
    audit_keep: str = flag_field("180d", "Time after which files of the audit log are removed.")
    audit_strict: bool = flag_field(
        False,
        "End no answer before its audit line is on disk; refuse requests that cannot be logged.",
    )
    receipt_key: Path | None = flag_field(
        None,
        "File with the key (Ed25519, PEM) that signs receipts, made if there is none. Default: "
        "receipt.key in RIDGELINE_HOME.",
    )
    guard: list[str] | None = flag_field(
        None,
        "Guard model, or encoder for topics, that is loaded beside the model to judge texts, at "
        "/v1/moderations and for --rules; repeatable.",
    )
    isolate_keys: bool = flag_field(
        True, "Separate prefix caches for keys, so that no key can tell what another sent."
    )
    max_requests_per_minute: int | None = flag_field(
        None, "Maximum number of requests per minute for one key. Default: no limit."
    )
    max_tokens_per_minute: int | None = flag_field(
        None, "Maximum number of tokens per minute for one key. Default: no limit."
    )
    max_concurrent_requests: int | None = flag_field(
        None, "Maximum number of concurrent requests for one key. Default: no limit."
    )
    max_queued_requests: int = flag_field(
        2048, "Maximum number of prompts that wait for the engine."
    )
    max_n: int = flag_field(128, "Maximum n, the number of answers to one prompt.")
    max_stop: int = flag_field(64, "Maximum number of stop strings in a request.")
    max_logprobs: int = flag_field(
        20, "Maximum number of logprobs per token that a request may ask for."
    )
    max_temperature: float = flag_field(2.0, "Highest temperature that a request may ask for.")
    max_logit_bias: float = flag_field(100.0, "Largest bias of a token that a request may set.")
    strict: bool = flag_field(
        False,
        "Refuse fields that would be dropped, skipped or capped, unless no answer depends on them.",
    )
    max_grammar_bytes: int = flag_field(65536, "Maximum size of a schema or grammar, in bytes.")
    grammar_timeout: float = flag_field(
        2.0, "Maximum computing time of compiling a schema or grammar, in seconds of a processor."
    )
    chat_template: Path | None = flag_field(
        None, "File with a chat template (jinja2), in place of the model's own."
    )
    override_generation_config: str | None = flag_field(
        None,
        "Sampling of requests that leave it open, in place of the model's own: JSON, such as "
        '{"temperature": 0.7}.',
    )
    tool_call_parser: str = flag_field(
        "auto",
        "How the model writes tool calls: gemma4, hermes, llama3_json, mistral, "
        "phi4_mini_json, qwen3_xml.",
    )
    reasoning_parser: str = flag_field(
        "auto", "How the model marks reasoning: deepseek_r1, gemma4, qwen3, or none."
    )
    max_body: str = flag_field("8MiB", "Maximum size of a request body.")
    max_file: str = flag_field("200MiB", "Maximum size of a file that is uploaded for a batch.")
    max_stored: str = flag_field("2GiB", "Maximum size of all files of one key together.")
    receive_timeout: float = flag_field(
        30.0, "Seconds within which a request must have arrived completely."
    )
    stall_timeout: float = flag_field(
        60.0, "Seconds after which a client that does not read is disconnected."
    )
    step_timeout: float = flag_field(
        300.0, "Seconds after which a step counts as hung, and /health fails."
    )
    shutdown_timeout: float = flag_field(
        30.0, "Seconds that running requests may take to finish at shutdown."
    )
    cors_origin: list[str] | None = flag_field(
        None,
        "Origin whose web pages may call, such as https://page.example; repeatable; '*' is "
        "any. Default: pages of this machine, if only it can reach the server.",
    )
    page: bool = flag_field(True, "Serve the web pages, at / and /plan.")
    log_format: Literal["text", "json"] = flag_field("text", "Format of log lines.")
    log_content: bool = flag_field(False, "Log prompts and answers too.")

    @property
    def sampling(self) -> dict[str, Any]:
        """What ``override_generation_config`` says. Raises ValueError."""
        try:
            given = json.loads(self.override_generation_config or "{}")
            if not isinstance(given, dict) or given.keys() - set(RECOMMENDED):
                raise ValueError(f"write a JSON object with some of {', '.join(RECOMMENDED)}")
            with_recommended(given)
        except ValueError as error:
            raise ValueError(f"--override-generation-config: {error}") from None
        return given

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        _ = self.sampling
        for name in ("max_requests_per_minute", "max_tokens_per_minute", "max_concurrent_requests"):
            _positive(name, getattr(self, name))
        for name in ("max_grammar_bytes", "grammar_timeout"):
            _positive(name, getattr(self, name))
        for name in ("max_queued_requests", "max_n", "receive_timeout"):
            _positive(name, getattr(self, name))
        for name in ("max_stop", "max_logprobs", "max_temperature", "max_logit_bias"):
            if (value := getattr(self, name)) < 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is {value}: it cannot be below 0")
        for name in ("stall_timeout", "step_timeout", "silence_timeout", "target_requests"):
            _positive(name, getattr(self, name))
        self._check_places()
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ValueError(f"--root-path is {self.root_path!r}: write it as /llm or /a/b")
        if (self.ssl_keyfile or self.ssl_keyfile_password) and not self.ssl_certfile:
            raise ValueError("--ssl-keyfile and --ssl-keyfile-password need --ssl-certfile")
        for host in self.allowed_host or ():
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_.:\[\]-]+", host):
                raise ValueError(
                    f"--allowed-host is {host!r}: write only a host name, such as "
                    "chat.example.org, or *.example.org"
                )
        format_named(self.tool_call_parser, "")
        if self.reasoning_parser not in REASONING_PARSERS:
            names = ", ".join(REASONING_PARSERS)
            raise ValueError(
                f"there is no reasoning parser {self.reasoning_parser!r}: use one of {names}"
            )
        for name, port in (("--port", self.port), ("--grpc-port", self.grpc_port or 0)):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"{name} is {port}: it must be from 0 to 65535")
        if self.shutdown_timeout < 0:
            raise ValueError(f"--shutdown-timeout is {self.shutdown_timeout}: it cannot be below 0")
        parse_bytes(self.max_body, "--max-body")
        parse_bytes(self.max_file, "--max-file")
        parse_bytes(self.max_stored, "--max-stored")
        parse_bytes(self.models_memory or 1, "--models-memory")
        _positive("audit_rotate", parse_bytes(self.audit_rotate, "--audit-rotate"))
        for name in ("keep_alive", "idle_release", "audit_keep"):
            try:
                parse_seconds(getattr(self, name) or 1)
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from None
        _positive("idle_release", self.idle_release_s)
        _positive("audit_keep", self.audit_keep_s)
        for name in ("audit_key", "audit_strict"):
            if getattr(self, name) and self.audit is None:
                raise ValueError(f"--{name.replace('_', '-')} needs --audit and a folder")

    def _check_places(self) -> None:
        least, most = self.replica_range
        is_here = self.place == "here"
        if least < most and is_here:
            raise ValueError(
                f"--replicas {self.replicas} needs --place ray: here all servers are started at "
                f"once, such as --replicas {most}"
            )
        if is_here and self.ray is not None:
            raise ValueError("--ray says where servers are placed: say --place ray too")
        if not is_here and self.fleet_key_file is None:
            raise ValueError(
                "--place ray needs --fleet-key-file: a file with the fleet's key, which has the "
                "same path on each machine"
            )
        if self.spot != "off" and is_here and not self.join:
            raise ValueError(
                f"--spot {self.spot} is for servers whose streams can go on elsewhere: say --join "
                "or --place ray too"
            )
        if not is_here and (self.join or self.uds):
            raise ValueError("--place ray is for a router with an address: leave out --join, --uds")

    @property
    def replica_range(self) -> tuple[int, int]:
        """``replicas`` as the least and the most. Raises ValueError."""
        match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", self.replicas.strip())
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise ValueError(
                f"--replicas is {self.replicas!r}: write a number from 1, or from the fewest to "
                "the most, such as 1..16"
            )
        return least, most

    @property
    def num_replicas(self) -> int:
        """``replicas`` as a number: the most."""
        return self.replica_range[1]

    @property
    def is_router(self) -> bool:
        """Whether servers of one model need a router before them."""
        return self.num_replicas > 1 or (self.fleet_key_file is not None and not self.join)

    @property
    def max_body_bytes(self) -> int:
        """``max_body`` as a number."""
        return parse_bytes(self.max_body, "--max-body")

    @property
    def max_file_bytes(self) -> int:
        """``max_file`` as a number."""
        return parse_bytes(self.max_file, "--max-file")

    @property
    def max_stored_bytes(self) -> int:
        """``max_stored`` as a number."""
        return parse_bytes(self.max_stored, "--max-stored")

    @property
    def keep_alive_s(self) -> float | None:
        """``keep_alive`` in seconds; below 0 for ever; None if it was not given."""
        return None if self.keep_alive is None else parse_seconds(self.keep_alive)

    @property
    def idle_release_s(self) -> float | None:
        """``idle_release`` in seconds; None for never."""
        return None if self.idle_release is None else parse_seconds(self.idle_release)

    @property
    def audit_rotate_bytes(self) -> int:
        """``audit_rotate`` as a number."""
        return parse_bytes(self.audit_rotate, "--audit-rotate")

    @property
    def audit_keep_s(self) -> float:
        """``audit_keep`` in seconds."""
        return parse_seconds(self.audit_keep)

    @property
    def models_memory_bytes(self) -> int | None:
        """``models_memory`` as a number."""
        return parse_bytes(self.models_memory, "--models-memory") if self.models_memory else None


def parse_seconds(time: str | float) -> float:
    """Return a time in seconds: a number, or text such as "30s", "5m" or "1h30m".

    Raises ValueError if it is neither.
    """
    text = str(time).strip().lower()
    if re.fullmatch(r"-?\d{1,12}(\.\d+)?", text):
        return float(text)
    sign, number = "-?", r"\d{1,12}(?:\.\d+)?"
    if isinstance(time, bool) or not re.fullmatch(f"{sign}(?:{number}(?:ms|s|m|h|d))+", text):
        raise ValueError(f"{time!r} is not a time: write seconds, or a number with s, m, h or d")
    parts = re.findall(f"({number})(ms|s|m|h|d)", text)
    total_s = sum(float(value) * _SECONDS[unit] for value, unit in parts)
    return -total_s if text[0] == "-" else total_s


def _positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be above 0")
