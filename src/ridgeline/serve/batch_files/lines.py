"""The lines of a batch: requests as OpenAI's form has them or prompts alone, and what answers took.

A line that is no request comes out with the reason, and costs no other line anything. Whether a
body is right is not asked here: the route that answers it says so.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
_PROMPT_FIELDS = {  # where a prompt alone goes
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/moderations": "input",
    "/v1/responses": "input",
}
_TABLES = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_MOST_ID_CHARS = 512
_MOST_CELL_CHARS = 1 << 23
_MOST_LINE_BYTES = 8 << 20  # as a request over HTTP may have

# What an answer calls its tokens: completions and vectors, and then responses.
_READ = ("prompt_tokens", "input_tokens")
_CACHED = ("prompt_tokens_details", "input_tokens_details")
_WRITTEN = ("completion_tokens", "output_tokens")
_THOUGHT = ("completion_tokens_details", "output_tokens_details")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request of a file, or what is there in place of one.

    Attributes:
        index: counts requests from 0; blank lines are none.
        number: the line in the file, from 1, on which it ends.
        custom_id: what its answer will be found by; None where there is none.
        url: the route that answers it.
        body: its JSON.
        problem: why it is no request, "" if it is one.
    """

    index: int
    number: int
    custom_id: str | None
    url: str
    body: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A file of requests, and how to read it.

    Attributes:
        path: the file; its suffix says what it is: .jsonl, .csv, .tsv, else a prompt on each line.
        column: which column of a table, or field of JSON lines, has the prompts; "" means that JSON
            lines are requests.
        url: where requests go that are prompts alone, and the only place that others may name;
            "" takes any of ``URLS``.
        fields: fields that each body has unless it has its own.
    """

    path: Path
    column: str = ""
    url: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be read this way, before work begins."""
        if self.url and self.url not in URLS:
            raise ValueError(f"there is no route {self.url!r} for batches: use one of {_listed()}")
        if self._are_prompts and self._prompt_url not in _PROMPT_FIELDS:
            raise ValueError(f"a plain prompt is not a request for {self.url}: write JSON lines")
        if self._separator and not self.column:
            raise ValueError(
                f"{self.path.name} is a table: name the column of the prompts with --column"
            )
        if self.column and not (self._separator or self._is_json):
            raise ValueError(f"{self.path.name} has one prompt per line, so it has no columns")

    @property
    def _separator(self) -> str:
        return _TABLES.get(self.path.suffix.lower(), "")

    @property
    def _is_json(self) -> bool:
        return self.path.suffix.lower() in _JSON_LINES

    @property
    def _are_prompts(self) -> bool:
        return bool(self.column) or not self._is_json

    @property
    def _prompt_url(self) -> str:
        return self.url or URLS[0]

    def digest(self) -> str:
        """Return what stays the same as long as the same file is read in the same way."""
        with self.path.open("rb") as file:
            of_file = hashlib.file_digest(file, "sha256").hexdigest()
        how = (self.path.suffix.lower(), self.column, self.url, sorted(self.fields.items()))
        return hashlib.sha256(repr((of_file, how)).encode()).hexdigest()

    def lines(self) -> Iterator[RequestLine]:
        """Yield the requests in order. Raises ValueError or OSError if it cannot be read at all."""
        ids: set[str] = set()
        read = self._of_table if self._separator else self._of_lines
        for index, (number, record) in enumerate(read()):
            custom_id, url, body = None, "", dict[str, Any]()
            try:
                if isinstance(record, _Wrong):
                    raise record
                custom_id = record.get("custom_id")
                custom_id, url, body = self._checked(record, ids)
                problem = ""
            except _Wrong as wrong:
                problem = str(wrong)
            known_id = custom_id if isinstance(custom_id, str) else None
            if known_id is not None:
                ids.add(known_id)
            yield RequestLine(index, number, known_id, url, body, problem)

    def _checked(self, record: Mapping[str, Any], ids: set[str]) -> tuple[str, str, dict[str, Any]]:
        """Return id, url and body of a request. Raises _Wrong."""
        custom_id, url, body = (record.get(name) for name in ("custom_id", "url", "body"))
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID_CHARS:
            raise _Wrong(f"custom_id must be text of 1 to {_MOST_ID_CHARS} characters")
        if custom_id in ids:
            raise _Wrong(f"custom_id {custom_id!r:.80} is that of an earlier line")
        if (method := record.get("method", "POST")) != "POST":
            raise _Wrong(f"method is {method!r:.80}: it must be POST")
        if url not in URLS:
            raise _Wrong(f"url is {url!r:.80}: it must be one of {_listed()}")
        if self.url and url != self.url:
            raise _Wrong(f"url is {url}: all requests of this batch go to {self.url}")
        if not isinstance(body, dict):
            raise _Wrong("body must be a JSON object")
        if body.get("stream"):
            raise _Wrong("body.stream is not possible in a batch: answers are written whole")
        return custom_id, url, {**self.fields, **body}

    def _of_lines(self) -> Iterator[tuple[int, dict[str, Any] | _Wrong]]:
        """Yield a line's number with its request, or with what is wrong with it."""
        with self.path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")  # Windows' programs begin so
                if not data.strip():
                    continue
                if len(data) > _MOST_LINE_BYTES:
                    yield number, _Wrong(f"it is longer than {_MOST_LINE_BYTES >> 20} MiB")
                    continue
                try:
                    text = data.decode()
                    yield (
                        number,
                        self._of_json(number, text)
                        if self._is_json
                        else (self._of_prompt(f"line-{number}", text.rstrip("\r\n"))),
                    )
                except UnicodeDecodeError as error:
                    yield number, _Wrong(f"it is not UTF-8: {error.reason} at byte {error.start}")
                except _Wrong as wrong:
                    yield number, wrong

    def _of_json(self, number: int, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise _Wrong(f"it is not JSON: {error}") from None
        except RecursionError:
            raise _Wrong("its JSON is nested too deeply") from None
        if not isinstance(value, dict):
            raise _Wrong("it must be a JSON object")
        if not self.column:
            return value
        return self._of_prompt(value.get("custom_id", f"line-{number}"), value.get(self.column))

    def _of_table(self) -> Iterator[tuple[int, dict[str, Any] | _Wrong]]:
        """Yield a row's last line with its request, or with what is wrong with it."""
        csv.field_size_limit(_MOST_CELL_CHARS)
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = csv.DictReader(file, delimiter=self._separator, restval=None)
            try:
                if self.column not in (names := rows.fieldnames or ()):
                    columns = ", ".join(map(repr, names)) or "none"
                    raise ValueError(
                        f"{self.path.name} has no column {self.column!r}; it has {columns}"
                    )
                for number, row in enumerate(rows, start=1):
                    try:
                        own_id = row.get("custom_id") or f"row-{number}"
                        yield rows.line_num, self._of_prompt(own_id, row[self.column])
                    except _Wrong as wrong:
                        yield rows.line_num, wrong
            except csv.Error as error:
                raise ValueError(f"{self.path.name}, line {rows.line_num}: {error}") from None

    def _of_prompt(self, custom_id: Any, prompt: Any) -> dict[str, Any]:
        """Return the request that a prompt alone stands for. Raises _Wrong."""
        is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        if not isinstance(prompt, str) and not is_chat:
            raise _Wrong(f"{self.column} must be text, or a list of messages")
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise _Wrong(f"{self.column or 'the prompt'} is empty")
        if isinstance(prompt, str) and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise _Wrong("it is not UTF-8")
        name = _PROMPT_FIELDS[self._prompt_url]
        if name == "messages" and not is_chat:
            prompt = [{"role": "user", "content": prompt}]
        return {"custom_id": custom_id, "url": self._prompt_url, "body": {name: prompt}}


class _Wrong(Exception):
    """Why a line is no request."""


def _listed() -> str:
    return ", ".join(URLS)


def usage_of(lines: Iterable[bytes]) -> dict[str, Any]:
    """Return the usage of a batch whose output has these lines, added up as OpenAI writes it."""
    total: Counter[str] = Counter()
    for line in lines:
        usage = json.loads(line)["response"]["body"].get("usage") or {}
        total["read"] += _first(usage, _READ) or 0
        total["written"] += _first(usage, _WRITTEN) or 0
        total["cached"] += (_first(usage, _CACHED) or {}).get("cached_tokens", 0)
        total["thought"] += (_first(usage, _THOUGHT) or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": total["read"],
        "input_tokens_details": {"cached_tokens": total["cached"]},
        "output_tokens": total["written"],
        "output_tokens_details": {"reasoning_tokens": total["thought"]},
        "total_tokens": total["read"] + total["written"],
    }


def _first(usage: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((usage[name] for name in names if name in usage), None)
