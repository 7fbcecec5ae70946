"""One key's work beside answers holds up no other key, on any route that has some."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.answer import reply
from ridgeline.serve.engine.request_stream import StreamError
from ridgeline.serve.http.fair_pool import FairThreadPool
from ridgeline.serve.http.request_state import CALLER
from tests.engine.test_llm import HELLO
from tests.serve.serving import Served, serving
from tests.serve.test_plans import config
from tests.waiting import PATIENCE_S, eventually

A, V = ({"authorization": f"Bearer {key}"} for key in ("key-a", "key-v"))
COMPLETE = "/v1/completions"
GO_ON = {"prompt": [40, 41], "max_tokens": 2}
LOAD = {"prompt_tokens": 8, "new_tokens": 2, "max_concurrency": 1}
LONG = json.dumps(GO_ON).encode() + b" " * (1 << 17)


def formed(name: str) -> dict[str, Any]:
    """Return a request whose answer must have a form."""
    schema = {"type": "object", "properties": {name: {"enum": ["x"]}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "x", "max_tokens": 2, "response_format": wanted}


ROUTES: dict[str, list[tuple[str, Any]]] = {  # by the kind of work that they need
    "bodies": [(COMPLETE, LONG)],
    "prompts": [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
        ("/api/chat", {"model": "tiny", "messages": HELLO, "options": {"num_predict": 2}}),
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y", "z"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [40, 41]}),
        (COMPLETE, formed("known")),
        (COMPLETE, GO_ON),
    ],
    "grammars": [(COMPLETE, formed("new"))],
    "reports": [
        ("/metrics", None),
        ("/v1/memory", None),
        ("/openapi.json", None),
        ("/v1/plan/devices", None),
        ("/v1/plan", {"model": config("phi-4"), "on": "l4"}),
        ("/v1/requests/mine/explain", None),
    ],
    "loads": [("/v1/plan", LOAD)],
}


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(
        model,
        {"max_num_seqs": 4},
        api_key=["key-a"],
        admin_api_key=["key-v"],
        grammar_timeout=PATIENCE_S,
        max_queued_requests=1000,
    ) as served:
        served.call(COMPLETE, formed("known"), **V)
        served.call(COMPLETE, GO_ON, x_request_id="mine", **V)
        yield served


@contextmanager
def flooded(served: Served, turns: FairThreadPool, key: str = "key1") -> Iterator[threading.Event]:
    """Have all threads that a key may have stand still, the first one's, and more wait."""
    go_on = threading.Event()

    async def flood() -> None:
        CALLER.set(key)
        await asyncio.gather(*(turns.run(lambda: go_on.wait(PATIENCE_S)) for _ in range(20)))

    flooding = asyncio.run_coroutine_threadsafe(flood(), served.loop)
    most = turns._max_workers - 1
    try:
        eventually(lambda: turns._num_running[key] == most)  # once the key has rested
        eventually(lambda: len(turns._waiting[key]) == 20 - most)
        yield go_on
    finally:
        go_on.set()
        flooding.result(PATIENCE_S)


@pytest.mark.parametrize("kind", ROUTES)
def test_who_waits_for_work_of_one_key_is_that_key(served: Served, kind: str) -> None:
    turns = getattr(served.running.model_server.work, kind)
    with ThreadPoolExecutor(1) as threads, flooded(served, turns):
        (path, body), num_waiting = ROUTES[kind][0], len(turns._waiting["key1"])
        if kind == "loads":
            assert served.refused(path, body, **A)[1]["code"] == "plan_busy"
        else:
            own = threads.submit(served.call, path, body, **A)
            eventually(lambda: len(turns._waiting["key1"]) > num_waiting)
        for path, body in ROUTES[kind]:
            status, answer, _ = served.call(path, body, **V)
            assert status == 200, (path, answer)
        assert kind == "loads" or not own.done()
    assert kind == "loads" or own.result()[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "key", "code"),
    [
        ("/slots/0?action=save", {"filename": "x" * 20_000}, A, "not_supported"),
        ("/v1/sleep", {"x" * 20_000: 1}, V, "unknown_parameter"),  # an operator's route
        ("/sleep", {"x" * 20_000: 1}, V, "unknown_parameter"),
    ],
)
def test_a_long_body_for_an_operator_or_a_slot_is_read_in_turn(
    served: Served, path: str, body: Any, key: dict[str, str], code: str
) -> None:
    bodies, label = served.running.model_server.work.bodies, "key1" if key is A else "admin1"
    with ThreadPoolExecutor(1) as threads, flooded(served, bodies, label):
        num_waiting = len(bodies._waiting[label])
        own = threads.submit(served.refused, path, body, **key)
        eventually(lambda: len(bodies._waiting[label]) > num_waiting or own.done())
        assert not own.done()
    assert own.result()[1]["code"] == code


