"""What any body costs: every field of every route at its extremes, by one server and by a router.

The fields are those of the server's own document, at any depth; of a config that a plan is asked
for, those of published models. Queries, uploads and messages of gRPC are sent too. Servers are
processes of their own, so that their time and memory can be told.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle
from operator import gt
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from ridgeline.engine.setup.home import default_home
from ridgeline.serve.http.request_body import UPLOADS
from tests.faults import messages
from tests.faults.fields import HOLE, INFER, Fields
from tests.faults.silence import PROGRAM, Silence
from tests.fleet.test_router import routing
from tests.model.cost.published_configs import PUBLISHED
from tests.own_home import own_home
from tests.serve.conftest import write_coder
from tests.serve.forms import FORM, FORMS, form, pressed_nothing
from tests.serve.serving import JSON
from tests.serve.test_main import cpu_s, process
from tests.waiting import connected, free_port

PLAN = "/v1/plan"
SAVE = "/slots/1?action=save"
_MODEL = "tiny"
CHAT_BODY = {"messages": [{"role": "user", "content": "a"}]}
TEXTS = {"query": "a", "documents": ["b"]}
PAIR = {"text_1": "a", "text_2": "b"}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT_BODY | {"max_completion_tokens": 2},
    "/v1/chat/completions/input_tokens": CHAT_BODY,
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": CHAT_BODY | {"max_tokens": 2},
    "/v1/messages/count_tokens": CHAT_BODY,
    "/v1/embeddings": {"input": "a"},
    "/v1/moderations": {"input": "a"},
    "/v1/rerank": TEXTS,
    "/v2/rerank": TEXTS,
    "/rerank": TEXTS,
    "/v1/score": PAIR,
    "/score": PAIR,
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [40]},
    "/completion": {"prompt": "a", "n_predict": 2},
    "/completions": {"prompt": "a", "n_predict": 2},
    "/apply-template": CHAT_BODY,
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions"},
    "/api/chat": CHAT_BODY | {"stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 2}},
    "/api/show": {},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/create": {"from": _MODEL, "system": "a", "stream": False},
    "/api/copy": {"source": _MODEL, "destination": "a"},
    "/api/pull": {"stream": False},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/sleep": {"level": 1},
    SAVE: {"filename": "a"},
    INFER: {"inputs": [TENSOR], "parameters": {"max_tokens": 2}},
    "/v2/models/{model}/generate": {"text_input": "a", "max_tokens": 2},
    "/v2/models/{model}/generate_stream": {"text_input": "a", "max_tokens": 2},
    PLAN: {"on": "l4"},
}
QUERIES = (  # method, path and name of what is read from an address
    *(("GET", "/v1/files", name) for name in ("limit", "after", "order", "purpose")),
    *(("GET", "/v1/batches", name) for name in ("limit", "after")),
    ("GET", "/v1/requests/x/explain", "format"),
    ("GET", "/v2/models/{model}/config", "version"),
    ("GET", "/props", "model"),
    *(("GET", "/v1/memory", name) for name in ("model", "replica")),
    ("POST", "/slots/1", "action"),
    *(("POST", "/v1/sleep", name) for name in ("level", "wait")),
)
WRITTEN = (  # in an address, where no more than 64 KiB fit
    *("-1", "0", "1", str(2**31), str(2**63), "0.5", "1e400", "NaN", "true", "null", "[]", "{}"),
    *("", "\0", "9" * 400, "9" * 60_000, "a" * 60_000, "[" * 15_000, "'" * 15_000, "1," * 15_000),
)
_HIDDEN = (  # not in the document
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/sleep", SAVE),
)
_LONG = 1_000_000
EXTREMES = {  # as they stand in a body
    **{str(n): str(n) for n in (-1, 0, 1, 127, 128, 129, 2**31, 2**32, 2**63, -(2**63), 0.5)},
    **{text: text for text in ("1e308", "-1e308", "1e400", "NaN", "Infinity", "true", "null")},
    **{text: text for text in ('"5"', '""', "[]", "{}", "[[]]", "[null]", '"\\u0000"', '"nan"')},
    "400 digits": "9" * 400,
    "4,000 digits": "9" * 4000,
    "400 digits as text": '"' + "9" * 400 + '"',
    "5,000 digits as text": '"' + "9" * 5000 + '"',
    "a long text": '"' + "a" * _LONG + '"',
    "a long text of quotes": '"' + "'" * _LONG + '"',
    "many commas": '"' + "l4," * (_LONG // 3) + 'x"',
    "many numbers": "[" + "1," * 200_000 + "1]",
    "long numbers": "[" + ("9" * 4000 + ",") * 250 + "1]",
    "many texts": "[" + '"a",' * 60_000 + '"a"]',
    "many objects": "[" + "{}," * 60_000 + "{}]",
    "many keys": "{" + ",".join(f'"k{i}":1' for i in range(60_000)) + "}",
    "deep": "[" * 150 + "]" * 150,
}
_FULL = 8_300_000  # bytes: as many as a body may have
FULL = {  # what fills a body, with how its field begins and ends
    "lists": ("[", "[],", "[]]"),
    "numbers": ("[", "1,", "1]"),
    "long numbers": ("[", "9" * 400 + ",", "1]"),
    "objects": ("[", '{"a":1},', "{}]"),
    "keys": ("{", '"k":1,', '"k":1}'),
}
TENSORS = {  # behind a body's JSON: type, what they are full of, and how many there are
    "empty texts": ("BYTES", bytes(4), 1),
    "short texts": ("BYTES", b"\1\0\0\0a", 1),
    "one text": ("BYTES", (_FULL - 4).to_bytes(4, "little") + b"a" * (_FULL - 4), 1),
    "small numbers": ("UINT8", b"\7", 1),
    "long numbers": ("FP64", b"\7" * 8, 1),
    "many tensors": ("INT8", b"\7", 200),
}
# Seconds, MiB and seconds of the loop's silence. Beside other tests a processor does less in its
# time: what fails there takes ten times too long.
LIMITS = (3.0, 100.0, 0.5) if "PYTEST_VERSION" in os.environ else (0.3, 100.0, 0.05)
_ANSWERS = re.compile(
    "completions?|responses|messages$|chat$|generate(_stream)?$|[iI]nfer$|infill$"
)  # take steps


@dataclass(frozen=True)
class Asked:
    """A request, and in few words what is extreme of it."""

    path: str
    field: str
    how: str
    body: bytes = b""
    method: str = "POST"
    kind: str = JSON["content-type"]
    coding: str = "identity"
    head: str | None = None  # where the JSON of a body ends, if tensors stand behind it
    message: messages.Message | None = None  # of gRPC, in place of a body


class Cost:
    """What the requests to one process cost it."""

    def __init__(
        self, pid: int, port: int, silence: Silence, channel: grpc.Channel | None = None
    ) -> None:
        self._pid, self._port, self.silence, self._channel = pid, port, silence, channel

    def _mib(self, name: str) -> float:
        text = Path(f"/proc/{self._pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+)", text)[0]) / 1024

    def send(self, asked: Asked) -> tuple[int, bytes, float, float]:
        """Return status, answer, and what the body cost in seconds and MiB, but for steps."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # forget the peak of memory
        before_s, before_mib = cpu_s(self._pid), self._mib("VmRSS")
        self.silence.longest_s = 0.0
        if asked.message is None:
            status, text = self._post(asked)
        else:
            assert self._channel is not None
            status, text = messages.call(self._channel, asked.message)
        if status == 200 and _ANSWERS.search(asked.path):
            return status, text, 0.0, 0.0
        return status, text, cpu_s(self._pid) - before_s, self._mib("VmHWM") - before_mib

    def _post(self, asked: Asked) -> tuple[int, bytes]:
        path = asked.path.replace("{model}", _MODEL)
        headers = {"content-type": asked.kind, "content-encoding": asked.coding}
        if asked.head:
            headers["inference-header-content-length"] = asked.head
        with connected(self._port) as connection:
            connection.request(asked.method, path, asked.body, headers if asked.body else {})
            response = connection.getresponse()
            return response.status, response.read()


