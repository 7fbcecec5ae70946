"""A recorded run, fed to a fresh scheduler, is decided the same again, step for step."""

from __future__ import annotations

import json
import random
from functools import cache
from math import inf
from typing import Any

import pytest

from ridgeline.core.cache.state_slots import CHECKPOINT_EVERY
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.scheduling.policies import Load, Orca, Policy, SplitFuse
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.foresight.simulator.replay import Replay, replay
from ridgeline.foresight.structure import to_json
from tests.core.decoding.letters import Letters
from tests.core.harness import (
    POLICIES,
    Oracle,
    adapter,
    finish,
    make_engine,
    make_scheduler,
)

Json = dict[str, Any]


class Broken(Exception):
    """What a backend may raise."""


@cache
def recorded(policy: Policy, seed: int, *, looks_ahead: bool = False) -> list[Json]:
    """Return the records of a run with a bit of everything, as they are read back from a file."""
    dice = random.Random(seed)
    records: list[Record] = []
    speculation = Speculation(Oracle(0.7, dice)) if seed % 2 else None
    windows = (None, 5) if seed >= 16 else (None,)
    scheduler = make_scheduler(
        14 * len(windows),
        3,
        policy=policy,
        budget=40,
        seats=4,
        caching=seed % 4 > 0,
        speculation=speculation,
        checkpoints=3 if 8 <= seed < 16 else None,
        every=CHECKPOINT_EVERY,
        windows=windows,
        looks_ahead=looks_ahead,
    )
    engine, runner = make_engine(
        scheduler, max_model_len=40, eos_ids=(3,), listeners=[records.append]
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
        before = [(1,) * dice.randint(0, params.max_tokens or 0) for _ in range(params.n)]
        if params.ignore_eos or dice.random() < 0.5:
            before[0] = before[0][: (params.max_tokens or 0) - 1]
        else:
            before = [(), *((*answer[:-1], 3) for answer in before[1:])]  # all others have ended
        goes_on = dice.random() < 0.2
        root = dice.choice((b"", b"", b"other"))
        return engine.add(
            prompt,
            params,
            new_text=lambda: TextStream(Letters(), stop),
            cache_root=root,
            adapter=adapter(dice.choice((0, 0, 1))),
            due_s=dice.choice((inf, inf, dice.random())),
            owner=dice.choice("aab"),
            answers=tuple(before) if goes_on else (),
        )

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


@pytest.mark.parametrize("seed", [*range(8), 8, 9, 10, 11, 14, 16, 17])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_decision_is_the_same_again(policy: Policy, seed: int) -> None:
    records = recorded(policy, seed)
    num_steps, num_requests = (
        sum(record["type"] == kind for record in records) for kind in ("step", "request")
    )
    assert num_steps > 25
    assert replay(records) == Replay(num_steps, num_requests, None, None)


@pytest.mark.parametrize("policy", [SplitFuse(min_chunk=3), Orca(reserve_full=False)], ids=repr)
def test_a_policy_with_settings_of_its_own_decides_the_same_again(policy: Policy) -> None:
    records = recorded(policy, 1)
    num_steps, num_requests = (
        sum(record["type"] == kind for record in records) for kind in ("step", "request")
    )
    assert replay(records) == Replay(num_steps, num_requests, None, None)
    usual = {"least_prompt_tokens": 64, "reserve_full": True}
    assert replay([records[0] | usual, *records[1:]]).difference is not None


def test_room_that_was_kept_for_a_runner_that_goes_on_unasked_is_kept_again() -> None:
    engine, *rest = recorded(SplitFuse(), 1, looks_ahead=True)
    assert replay([engine, *rest]).difference is None
    assert replay([engine | {"looks_ahead": False}, *rest]).difference is not None


def test_a_decision_that_differs_is_named() -> None:
    records = [dict(record) for record in recorded(SplitFuse(), 1)]
    changed = next(r for r in records if r["type"] == "step" and r["number"] == 20)
    (seq_id, start, count), *others = changed["work"]
    changed["work"] = [[seq_id, start, count + 1], *others]
    found = replay(records)
    assert found.num_steps == 20
    assert found.difference is not None
    number, recorded_then, decided = found.difference
    assert (number, recorded_then["work"][0][2]) == (20, decided["work"][0][2] + 1)


def test_a_step_in_which_nothing_can_run_now_differs() -> None:
    records = [dict(record) for record in recorded(SplitFuse(), 1)]
    step = next(r for r in records if r["type"] == "step" and r["number"] == 20)
    step["paused"] = sorted({seq_id[0] for seq_id, *_ in (*step["work"], *step["waits"])})
    found = replay(records)
    assert found.difference is not None
    assert found.difference[2]["work"] is None


def test_a_token_that_was_changed_is_noticed_where_it_matters() -> None:
    """A token's value decides through stop ids and the prefix cache."""
    records = recorded(SplitFuse(), 2)
    noticed = 0
    for number, record in enumerate(records):
        if record["type"] == "step" and any(record["sampled"]):
            others = [[[3] * len(tokens) for tokens in record["sampled"]]]
            again = [*records[:number], record | {"sampled": others[0]}, *records[number + 1 :]]
            noticed += replay(again).difference is not None
    assert noticed > 10


def test_a_trace_that_ends_early_is_replayed_as_far_as_it_goes() -> None:
    records = recorded(SplitFuse(), 1)
    last = max(i for i, record in enumerate(records) if record["type"] == "request")
    (arrived_in,) = (
        record["number"]
        for record in records
        if record["type"] == "step" and records[last]["request_id"] in record["arrived"]
    )
    found = replay(records[:last])
    assert (found.num_steps, found.difference, found.unfinished) == (arrived_in, None, arrived_in)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "not a trace"),
        ([{"type": "step"}], "does not describe an engine"),
        ([{"kind": "engine"}], "'type'"),
        ([{"type": "engine", "policy": "splitfuse"}], "'block_size' is missing"),
    ],
)
def test_what_is_no_trace_is_refused(records: list[Json], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replay(records)


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
    pairs = [(r["answers"], r["num_generated"]) for r in records if r["type"] == "request"]
    ends = [end for answers, here in pairs for end in zip(answers, here, strict=False)]
    assert any(before and num_here for before, num_here in ends), "no answer went on"
    assert any(before and not num_here for before, num_here in ends), "none ended elsewhere"
    with_states = [r for policy in POLICIES for seed in (10, 14) for r in recorded(policy, seed)]
    assert sum(length for r in with_states for _, length in r.get("admitted", ())) > 30
