"""A recorded run, fed to a fresh scheduler, is decided the same again, step for step."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import count
from typing import Any

import pytest

from ridgeline.core.fold import abort, commit
from ridgeline.core.kvcache import KVCache
from ridgeline.core.params import SamplingParams
from ridgeline.core.policies import Load, Orca, Policy, SplitFuse, Static
from ridgeline.core.request import Request
from ridgeline.core.scheduler import Scheduler
from ridgeline.core.step import StepOutput
from ridgeline.decoding.text import TextStream
from ridgeline.records import Record, to_json
from tests.core.harness import POLICIES, finish, make_engine, make_scheduler
from tests.decoding.letters import Letters

Json = dict[str, Any]
BY_NAME: dict[str, Policy] = {"static": Static(), "orca": Orca(), "splitfuse": SplitFuse()}
DECISIONS = ("work", "admitted", "preempted", "waits", "num_copies")
LOAD = ("num_running", "num_waiting", "blocks_used", "blocks_indexed")


class Broken(Exception):
    """What a backend may raise."""


@cache
def recorded(policy: Policy, seed: int) -> list[Json]:
    """Return the records of a run with a bit of everything, as they are read back from a file."""
    dice = random.Random(seed)
    records: list[Record] = []
    scheduler = make_scheduler(14, 3, policy=policy, budget=40, seats=4, caching=seed % 4 > 0)
    engine, runner = make_engine(
        scheduler, max_model_len=40, eos_ids=(3,), on_record=records.append
    )

    def add() -> int:
        stop = ("\x01\x02",) if dice.random() < 0.3 else ()
        params = SamplingParams(
            max_tokens=dice.randint(1, 14),
            n=dice.choice((1, 1, 2, 3)),
            ignore_eos=dice.random() < 0.7,
            prompt_logprobs=0 if dice.random() < 0.1 else None,
            stop=stop,
        )
        prompt = tuple(dice.choices((1, 2), k=dice.randint(1, 20)))
        return engine.add(prompt, params, new_text=lambda: TextStream(Letters(), stop))

    def fail() -> None:
        raise Broken

    resting: list[int] = []
    for number in range(40):
        for _ in range(dice.choice((0, 0, 1, 2))):
            add()
        if engine.requests and dice.random() < 0.15:
            engine.abort(dice.choice(list(engine.requests)))
        if resting and dice.random() < 0.5:
            engine.resume(resting.pop())
        elif engine.requests and dice.random() < 0.2:
            resting.append(dice.choice(list(engine.requests)))
            engine.pause(resting[-1])
        load = Load(dice.choice((0, 0, 3, 50)), is_read=dice.random() < 0.8)
        runner.ledger.fail = {dice.randrange(10): "wrong"} if dice.random() < 0.1 else {}
        runner.during = fail if number % 9 == 5 else lambda: None
        try:
            engine.step(load)
        except Broken:
            engine.check()
    runner.during = lambda: None
    for request_id in resting:
        engine.resume(request_id)
    finish(engine)
    lines = [json.dumps(to_json(record)) for record in records]
    return [json.loads(line) for line in lines]


class Ends:
    """Stands for an answer's text, which is not in the records: it stops where the answer did."""

    def __init__(self, length: int | None) -> None:
        self._left = length

    def feed(self, token: int, may_stop: bool) -> str | None:
        if self._left is None:
            return None
        self._left -= 1
        return "stop" if self._left == 0 else None

    def take(self) -> str:
        return ""

    def finish(self) -> None:
        pass


def requests_of(records: list[Json], engine: Json) -> dict[int, Request]:
    """Return the recorded requests, ready to run again."""
    requests = {}
    for record in (record for record in records if record["type"] == "request"):
        ends = list(zip(record["finish_reasons"], record["num_generated"], strict=True))
        numbers = count()

        def new_text(ends: list[tuple[str, int]] = ends, numbers: count[int] = numbers) -> Ends:
            reason, length = (*ends, *[("", 0)] * 9)[next(numbers)]
            return Ends(length if reason == "stop" else None)

        requests[record["request_id"]] = Request(
            record["request_id"],
            tuple(record["prompt_token_ids"]),
            SamplingParams(**{k: v for k, v in record["params"].items() if k != "stop"}),
            eos_ids=tuple(engine["eos_ids"]),
            max_model_len=engine["max_model_len"],
            new_text=new_text,
        )
    return requests


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_decision_is_the_same_again(policy: Policy, seed: int) -> None:
    records = recorded(policy, seed)
    setup, steps = records[0], [record for record in records if record["type"] == "step"]
    requests = requests_of(records, setup)
    kv = KVCache(
        setup["num_blocks"],
        setup["block_size"],
        enable_prefix_caching=setup["enable_prefix_caching"],
    )
    scheduler = Scheduler(
        kv,
        BY_NAME[setup["policy"]],
        max_num_batched_tokens=setup["max_num_batched_tokens"],
        max_num_seqs=setup["max_num_seqs"],
    )
    assert len(steps) > 30
    for record in steps:
        for request_id in record["arrived"]:
            scheduler.add(requests[request_id])
        for request_id in record["aborted"]:
            abort(scheduler.queues, requests[request_id])
        for request_id in record["paused"]:
            scheduler.queues.pause(requests[request_id])
        for request_id in record["resumed"]:
            scheduler.queues.resume(requests[request_id])
        step = scheduler.schedule(Load(record["num_outside"], record["is_read"]))
        pool = kv.pool
        again = {
            "work": [(work.seq_id, work.start, len(work.tokens)) for work in step.work],
            "admitted": step.admitted,
            "preempted": step.preempted,
            "waits": step.waits,
            "num_copies": len(step.copies),
            "num_running": len(scheduler.queues.running),
            "num_waiting": len(scheduler.queues.waiting) + len(scheduler.queues.paused),
            "blocks_used": sum(refs > 0 for refs in pool.refs),
            "blocks_indexed": len(pool.index),
        }
        assert json.loads(json.dumps(again)) == {key: record[key] for key in DECISIONS + LOAD}
        if not record["sampled"]:
            scheduler.retract()
            continue
        errors = {tuple(seq_id): error for seq_id, error in record["errors"]}
        commit(
            scheduler.queues,
            step,
            StepOutput(
                tuple(map(tuple, record["sampled"])),
                errors={i: errors[w.seq_id] for i, w in enumerate(step.work) if w.seq_id in errors},
            ),
        )
        scheduler.queues.check()


def test_the_recorded_runs_have_a_bit_of_everything() -> None:
    records = [r for policy in POLICIES for seed in range(8) for r in recorded(policy, seed)]
    steps = [record for record in records if record["type"] == "step"]
    reasons = {r for record in records for r in record.get("finish_reasons", ())}
    assert reasons == {"stop", "length", "abort", "error"}
    assert {why for step in steps for _, why in step["waits"]} >= {"blocks", "policy", "paused"}
    assert any(step["resumed"] for step in steps)
    assert any(step["preempted"] for step in steps)
    assert any(step["num_copies"] for step in steps)
    assert any(length for step in steps for _, length in step["admitted"])
    assert any(not step["sampled"] for step in steps)
    assert any(step["errors"] for step in steps)
