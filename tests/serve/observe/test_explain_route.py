"""A client asks why its request took as long as it did."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.core.step import Step
from ridgeline.foresight.explain import CAUSES
from ridgeline.foresight.simulator.replay_times import requests_in
from ridgeline.foresight.trace import Recorded
from ridgeline.serve.observe.trace_buffer import Forgotten, TraceBuffer, _stood_in
from tests.lines_run import at_most_lines
from tests.serve.serving import Served, StepClock, serving
from tests.waiting import eventually

ASK = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
SECRET = "zebra"
STEP_S = 0.02


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text('ann key-of-ann\nbob key-of-bob\n"zoé\\ key-of-zoe\n')
    clock = StepClock()
    with serving(model, {"max_num_seqs": 1}, api_key_file=file) as served, clock.of(served):
        yield served


def queued_beside(served: Served, number: int) -> Callable[[Step], None]:
    """Return what lets a step take its time; the third waits until so many others are queued."""
    first, clock = served.valve.num_steps, served.llm.engine.clock
    assert isinstance(clock, StepClock)

    def before(step: Step) -> None:
        if served.valve.num_steps == first + 3:
            eventually(lambda: served.running.async_engine.num_queued == number)
        clock.pass_by(STEP_S)

    return before


def why(served: Served, name: str, key: str = "key-of-ann", query: str = "") -> tuple[int, dict]:
    path = f"/v1/requests/{name}/explain{query}"
    status, answer, _ = served.call(path, authorization=f"Bearer {key}")
    return status, answer


def test_a_client_has_its_own_answer_explained(keyed: Served) -> None:
    """By the answer's id and by x-request-id; the pieces are the time that its record says."""
    slow = keyed.client("key-of-bob").completions.create
    keyed.valve.before = queued_beside(keyed, 1)
    with slow(model="tiny", prompt="before", stream=True, **ASK) as before:
        next(iter(before))
        answer = keyed.client("key-of-ann").chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": SECRET}], **ASK
        )
    keyed.valve.before = lambda step: None
    status, found = why(keyed, answer.id)
    assert status == 200
    assert answer.id == f"chatcmpl-{found['name']}"
    assert why(keyed, found["name"]) == why(keyed, str(found["request"])) == (200, found)
    pieces = {one["cause"]: one["seconds"] for one in found["pieces"]}
    assert pieces.keys() <= CAUSES.keys()
    assert round(sum(pieces.values()), 9) == round(found["seconds"], 9)
    assert round(sum(one["seconds"] for one in found["timeline"]), 9) == round(found["seconds"], 9)
    assert pieces["queue_max_num_seqs"] > 2 * STEP_S  # one sequence at a time
    computed_s = sum(num_s for cause, num_s in pieces.items() if cause.startswith("decode"))
    assert computed_s == pytest.approx(11 * STEP_S, rel=0.01)
    assert any("--max-num-seqs 1" in sentence for sentence in found["sentences"])
    assert 3 <= len(found["sentences"]) <= 6
    (first, *_) = found["not_foreseen"]
    assert (first["cause"], first["set"]) == ("queue_max_num_seqs", "max_num_seqs=2")
    picture = why(keyed, answer.id, query="?format=svg")[1]
    assert picture.startswith(b"<svg")
    text = why(keyed, answer.id, query="?format=markdown")[1].decode()
    assert found["sentences"][0] in text
    status, error = keyed.refused(
        f"/v1/requests/{answer.id}/explain?format=pdf", None, authorization="Bearer key-of-ann"
    )
    assert (status, error["param"]) == (400, "format")
    assert SECRET.encode() not in b"".join(keyed.running.model_server.trace_buffer._lines)


def test_two_at_a_time_are_not_foreseen_from_one_at_a_time(keyed: Served) -> None:
    """It is simulated, with stand-ins for the prompts, and its steps are larger than any before."""
    keyed.valve.before = queued_beside(keyed, 3)
    more = ASK | {"max_tokens": 40}
    with ThreadPoolExecutor(4) as pool:
        create = keyed.client("key-of-ann").completions.create
        futures = [pool.submit(create, model="tiny", prompt="p", **more) for _ in range(4)]
        answers = [future.result() for future in futures]
    keyed.valve.before = lambda step: None
    told = [why(keyed, answer.id)[1] for answer in answers]
    last = max(told, key=lambda one: one["seconds"])
    waited_s = sum(one["seconds"] for one in last["pieces"] if one["cause"].startswith("queue"))
    assert waited_s > 116 * STEP_S  # of the 120 before its own, less those before it came
    first = last["not_foreseen"][0]
    assert first["set"] == "max_num_seqs=2"
    assert "2 sequences (measured: 1)" in first["reason"]
    assert first["set"] not in [one["set"] for one in last["would_help"]]