def _document(port: int) -> dict[str, Any]:
    with connected(port) as connection:
        connection.request("GET", "/openapi.json")
        document: dict[str, Any] = json.loads(connection.getresponse().read())
    return document


def _fields(document: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the fields of each route that takes a body, with what the body has of each."""
    fields = Fields(document)
    found = {path: {name: {name: HOLE} for name in GOOD[path]} for path in _HIDDEN}
    found |= {path: fields.of(path, schema) for path, schema in fields.bodies().items()}
    for path in ("/v2/rerank", "/rerank", "/score"):  # other names of routes
        found[path] = found["/v1/score" if "score" in path else "/v1/rerank"]
    assert set(found) == set(GOOD), set(found) ^ set(GOOD)
    return found


def body_with(path: str, inside: dict[str, Any], value: str, rng: random.Random) -> bytes:
    """Return a good body but for what is ``inside``, or of a plan but for one field of a config."""
    body = dict(GOOD[path])
    if "lora" not in path and "{" not in path:
        body["model"] = _MODEL
    if path == PLAN and "model" in inside:
        config = dict(rng.choice(list(PUBLISHED.values()))["config"])
        config[rng.choice([*config, "num_nextn_predict_layers", "quantization_config"])] = HOLE
        inside = {"model": config}
    return json.dumps(body | inside, ensure_ascii=False).replace(f'"{HOLE}"', value).encode()


def full_body(path: str, how: str) -> bytes:
    """Return a good body but for one field more, which is as long as a body may be."""
    begin, inside, end = FULL[how]
    start = json.dumps(GOOD[path] | {"model": _MODEL})[:-1]
    return f'{start}, "x": {begin}{inside * (_FULL // len(inside))}{end}}}'.encode()


def with_tensors(how: str) -> Asked:
    """Return a request that is as long as a body may be by the tensors behind its JSON."""
    datatype, inside, num_tensors = TENSORS[how]
    data = inside * (_FULL // num_tensors // len(inside))
    one = {"name": "text_input", "datatype": datatype, "shape": [len(data)]}
    one |= {"parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [one] * num_tensors}).encode()
    return Asked(INFER, "tensors", how, head + data * num_tensors, head=str(len(head)))


def _all_asked(port: int, count: int, rng: random.Random) -> Iterator[Asked]:
    """Yield so many requests: of 18, eight have a field at its extremes, five one inside."""
    fields = _fields(_document(port))
    cases = [(path, name, how) for path in fields for name in fields[path] for how in EXTREMES]
    rng.shuffle(cases)
    at_top = cycle([case for case in cases if "." not in case[1]])
    inside = cycle([case for case in cases if "." in case[1]])
    full = [(path, how) for path in fields for how in FULL]
    rng.shuffle(full)
    queries = [(*query, text) for query in QUERIES for text in WRITTEN]
    rng.shuffle(queries)
    of_grpc = list(messages.extremes(_MODEL, _FULL))
    rng.shuffle(of_grpc)
    odd = chain(
        [Asked(INFER, "", "nothing", pressed_nothing(_FULL // 4), coding="deflate")],
        (with_tensors(how) for how in TENSORS),
        (Asked(UPLOADS, name, "", form(name, _FULL), kind=FORM) for name in FORMS),
    )
    wholes, written, calls = cycle(full), cycle(queries), cycle(of_grpc)
    for i in range(count):
        if i % 9 == 0:
            path, how = next(wholes)
            yield Asked(path, "", how, full_body(path, how))
        elif i % 18 == 4 and (asked := next(odd, None)):
            yield asked
        elif i % 18 == 7:
            one = next(calls)
            yield Asked(f"/{one.method}", one.field, one.how, message=one)
        elif i % 9 == 4:
            method, path, name, text = next(written)
            yield Asked(f"{path}?{name}={quote(text)}", "", "", method=method)
        else:
            path, name, how = next(inside if i % 9 in (2, 5, 7) else at_top)
            body = body_with(path, fields[path][name], EXTREMES[how], rng)
            yield Asked(path, name, how, body)


def check(asked: Asked, status: int, text: bytes) -> None:
    """What is refused is refused as an error of the client's, in few words that name a field."""
    case = asked.path[:80], asked.field, asked.how, status, text[:300]
    assert status < 500 or (status == 503 and b"the deadline cannot be kept" in text), case
    if status >= 400:
        assert len(text) < 3000, case
        error = json.loads(text)["error"]
        words = error if isinstance(error, str) else error["message"]
        assert len(words) <= 1005, case
        if status == 400 and isinstance(error, dict) and "code" in error:
            assert error["param"] or error["code"] == "invalid_json", case


def _costs(cost: Cost, asked: Asked, statuses: Counter[int]) -> tuple[float, float, float]:
    """Send a request, check its answer, and return what it cost, as ``LIMITS`` has it."""
    status, text, took_s, took_mib = cost.send(asked)
    check(asked, status, text)
    statuses[status] += 1
    return round(took_s, 2), round(took_mib, 1), round(cost.silence.longest_s, 3)


def b01(plain: Path, count: int, rng: random.Random) -> str:
    """``plain`` is left alone: /infill needs a model with the tokens for it."""
    statuses: Counter[int] = Counter()
    most = 0.0, 0.0, 0.0
    dear: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "models"
        folder.mkdir()
        model, log = write_coder(folder / _MODEL), Path(place) / "log"
        flags = ("--enable-lora", "--allow-lora-loading", place, "--kv-disk", f"{place}/kv:64MiB")
        one, other = Silence(Path(place) / "one"), Silence(Path(place) / "other")
        python = (sys.executable, *PROGRAM)
        of_one, of_other = (
            silence.variables | own_home(Path(place) / name, default_home())
            for silence, name in ((one, "home"), (other, "home of the router"))
        )
        grpc_port = str(free_port())
        with (
            process(model, *flags, "--grpc-port", grpc_port, program=python, **of_one) as (
                server,
                url,
            ),
            grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
            routing(folder, log, program=PROGRAM, **of_other) as routed,
        ):
            routed.complete(_MODEL)
            port = int(url.rpartition(":")[2])
            alone = Cost(server.pid, port, one, channel)
            router = Cost(routed.process.pid, routed.port, other)
            for i, asked in enumerate(_all_asked(port, count, rng)):
                # One that is unloaded at once is loaded for each of the others; and a router does
                # not pass slots on. Its messages are those of its servers.
                is_alone = asked.message or "lora" in asked.path or "slots" in asked.path
                by_router = i % 4 == 0 and not is_alone and asked.field != "keep_alive"
                cost = router if by_router else alone
                costs = _costs(cost, asked, statuses)
                if any(map(gt, costs, LIMITS)):  # what only happens once is none of the body's
                    costs = tuple(map(min, costs, _costs(cost, asked, statuses)))
                most = tuple(map(max, most, costs))
                if any(map(gt, costs, LIMITS)):
                    case = asked.path[:80], asked.field, asked.how, by_router
                    dear.append((*case, *costs, asked.body[-200:]))
    assert not dear, dear
    return (
        f"{count} bodies: {dict(statuses)}; dearest {most[0]:.2f} s, {most[1]:.0f} MiB, "
        f"the loop was silent for {most[2]:.3f} s"
    )
