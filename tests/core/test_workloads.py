"""Random workloads: the same answers under every policy, cache, budget and company, and an end."""

from __future__ import annotations

import random

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import Orca, Policy, SplitFuse
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import Event, SeqId
from tests.core.harness import (
    POLICIES,
    Watched,
    expected,
    finish,
    make_engine,
    make_scheduler,
    tokens_of,
)

TokenRequest = tuple[tuple[int, ...], SamplingParams]
MAX_LEN = 40


def workload(dice: random.Random, size: int) -> list[TokenRequest]:
    """Return requests over two letters, some of them exact repeats of earlier ones."""
    wishes: list[TokenRequest] = []
    for _ in range(size):
        prompt = tuple(dice.choices((0, 1), k=dice.randint(1, 25)))
        if wishes and dice.random() < 0.5:
            earlier = dice.choice(wishes)[0]
            prompt = (earlier + prompt[: dice.randint(0, 3)])[:25]
        params = SamplingParams(
            max_tokens=dice.randint(1, 15),
            n=dice.choice((1, 1, 2, 3)),
            seed=dice.randrange(4),
            stop_token_ids=dice.choice(((), (3,))),
        )
        wishes.append((prompt, params))
    return wishes


def serve(
    wishes: list[TokenRequest],
    num_blocks: int,
    block_size: int,
    *,
    policy: Policy,
    budget: int = 64,
    seats: int = 8,
    caching: bool = True,
    arrivals: random.Random | None = None,
    speculation: Speculation | None = None,
    checkpoints: int | None = None,
) -> tuple[dict[SeqId, list[int]], Watched]:
    """Serve all, at once or as they arrive; return the answers and the runner that saw it."""
    scheduler = make_scheduler(
        num_blocks,
        block_size,
        policy=policy,
        budget=budget,
        seats=seats,
        caching=caching,
        speculation=speculation,
        checkpoints=checkpoints,
    )
    engine, runner = make_engine(scheduler, max_model_len=MAX_LEN)
    events: list[Event] = []
    answers: dict[SeqId, list[int]] = {}
    for prompt, params in wishes:
        while arrivals and arrivals.random() < 0.6:
            events += engine.step()
            engine.check()
        request_id = engine.add(prompt, params)
        answers |= expected(engine.requests[request_id])
    events += finish(engine)
    most = sum((len(prompt) + (params.max_tokens or 0)) * params.n for prompt, params in wishes)
    assert len(runner.steps) <= most, "in each step the oldest must come a token further"
    tokens = tokens_of(events)
    assert tokens == answers
    return tokens, runner


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_workload_is_answered(policy: Policy) -> None:
    num_preempted = num_cached = num_copies = num_evicted = 0
    for number in range(160):
        dice = random.Random(number)
        block_size = number % 16 + 1
        num_blocks = -(-MAX_LEN // block_size) + dice.choice((0, 0, 1, 4, 10))
        _, runner = serve(
            workload(dice, dice.randint(1, 10)),
            num_blocks,
            block_size,
            policy=policy,
            budget=64 if policy.whole_prompts else dice.choice((8, 16, 64)),
            seats=dice.randint(1, 8),
            caching=dice.random() < 0.8,
            arrivals=dice,
        )
        num_preempted += sum(len(step.preempted) for step in runner.steps)
        num_copies += sum(len(step.copies) for step in runner.steps)
        num_cached += sum(length for step in runner.steps for _, length in step.admitted)
        written = sum(len(work.tokens) for step in runner.steps for work in step.work)
        num_evicted += written > num_blocks * block_size
    # Enough of everything that is hard happened on the way.
    assert num_preempted > 20
    assert num_copies > 20
    assert num_cached > 500
    assert num_evicted > 20


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_workload_is_answered_with_states(policy: Policy) -> None:
    num_preempted = num_cached = num_copies = num_saved = 0
    for number in range(160):
        dice = random.Random(number)
        block_size = number % 8 + 1
        _, runner = serve(
            workload(dice, dice.randint(1, 10)),
            -(-MAX_LEN // block_size) + dice.choice((0, 0, 1, 4, 10)),
            block_size,
            policy=policy,
            budget=64 if policy.whole_prompts else dice.choice((8, 16, 64)),
            seats=dice.randint(1, 8),
            caching=dice.random() < 0.8,
            arrivals=dice,
            checkpoints=dice.choice((0, 1, 2, 8)),
        )
        num_preempted += sum(len(step.preempted) for step in runner.steps)
        num_cached += sum(length for step in runner.steps for _, length in step.admitted)
        num_copies += sum(len(step.state_copies) for step in runner.steps)
        num_saved += sum(len(work.save) for step in runner.steps for work in step.work)
    assert num_preempted > 20
    assert num_cached > 200
    assert num_copies > 100
    assert num_saved > 200


def test_answers_do_not_depend_on_how_they_are_served() -> None:
    dice = random.Random(0)
    wishes = workload(dice, 12)
    reference, _ = serve(wishes, 200, 16, policy=SplitFuse())
    for number, policy in enumerate(POLICIES * 4):
        answers, _ = serve(
            wishes,
            50 if number % 2 else 10 + number,
            4,
            policy=policy,
            budget=40 + number,
            seats=1 + number,
            caching=number % 4 < 2,
        )
        assert answers == reference
    for budget in (8, 9, 13, 25):
        assert serve(wishes, 60, 4, policy=SplitFuse(), budget=budget)[0] == reference
    for i, wish in enumerate(wishes):
        alone, _ = serve([wish], 10, 4, policy=SplitFuse())
        assert {(i, index): tokens for (_, index), tokens in alone.items()} == {
            seq_id: tokens for seq_id, tokens in reference.items() if seq_id[0] == i
        }


def test_exact_repeats_compute_the_prompt_once() -> None:
    wish = (tuple(i % 2 for i in range(25)), SamplingParams(max_tokens=1, seed=0))
    _, runner = serve([wish] * 5, 40, 4, policy=SplitFuse(), seats=1, budget=30)
    computed = [sum(len(work.tokens) for work in step.work) for step in runner.steps]
    assert computed == [25, 1, 1, 1, 1]
    _, runner = serve([wish] * 5, 40, 4, policy=SplitFuse(), seats=1, budget=30, caching=False)
    assert sum(len(work.tokens) for step in runner.steps for work in step.work) == 125


def test_exact_repeats_resume_at_the_end_of_the_prompt() -> None:
    wish = (tuple(i % 2 for i in range(27)), SamplingParams(max_tokens=1, seed=0))
    for checkpoints, computed in ((2, [27, 3, 3]), (0, [27, 27, 27])):
        _, runner = serve(
            [wish] * 3, 40, 4, policy=SplitFuse(), seats=1, budget=30, checkpoints=checkpoints
        )
        assert [len(work.tokens) for step in runner.steps for work in step.work] == computed


@pytest.mark.parametrize("policy", [Orca(), SplitFuse()])
def test_a_pool_for_one_serves_many(policy: Policy) -> None:
    wishes = [((i, *[1] * 24), SamplingParams(max_tokens=15, n=2, seed=i)) for i in range(6)]
    for block_size in (1, 3, 8, 16):
        serve(wishes, -(-MAX_LEN // block_size), block_size, policy=policy)