def test_a_long_prompt_learns_that_a_short_one_passed_it(keyed: Served) -> None:
    keyed.valve.before = queued_beside(keyed, 2)
    create = keyed.client("key-of-ann").completions.create
    with (
        ThreadPoolExecutor(2) as pool,
        create(model="tiny", prompt="before", stream=True, **ASK) as before,
    ):
        next(iter(before))
        long = pool.submit(create, model="tiny", prompt="p q r s t u v w " * 2, **ASK)
        eventually(lambda: keyed.running.async_engine.num_queued == 1)
        short = pool.submit(create, model="tiny", prompt="p", **ASK)
        answers = [one.result() for one in (long, short)]
    keyed.valve.before = lambda step: None
    passed, first = (why(keyed, answer.id)[1] for answer in answers)
    assert "overtaken by 1 later request:" in " ".join(passed["sentences"])
    assert "queue_overtaken" in {one["cause"] for one in passed["pieces"]}
    assert "queue_overtaken" not in {one["cause"] for one in first["pieces"]}


def test_a_timeline_shows_its_own_keys_requests_and_no_text(keyed: Served) -> None:
    keyed.client("key-of-bob").completions.create(model="tiny", prompt=SECRET, **ASK)
    answer = keyed.client("key-of-ann").completions.create(model="tiny", prompt=SECRET, **ASK)
    number = why(keyed, answer.id)[1]["request"]
    status, found, headers = keyed.call(
        f"/v1/requests/{answer.id}/explain?format=timeline", authorization="Bearer key-of-ann"
    )
    assert status == 200
    assert headers["content-disposition"] == 'attachment; filename="timeline.json"'
    events = found["traceEvents"]
    slots = {one["args"]["request"] for one in events if "request" in one.get("args", {})}
    assert number in slots
    assert number - 1 not in slots  # another key's, one step before
    counters = {one["name"] for one in events if one["ph"] == "C"}
    assert {"running", "actual ms"} <= counters
    assert SECRET not in json.dumps(found)
    assert why(keyed, answer.id, "key-of-bob", "?format=timeline")[0] == 404


def test_another_key_does_not_learn_that_a_request_was_there(keyed: Served) -> None:
    answer = keyed.client("key-of-ann").completions.create(model="tiny", prompt="mine", **ASK)
    assert why(keyed, answer.id)[0] == 200
    status, theirs = why(keyed, answer.id, "key-of-bob")
    _, nobodys = why(keyed, "x" * len(answer.id), "key-of-bob")
    assert status == 404
    assert theirs["error"]["code"] == "request_not_found"
    assert theirs["error"]["message"].replace(answer.id, "") == nobodys["error"]["message"].replace(
        "x" * len(answer.id), ""
    )


def test_the_oldest_are_forgotten_and_it_says_how_far_memory_reaches(keyed: Served) -> None:
    async_engine = keyed.running.async_engine
    trace_buffer = TraceBuffer(
        async_engine, keyed.running.model_server.metrics.monitor, max_bytes=20_000
    )
    create = keyed.client("key-of-ann").completions.create
    names = [create(model="tiny", prompt="one of many", **ASK).id for _ in range(12)]
    kept = [name for name in names if _is_known(trace_buffer, name)]
    assert kept
    assert kept == names[-len(kept) :]
    assert len(kept) < 12
    assert trace_buffer._num_bytes <= 20_000
    keyed.running.model_server.trace_buffer, before = (
        trace_buffer,
        keyed.running.model_server.trace_buffer,
    )
    status, answer = why(keyed, names[0])
    keyed.running.model_server.trace_buffer = before
    assert status == 404
    assert f"s and has {len(kept)}" in answer["error"]["message"]
    async_engine.listeners.remove(trace_buffer._on_record)


def test_what_the_server_wrote_itself_is_parsed_and_not_checked(keyed: Served) -> None:
    """And says the same: a request of 900 texts is 900 records, among thousands of others."""
    body = {"input": [f"{i} one two" for i in range(300)]}
    status, _, headers = keyed.call(
        "/v1/embeddings", body, authorization="Bearer key-of-ann", x_request_id="texts"
    )
    assert status == 200
    assert headers["x-request-id"] == "texts"
    trace_buffer = keyed.running.model_server.trace_buffer
    with at_most_lines(40 * len(trace_buffer._lines)):
        own, request = trace_buffer._find("texts", "ann")
    lines = [trace_buffer._engine_line, *trace_buffer._lines]
    checked = Recorded("the same", enumerate(lines), lines.__getitem__)
    whole = checked.get("texts")
    assert (own.engine, request) == (checked.engine, whole)
    for seen, one in zip(own.requests, checked.requests, strict=True):
        assert seen.items() <= one.items()
        assert len(seen) == 7  # and the rest of the line was not read
    beside = own.around(request, 4000)
    assert beside == checked.around(whole, 4000)
    requests = requests_in(map(_stood_in, beside))
    assert len({id(one.params) for one in requests.values() if one.name == "texts"}) == 1
    assert sum(one.name == "texts" for one in requests.values()) == 1 + 4000 // 16  # of the 300


def test_a_key_with_odd_letters_is_told_of_its_requests(keyed: Served) -> None:
    """What finds a request is read from its line as it stands, which has them in other letters."""
    key = "key-of-zoe"
    answer = keyed.client(key).completions.create(model="tiny", prompt="mine", **ASK)
    assert why(keyed, answer.id, key)[0] == 200
    assert why(keyed, "unknown", key)[1]["error"]["message"].endswith("has 1 of your requests")


def _is_known(trace_buffer: TraceBuffer, name: str) -> bool:
    try:
        return trace_buffer.explain(name, "ann")[0].duration_ns > 0
    except Forgotten:
        return False