def test_what_is_kept_and_what_is_compiled_pass_a_grammar_that_takes_long(served: Served) -> None:
    grammars = served.llm.text._grammars
    assert grammars is not None
    process = grammars._children._idle[-1]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(served.call, COMPLETE, formed(f"a{i}"), **A) for i in range(4)]
        waiting = served.running.model_server.work.grammars._waiting
        eventually(lambda: len(waiting.get("key1", ())) == 3)
        for body in (formed("known"), formed("other"), formed("third")):
            assert served.call(COMPLETE, body, **V)[0] == 200
        assert served.call(COMPLETE, formed("known"), **A)[0] == 200
        assert not any(one.done() for one in slow)
        os.kill(process.pid, signal.SIGCONT)
        assert [one.result()[0] for one in slow] == [200] * 4


MANY = {"prompt": [40, 41], "max_tokens": 60, "n": 4, "ignore_eos": True}  # 242 tokens in all


def test_a_long_answer_is_written_when_its_key_has_a_turn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long by its texts, or by how many tokens are ranked in the place of each."""
    turns, pieces = served.running.model_server.work.prompts, list[str]()
    run = turns.run

    async def counted(work: Any) -> Any:
        pieces.append(work)
        return await run(work)

    monkeypatch.setattr(turns, "run", counted)
    for path, body, num_pieces in (
        ("/v1/embeddings", {"input": ["x"]}, 1),
        ("/v1/embeddings", {"input": ["x"] * 9}, 2),
        (COMPLETE, MANY, 1),
        (COMPLETE, MANY | {"logprobs": 5}, 2),
    ):
        pieces.clear()
        assert served.call(path, body, **V)[0] == 200
        assert len(pieces) == num_pieces


def test_a_long_answer_is_encoded_an_object_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder lets no other thread run before it has done a value."""
    top = [None, *({f"t{i}": -0.5, "é": 1e-7} for i in range(50))]
    chat = {"content": [{"token": "a", "top_logprobs": [{"token": "b"}] * 5}] * 50}
    answer = {
        "id": "x",
        "choices": [{"text": "y", "logprobs": {"tokens": ["a"] * 50, "top_logprobs": top}}] * 20,
        "chat": [{"message": {"content": "z"}, "logprobs": chat}] * 20,
        "data": [{"embedding": [0.1, -1.0, 2e-30] * 20}] * 20,
        "empty": [],
        "none": None,
    }
    whole = json.dumps(answer, separators=(",", ":"))
    encode, lengths = reply._encode, list[int]()

    def counted(value: object) -> str:
        text = encode(value)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(reply, "_encode", counted)
    assert reply.in_pieces(answer) == whole
    assert max(lengths) < len(whole) / 100


def test_texts_that_could_not_wait_are_refused_before_they_are_tokenised(served: Served) -> None:
    with flooded(served, served.running.model_server.work.prompts):
        texts = ["x"] * 1001
        for path, body in (("/v1/embeddings", {"input": texts}), (COMPLETE, {"prompt": texts})):
            status, error = served.refused(path, body, **A)
            assert (status, error["code"]) == (400, "invalid_value")
        held, async_engine = served.valve.hold(), served.running.async_engine
        with ThreadPoolExecutor(1) as threads:
            many = threads.submit(served.call, COMPLETE, {"prompt": [[40]] * 1000}, **V)
            eventually(lambda: async_engine.num_queued > 900)
            status, error = served.refused("/v1/embeddings", {"input": texts[:500]}, **A)
            assert (status, error["code"]) == (429, "server_is_overloaded")
            enough = StreamError("enough", 503)
            served.loop.call_soon_threadsafe(async_engine.abandon_all, enough)
            held.set()
            assert many.result()[0] == 503
        served.valve.before = lambda step: None
