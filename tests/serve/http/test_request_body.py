"""What a large body costs the server, and what it is told: the whole of 7 MB, in a real process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import BodyRoute, read
from tests.lines_run import at_most_lines
from tests.serve.serving import JSON, serving
from tests.serve.test_main import cpu_s, process
from tests.waiting import connected

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BYTES = 7_000_000
CPU_S = 0.9  # thrice what is wanted: other work slows this down
MEMORY_MIB = 100


def _list(item: str, last: str = "0") -> Callable[[], str]:
    """Return what makes a list of 7 MB of an item, with something else at its end."""
    return lambda: f"[{(item + ',') * (BYTES // (len(item) + 1))}{last}]"


def _map(value: str) -> Callable[[], str]:
    return lambda: "{" + ",".join(f'"{i}":{value}' for i in range(BYTES // 11)) + "}"


def _texts() -> str:
    return "[" + ",".join(f'"{i:06}"' for i in range(BYTES // 9)) + "]"


def _messages() -> str:
    turn = '{"role":"user","content":"%06d"}'
    return "[" + ",".join(turn % i for i in range(BYTES // 40)) + "]"


CASES: dict[str, tuple[str, str, Callable[[], str], str]] = {
    "zeros": (COMPLETE, "prompt", _list("0"), "prompt"),
    "zeros and a string": (COMPLETE, "prompt", _list("0", '"a"'), "prompt"),
    "ids that are large": (COMPLETE, "prompt", _list("1234567"), "prompt"),
    "ids, then a string": (COMPLETE, "prompt", lambda: f'[{"7," * 200_000}"a"]', "prompt[200000]"),
    "ids in lists": (COMPLETE, "prompt", _list("[" + "7," * 10_000 + "7]"), "prompt"),
    "numbers with fractions": (COMPLETE, "prompt", _list("1.5"), "prompt[0]"),
    "empty strings": (COMPLETE, "prompt", _list('""'), "prompt"),
    "texts": (COMPLETE, "prompt", _texts, "prompt"),
    "empty lists": (COMPLETE, "prompt", _list("[]"), "prompt"),
    "a long text": (COMPLETE, "prompt", lambda: '"' + "[,{" * (BYTES // 3) + '"', "prompt"),
    "escapes": (COMPLETE, "prompt", lambda: '"' + r"\"\\" * (BYTES // 4) + '"', "prompt"),
    "stops": (COMPLETE, "stop", _list('""'), "stop"),
    "a long stop": (COMPLETE, "stop", lambda: '"' + "a" * BYTES + '"', "stop"),
    "stop ids": (COMPLETE, "stop_token_ids", _list("7"), "stop_token_ids"),
    "stop ids that are none": (COMPLETE, "stop_token_ids", _list('""'), "stop_token_ids[0]"),
    "biases": (COMPLETE, "logit_bias", _map("1"), "logit_bias"),
    "biases that are none": (COMPLETE, "logit_bias", _map('""'), "logit_bias.0"),
    "metadata": (COMPLETE, "metadata", _map("1"), "metadata"),
    # Read up to what a body may have, and no further.
    "unknown fields": (CHAT, "0", lambda: "1," + _map("1")()[1:-1], "60087"),
    "unknown fields of a message": (CHAT, "messages", lambda: f"[{_map('1')()}]", "messages"),
    "numbers as messages": (CHAT, "messages", _list("0"), "messages[0]"),
    "empty messages": (CHAT, "messages", _list("{}"), "messages"),
    "messages": (CHAT, "messages", _messages, "messages"),
    "parts": (
        CHAT,
        "messages",
        lambda: f'[{{"role":"user","content":{_list("0")()}}}]',
        "messages[0].content[0]",
    ),
}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[Popen[str], int]]:
    with process(model) as (server, url):
        yield server, int(url.rpartition(":")[2])


@pytest.mark.parametrize("name", CASES)
def test_a_large_body_costs_little_and_the_field_at_fault_is_named(
    server: tuple[Popen[str], int], name: str
) -> None:
    path, field, make, param = CASES[name]
    given = {"prompt": '"a"', "messages": '[{"role":"user","content":"a"}]'}
    rest = {"prompt": given["prompt"]} if path == COMPLETE else {"messages": given["messages"]}
    fields = {**rest, field: make()}
    body = "{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}"
    pid, port = server[0].pid, server[1]
    _forget_peak(pid)
    before_s, (before_mib, _) = cpu_s(pid), _memory_mib(pid)
    with connected(port) as connection:
        connection.request("POST", path, body.encode(), JSON)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert len(error["message"]) < 300
    assert cpu_s(pid) - before_s < CPU_S
    assert _memory_mib(pid)[1] - before_mib < MEMORY_MIB


def _memory_mib(pid: int) -> tuple[float, float]:
    """Return what a process holds, and the most that it held."""
    text = Path(f"/proc/{pid}/status").read_text()
    now, peak = (int(re.findall(rf"{name}:\s+(\d+)", text)[0]) for name in ("VmRSS", "VmHWM"))
    return now / 1024, peak / 1024


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def test_a_number_counts_by_its_digits_too() -> None:
    """Each of 4,000 digits takes a tenth of a millisecond in which nothing else runs."""
    adapter = TypeAdapter[dict[str, Any]](dict[str, Any])
    assert read(adapter, b'{"x": [' + b"9" * 4000 + b"]}")["x"] == [10**4000 - 1]
    with pytest.raises(ApiError, match="x has too many values"):
        read(adapter, b'{"x": [' + b",".join([b"9" * 4000] * 200) + b"]}")


def test_a_message_that_has_nothing_to_drop_costs_little_beside_its_fields() -> None:
    """A body may have 8,000, and what they dropped is looked for on the event loop."""
    adapter, num = TypeAdapter[ChatRequest](ChatRequest), 1000
    data = json.dumps({"messages": [{"role": "user", "content": "a"}] * num}).encode()
    with at_most_lines(70 * num):
        body: ChatRequest = read(adapter, data)
    with at_most_lines(50 * num):
        assert body.ignored() == []


def test_what_each_message_drops_is_named_once() -> None:
    said: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}
    messages = [{"role": "user", "content": "a"}, said | {"strange": 1}, said]
    body = read(TypeAdapter[ChatRequest](ChatRequest), json.dumps({"messages": messages}).encode())
    assert body.ignored() == ["messages.strange", "messages.content.odd"]


def lists_in(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every list in a schema of pydantic's core, and where it is."""
    for key, part in node.items() if isinstance(node, dict) else enumerate(node):
        if key not in ("metadata", "serialization") and isinstance(part, dict | list | tuple):
            yield from lists_in(part, f"{path}.{key}")
    if isinstance(node, dict) and node.get("type") == "list":
        yield path, node


def test_no_list_of_any_body_collects_a_complaint_about_each_of_its_items(model: Path) -> None:
    with serving(model) as served:
        routes = [
            route for route in served.running.parts.app.routes if isinstance(route, BodyRoute)
        ]
    bodies = [route.body_field.field_info for route in routes if route.body_field]
    assert len(bodies) > 15
    for info in bodies:
        kind: Any = Annotated[info.annotation, info]
        for path, one in lists_in(TypeAdapter(kind).core_schema):
            assert one.get("fail_fast"), (info.annotation, path)
