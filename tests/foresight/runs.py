"""Runs of the core over a ledger, recorded as a trace has them, with a bit of everything."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.scheduling.policies import Load, Policy
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.foresight.structure import to_json
from tests.core.harness import POLICIES, Oracle, finish, make_engine, make_scheduler

Json = dict[str, Any]
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2},
    {"n": 3},
    {"best_of": 3, "use_beam_search": True},
    {"penalty_alpha": 0.6, "top_k": 3},
)


class Broken(Exception):
    """What a backend may raise."""


def recorded(
    seed: int, *, policy: Policy | None = None, num_turns: int = 30, plain: bool = False
) -> list[Json]:
    """Return the records of a random run; all requests have one answer if it is ``plain``."""
    dice = random.Random(seed)
    records: list[Record] = []
    speculation = Speculation(Oracle(0.7, dice)) if dice.random() < 0.5 else None
    scheduler = make_scheduler(
        16,
        3,
        policy=policy or dice.choice(POLICIES),
        budget=dice.choice((12, 40)),
        seats=dice.choice((4, 8)),
        caching=dice.random() < 0.7,
        speculation=speculation,
    )
    if scheduler.policy.whole_prompts:
        scheduler.max_num_batched_tokens = 40
    engine, runner = make_engine(
        scheduler, max_model_len=24, eos_ids=(3,), listeners=[records.append]
    )

    queue: list[float] = []  # arrival times of those that wait before the engine

    def fail() -> None:
        raise Broken

    def come() -> None:
        if len(queue) < 4:
            queue.append(engine.clock())

    resting: list[int] = []
    for turn in range(num_turns):
        queue += [engine.clock() for _ in range(dice.choice((0, 0, 1, 2)))]
        while queue and dice.random() < 0.6:
            kind = {} if plain else dice.choice(_KINDS)
            params = SamplingParams(
                max_tokens=dice.randint(1, 9), ignore_eos=dice.random() < 0.7, **kind
            )
            prompt = tuple(dice.choices((1, 2), k=dice.randint(1, 14)))
            with suppress(ValueError):  # it can never run, and leaves no record
                engine.add(prompt, params, arrival_s=queue.pop(0), name=f"name-{turn}")
        if engine.requests and dice.random() < 0.15:
            engine.abort(dice.choice(list(engine.requests)))
        if resting and dice.random() < 0.5:
            engine.resume(resting.pop())
        elif engine.requests and dice.random() < 0.2:
            resting.append(dice.choice(list(engine.requests)))
            engine.pause(resting[-1])
        runner.ledger.fail = {dice.randrange(10): "wrong"} if dice.random() < 0.1 else {}
        runner.during = fail if turn % 9 == 5 else come
        try:
            engine.step(Load(dice.choice((0, 3)), is_read=dice.random() < 0.8))
        except Broken:
            engine.check()
    runner.during = lambda: None
    for request_id in resting:
        engine.resume(request_id)
    finish(engine)
    return [json.loads(json.dumps(to_json(record))) for record in records]
