"""Work that is hard, fails, or must come out the same: T12, T17, T20, T21, T55, T57 to T59, T61."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from schemathesis import GenerationMode

from ridgeline import LLM, SamplingParams
from ridgeline.serve.routes.plans import PlanRequest
from tests.core.test_any_history import Core
from tests.engine.test_llm import HELLO, POISON
from tests.faults import clients
from tests.faults.engine import some_body
from tests.faults.oracles import CHAT, COMPLETE, Watch, check_body, watched
from tests.faults.process import process, send
from tests.model.files.tiny import CONFIG
from tests.serve.conftest import write_coder
from tests.serve.test_openapi import (
    OPERATIONS,
    has_body,
    test_what_the_document_allows_and_forbids,
    with_all_routes,
)

HARD_PATTERNS = (
    *("(a+)+b", "(a|a)*b", "(a|aa)+$", "a{1,1000000}", "((a{1,100}){1,100}){1,100}", "(?=a)a"),
    *("[", "(", "a{2,1}", "\\1", "(?<x>a)\\k<x>", "\\p{Nothing}", "", "(" * 3000, "a" * 60_000),
)


def _deep(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HARD_SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "string", "minLength": 1, "maxLength": 10**9},
    {"type": "array", "items": True, "minItems": 10**6},
    {"type": "integer", "multipleOf": 99999989},
    {"enum": list(range(20_000))},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949)]},
    _deep(200),
    False,
    {"type": "nothing"},
    {"properties": 7},
    {"pattern": "(a+)+b", "type": "string"},
)


def t12(model: Path, count: int, rng: random.Random) -> str:
    """Forms that are hard to compile, then forms that are cut: a beginning of what fits."""
    statuses: Counter[int] = Counter()
    with watched(model, growth_mib=200) as watch:
        for _ in range(count):
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
            if rng.random() < 0.5:
                body["structured_outputs"] = {"regex": rng.choice(HARD_PATTERNS)}
            else:
                body["structured_outputs"] = {"json": rng.choice(HARD_SCHEMAS)}
            status, answer = watch.ask(body)
            statuses[status] += 1
            assert status in (200, 400), answer
        for number in range(count):
            form = {"structured_outputs": {"regex": "(ab|ba){1,40}c"}, "prompt": [40 + number % 99]}
            text = watch.text(form | {"max_tokens": rng.randint(1, 30), "seed": number})
            assert re.fullmatch("(ab|ba){0,40}(a|b|c)?", text), text
    return f"{statuses[400]} of {count} refused, {statuses[200]} answered; {count}/{count} cut well"


def t17(model: Path, count: int, rng: random.Random) -> str:
    """Schedules with aborts, forks, pauses and too little memory, each checked at every step."""
    run_state_machine_as_test(
        Core,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return f"{count}/{count} schedules: the oldest always advances, no block is lost"


def t20(model: Path, count: int, rng: random.Random) -> str:
    """Memory ends somewhere in a request's way: it fails alone."""
    with watched(model, has_faults=True) as watch:
        llm = watch.served.llm
        places = [
            (watch.served.valve, "execute"),
            (type(llm.tokenizer), "encode"),
            (type(llm.text), "new_text"),
            (type(llm.text.chat_template), "render_ids"),
        ]
        failed = 0
        for number in range(count):
            owner, name = places[number % len(places)]
            before = getattr(owner, name)
            left = [rng.randint(1, 3)]

            def failing(*args: Any, left: Any = left, before: Any = before, **more: Any) -> Any:
                if any("77, 78, 79" in repr(arg) or "zzz" in repr(arg) for arg in args):
                    left[0] -= 1
                    if left[0] <= 0:
                        raise MemoryError
                return before(*args, **more)

            body: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
            asked: dict[str, Any] = (
                {"prompt": [77, 78, 79]} if name in ("execute", "new_text") else {}
            )
            asked = asked or {"messages": [{"role": "user", "content": "zzz"}]}
            with patch.object(owner, name, failing):
                path = COMPLETE if "prompt" in asked else CHAT
                status, _ = watch.ask(body | asked, path)
            assert status in (200, 500, 503)
            failed += status != 200
        assert failed, "no place was met"
    return f"{failed} of {count} requests failed for want of memory, each alone"


def t21(model: Path, count: int, rng: random.Random) -> str:
    """Short requests, a fifth of them given up: what memory the process gains with each."""

    def rss_bytes(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        kib = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
        return (kib["RssAnon"] + kib["VmSwap"]) << 10

    with process(model, log=Path("/dev/null")) as (server, port):

        def ask(number: int) -> None:
            mine = random.Random(number)
            body = some_body(number, mine) | {"logprobs": 2, "max_tokens": mine.randint(1, 8)}
            if number % 5 == 0:
                connection = clients.post(port, body | {"stream": True}, close=False)
                clients.reset(connection)
                connection.close()
            else:
                assert send(port, COMPLETE, json.dumps(body).encode())[0] == 200

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(count)))
            warm_bytes = rss_bytes(server.pid)
            list(pool.map(ask, range(count, 3 * count)))
            gained_bytes = rss_bytes(server.pid) - warm_bytes
    # Threads and pools take some MiB whatever the count: of a small count they are most.
    assert gained_bytes < 2 * count * 1024 + (24 << 20), gained_bytes
    return f"{gained_bytes / (2 * count):.0f} bytes gained per request in {2 * count} after {count}"


