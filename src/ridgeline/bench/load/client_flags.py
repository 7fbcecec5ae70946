"""Whom the load generator asks, and how: the flags, and what they make of each request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal, Protocol

from ridgeline.engine.setup.options import flag_field
from ridgeline.foresight.simulator.workload import Planned


class Failed(Exception):
    """The server says that a request failed, or its answer is not one."""


class Endpoint(Protocol):
    """What the client must know of whom it asks."""

    @property
    def url(self) -> str:
        """Address of the endpoint itself."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of every request."""

    @property
    def timeout_s(self) -> float:
        """Longest time of a request, in seconds."""

    def body(self, planned: Planned, said: Sequence[tuple[str, str]] = ()) -> bytes:
        """Return the JSON of a request behind what was said before."""


def headers_of(api_key: str | None) -> dict[str, str]:
    """Return the headers of a request."""
    plain = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return plain | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def check_base_url(base_url: str) -> None:
    """Raise ValueError unless an address has a scheme and a host."""
    if not re.match("https?://[^/]", base_url):
        raise ValueError(f"--base-url {base_url} is not like http://127.0.0.1:8000")


def read_extra_body(text: str) -> dict[str, Any]:
    """Return the fields that --extra-body adds; ValueError if it is not a JSON object."""
    try:
        return dict(json.loads(text).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--extra-body {text} is not a JSON object") from error


@dataclass(frozen=True, slots=True)
class AskedServer:
    """Where requests go, and what all have in common; ``url`` is that of the endpoint itself."""

    url: str
    is_chat: bool
    headers: Mapping[str, str]
    fields: Mapping[str, Any]
    timeout_s: float

    def body(self, planned: Planned, said: Sequence[tuple[str, str]] = ()) -> bytes:
        """Return the JSON of a request; fields that are None are left out.

        ``said`` has the prompts and answers of the session's turns before.
        """
        prompt: dict[str, Any] = {"prompt": planned.prompt}
        if self.is_chat:
            messages = [
                {"role": role, "content": text}
                for turn in said
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            prompt = {"messages": [*messages, {"role": "user", "content": planned.prompt}]}
        elif said:
            texts = [text for turn in said for text in turn]
            prompt = {"prompt": " ".join([*texts, str(planned.prompt)])}
        body = prompt | {"max_tokens": planned.max_tokens} | dict(self.fields)
        return json.dumps({name: v for name, v in body.items() if v is not None}).encode()


@dataclass(frozen=True, kw_only=True)
class ClientFlags:
    """Whom to ask, and how; each field is a flag of the command line."""

    base_url: str = flag_field(
        MISSING, "Address of the server, such as http://127.0.0.1:8000, with or without /v1."
    )
    model: str = flag_field(MISSING, "Name of the model in requests.")
    api_key: str | None = flag_field(None, "Bearer token.", envvar="OPENAI_API_KEY")
    endpoint: Literal["chat", "completions"] = flag_field("chat", "Which endpoint to call.")
    temperature: float = flag_field(0.0, "0 is greedy.")
    top_k: int | None = flag_field(None, "Sample only from the k likeliest tokens.")
    top_p: float | None = flag_field(
        None, "Sample only from the likeliest tokens that make up this probability."
    )
    min_p: float | None = flag_field(
        None, "Drop tokens below this share of the likeliest token's probability."
    )
    ignore_eos: bool = flag_field(False, "Generate past the end of text.")
    extra_body: str = flag_field("{}", "JSON fields to add to requests; null removes one.")
    timeout_s: float = flag_field(600.0, "Longer requests count as failed.")

    def __post_init__(self) -> None:
        """Raise ValueError for flags that are wrong with any server."""
        check_base_url(self.base_url)
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout-s is {self.timeout_s}; it must be above 0")
        if not self.temperature >= 0:
            raise ValueError(f"--temperature is {self.temperature}; it must be at least 0")
        read_extra_body(self.extra_body)

    def check(self, planned: Planned) -> None:
        """Raise ValueError if the endpoint cannot take such a prompt."""
        if self.endpoint == "chat" and not isinstance(planned.prompt, str):
            raise ValueError(
                "this trace has token ids for prompts, which chat cannot take: --endpoint "
                "completions sends them, --lengths-from with --request-rate takes their lengths"
            )

    def target(self) -> AskedServer:
        """Return what all requests have in common."""
        is_chat = self.endpoint == "chat"
        sampling = {
            name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        return AskedServer(
            url=self.base_url.rstrip("/").removesuffix("/v1")
            + ("/v1/chat/completions" if is_chat else "/v1/completions"),
            is_chat=is_chat,
            headers=headers_of(self.api_key),
            fields={"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
            | sampling
            | {"ignore_eos": self.ignore_eos or None}
            | read_extra_body(self.extra_body),
            timeout_s=self.timeout_s,
        )
