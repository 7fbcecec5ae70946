"""What any body costs: every field of every route at its extremes, by one server and by a router.

The fields are those of the server's own document; of a config that a plan is asked for, those of
published models. Servers are processes of their own, so that their time and memory can be told.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.silence import PROGRAM, Silence
from tests.fleet.test_router import routing
from tests.physics.published import PUBLISHED
from tests.server.conftest import write_coder
from tests.server.serving import JSON
from tests.server.test_main import cpu_s, process

PLAN = "/v1/plan"
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
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/sleep": {"level": 1},
    "/v2/models/{model}/infer": {"inputs": [TENSOR], "parameters": {"max_tokens": 2}},
    "/v2/models/{model}/generate": {"text_input": "a", "max_tokens": 2},
    "/v2/models/{model}/generate_stream": {"text_input": "a", "max_tokens": 2},
    PLAN: {"on": "l4"},
}
_HIDDEN = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/sleep")  # not in the document
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
# Beside other tests a processor does less in its time: what fails there takes ten times too long.
MOST_S, MOST_MIB = 3.0 if "pytest" in sys.modules else 0.3, 100.0
MOST_SILENT_S = 0.5 if "pytest" in sys.modules else 0.05
_ANSWERS = re.compile(
    "completions?|responses|messages$|chat$|generate(_stream)?$|infer$|infill$"
)  # take steps


class Cost:
    """What the requests to one process cost it."""

    def __init__(self, pid: int, port: int, silence: Silence) -> None:
        self._pid, self._port, self.silence = pid, port, silence

    def _mib(self, name: str) -> float:
        text = Path(f"/proc/{self._pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+)", text)[0]) / 1024

    def send(self, path: str, body: bytes) -> tuple[int, bytes, float, float]:
        """Return status, answer, and what the body cost in seconds and MiB, but for steps."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # forget the peak of memory
        before_s, before_mib = cpu_s(self._pid), self._mib("VmRSS")
        self.silence.longest_s = 0.0
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request("POST", path.replace("{model}", "tiny"), body, JSON)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status == 200 and _ANSWERS.search(path):
            return response.status, text, 0.0, 0.0
        return (response.status, text, cpu_s(self._pid) - before_s, self._mib("VmHWM") - before_mib)


def _fields(port: int) -> dict[str, list[str]]:
    """Return the fields of each route that takes a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    found = {path: list(GOOD[path]) for path in _HIDDEN}
    for path, methods in document["paths"].items():
        contents = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in contents:  # not those that take files
            schema = contents["application/json"]["schema"]
            parts = schema.get("anyOf") or schema.get("oneOf") or [schema]
            names = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
            schemas = document["components"]["schemas"]
            found[path] = sorted({key for name in names for key in schemas[name]["properties"]})
    for path in ("/v2/rerank", "/rerank", "/score"):  # other names of routes
        found[path] = found["/v1/score" if "score" in path else "/v1/rerank"]
    assert set(found) == set(GOOD), set(found) ^ set(GOOD)
    return found


def body_with(path: str, field: str, value: str, rng: random.Random, model: str) -> bytes:
    """Return a good body but for one field; of a plan perhaps but for one field of its config."""
    body = dict(GOOD[path])
    if "lora" not in path and "{" not in path:
        body["model"] = model
    if path == PLAN and field == "model":
        config = dict(rng.choice(list(PUBLISHED.values()))["config"])
        inside = rng.choice([*config, "num_nextn_predict_layers", "quantization_config"])
        config.pop(inside, None)
        start = json.dumps(config)[:-1]
        config_text = f'{start}, "{inside}": {value}}}'
        return f'{{"on": "l4", "model": {config_text}}}'.encode()
    body.pop(field, None)
    start = json.dumps(body)[:-1] + (", " if body else "")
    return f'{start}"{field}": {value}}}'.encode()


def full_body(path: str, how: str, model: str) -> bytes:
    """Return a good body but for one field more, which is as long as a body may be."""
    begin, inside, end = FULL[how]
    start = json.dumps(GOOD[path] | {"model": model})[:-1]
    return f'{start}, "x": {begin}{inside * (_FULL // len(inside))}{end}}}'.encode()


def check(path: str, field: str, how: str, status: int, text: bytes) -> None:
    """What is refused is refused as an error of the client's, in few words that name a field."""
    case = path, field, how, status, text[:300]
    assert status < 500, case
    if status >= 400:
        assert len(text) < 3000, case
        error = json.loads(text)["error"]
        words = error if isinstance(error, str) else error["message"]
        assert len(words) <= 1005, case
        if status == 400 and isinstance(error, dict) and "code" in error:
            assert error["param"] or error["code"] == "invalid_json", case


def b01(plain: Path, count: int, rng: random.Random) -> str:
    """``plain`` is left alone: /infill needs a model with the tokens for it."""
    statuses: Counter[int] = Counter()
    most_s, most_mib, longest_s = 0.0, 0.0, 0.0
    dear: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "models"
        folder.mkdir()
        model, log = write_coder(folder / "tiny"), Path(place) / "log"
        flags = ("--enable-lora", "--allow-lora-loading", place)
        one, other = Silence(Path(place) / "one"), Silence(Path(place) / "other")
        python = (sys.executable, *PROGRAM)
        with (
            process(model, *flags, program=python, **one.variables) as (server, url),
            routing(folder, log, program=PROGRAM, **other.variables) as routed,
        ):
            routed.complete("tiny")
            port = int(url.rpartition(":")[2])
            alone = Cost(server.pid, port, one)
            router = Cost(routed.process.pid, routed.port, other)
            fields = _fields(port)
            names = [(path, name) for path in fields for name in fields[path]]
            cases = [(*one, how) for one in names for how in EXTREMES]
            rng.shuffle(cases)
            whole = [(path, "", how) for path in fields for how in FULL]
            rng.shuffle(whole)
            for i in range(count):
                path, name, how = cases[i % len(cases)] if i % 9 else whole[i // 9 % len(whole)]
                # One that is unloaded at once is loaded for each of the others.
                by_router = i % 4 == 0 and "lora" not in path and name != "keep_alive"
                data = full_body(path, how, "tiny") if not name else b""
                data = data or body_with(path, name, EXTREMES[how], rng, "tiny")
                asked = router if by_router else alone
                status, text, took_s, took_mib = asked.send(path, data)
                silent_s = asked.silence.longest_s
                check(path, name, how, status, text)
                statuses[status] += 1
                most_s, most_mib = max(most_s, took_s), max(most_mib, took_mib)
                longest_s = max(longest_s, silent_s)
                if took_s > MOST_S or took_mib > MOST_MIB or silent_s > MOST_SILENT_S:
                    costs = round(took_s, 2), round(took_mib), round(silent_s, 3)
                    dear.append((path, name, how, by_router, *costs, data[-200:]))
    assert not dear, dear
    return (
        f"{count} bodies: {dict(statuses)}; dearest {most_s:.2f} s, {most_mib:.0f} MiB, "
        f"the loop was silent for {longest_s:.3f} s"
    )