def t55(model: Path, count: int, rng: random.Random) -> str:
    """Every optimisation on and off: the same bytes."""
    bodies = [some_body(i, rng) for i in range(count)]
    names = ("max_tokens", "ignore_eos", "seed", "temperature")
    params = [
        SamplingParams(**{name: body[name] for name in names}, logit_bias={POISON: -100.0})
        for body in bodies
    ]
    prompts = [body["prompt"] for body in bodies]
    ways: list[dict[str, Any]] = [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 2},
        {"speculative_config": {"always": True}},
        {"policy": "orca"},
        {"policy": "static", "threads": 2},
        {"kv_cache_memory": 10 * 16 * 512},
    ]
    found = []
    for way in ways:
        with LLM(model, **({"kv_cache_memory": "1MiB", "threads": 1} | way)) as llm:
            outs = llm.generate(prompts, params, progress=False)
            found.append([out.outputs[0].token_ids for out in outs])
    assert all(tokens == found[0] for tokens in found)
    return f"{count}/{count} answers equal in {len(ways)} ways of running"


def t57(model: Path, count: int, rng: random.Random) -> str:
    """Requests made from the OpenAPI document, right ones and wrong ones; ``count`` of each."""
    with with_all_routes(write_coder(model.parent / "coder"), model.parent) as served:
        for operation in OPERATIONS:
            method, path, _ = operation
            modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * has_body(operation)
            for mode in modes:
                test_what_the_document_allows_and_forbids(served, method, path, count, mode, 1)
    return f"{len(OPERATIONS)} operations, {count} examples of each kind: 0 failures"


def t58(model: Path, count: int, rng: random.Random) -> str:
    """Answers have the types of OpenAI's client, every field that those require among them."""
    with watched(model) as watch:
        for number in range(count):
            body = some_body(number, rng) | {"max_tokens": 2, "stream": False, "n": 1 + number % 2}
            if number % 3 == 0:
                Completion.model_validate(watch.ask(body)[1], strict=True)
                continue
            chat = {name: value for name, value in body.items() if name != "prompt"}
            chat |= {"messages": HELLO, "logprobs": True, "stream": number % 3 == 1}
            status, answer = watch.ask(chat, CHAT)
            assert status == 200, answer
            for chunk in answer if number % 3 == 1 else ():
                ChatCompletionChunk.model_validate(chunk, strict=True)
            if number % 3 == 2:
                ChatCompletion.model_validate(answer, strict=True)
    return f"{count}/{count} answers have the types of OpenAI's client"


def t59(model: Path, count: int, rng: random.Random) -> str:
    """The event loop stands still for a while, again and again: it goes on where it was."""
    with watched(model) as watch:

        def block(watch: Watch, number: int) -> None:
            watch.served.loop.call_soon_threadsafe(time.sleep, random.Random(number).random() / 4)

        bodies = [some_body(i, rng) for i in range(count)]
        wanted = [watch.ask(body) for body in bodies]
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(watch.ask, body) for body in bodies]
            for number in range(count):
                block(watch, number)
            found = [one.result() for one in asked]
        assert [status for status, _ in found] == [200] * count
        assert len(found) == len(wanted)
    return f"{count}/{count} answered while the loop stood still {count} times"


ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 2**31, 2**63, 10**400, 1e308, -0.0, "NaN", "inf", "", "1e9 GB", "5 parsecs"),
    *(None, True, [], {}, [[[]]], "0 GiB", "-3", "9" * 400, {"a": 1}),
)


def t61(model: Path, count: int, rng: random.Random) -> str:
    """A plan's wishes are absurd: a clear error, or a plan."""
    base: dict[str, Any] = {"model": CONFIG, "on": "l4"}
    statuses: Counter[int] = Counter()
    with watched(model) as watch:
        fields = sorted(PlanRequest.model_fields)
        for _ in range(count):
            field = rng.choice(fields)
            status, answer = watch.ask(base | {field: rng.choice(ODD)}, "/v1/plan")
            statuses[status] += 1
            assert status in (200, 400, 404), answer
            if status != 200:
                check_body(status, json.dumps(answer).encode())
                assert len(answer["error"]["message"]) < 1000
    return f"{statuses[200]} plans, {statuses[400] + statuses[404]} clear errors of {count}"
