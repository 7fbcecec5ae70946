"""The scheduler: budgets, seats, memory, and a reason for everyone who does not run."""

from __future__ import annotations

import pytest

from ridgeline.core.commit import commit
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request, Status
from ridgeline.core.scheduling.policies import Orca, Policy, Static
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import FinishReason, StepOutput, TokenLogprobs, TokenRules, Wait
from tests.core.harness import YoungestFirst, make_request, make_scheduler, run_step, sizes_of

BUDGET, BLOCKS, SEATS, POLICY = Wait.TOKEN_BUDGET, Wait.BLOCKS, Wait.MAX_NUM_SEQS, Wait.POLICY


def add(
    scheduler: Scheduler, *lengths: int, first_id: int = 0, max_tokens: int = 8, n: int = 1
) -> list[Request]:
    """Queue requests with prompts of these lengths that have nothing in common."""
    requests = [
        make_request(i, [100 * i + j for j in range(length)], max_tokens=max_tokens, n=n)
        for i, length in enumerate(lengths, start=first_id)
    ]
    for request in requests:
        scheduler.add(request)
    return requests


# --- the budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "seats"), [(3, 4), (4, 0), (0, 0)])
def test_every_seat_must_have_a_token(budget: int, seats: int) -> None:
    with pytest.raises(ValueError, match=rf"max_num_batched_tokens \({budget}\).*\({seats}\)"):
        make_scheduler(budget=budget, seats=seats)
    make_scheduler(budget=4, seats=4)


def test_prompts_run_in_pieces_within_the_budget() -> None:
    scheduler = make_scheduler(budget=10)
    add(scheduler, 4, 14, 3)
    step = run_step(scheduler)
    assert sizes_of(step) == {(0, 0): 4, (2, 0): 3, (1, 0): 3}  # the shorter one passes
    assert [bool(work.seeds) for work in step.work] == [True, True, False]
    step = run_step(scheduler)  # one token for who decodes, then more of the prompt
    assert sizes_of(step) == {(0, 0): 1, (2, 0): 1, (1, 0): 8}
    assert [(work.start, work.tokens) for work in step.work] == [
        (4, (0,)),
        (3, (0,)),
        (3, tuple(range(103, 111))),
    ]


def test_a_running_sequence_without_budget_says_so() -> None:
    scheduler = make_scheduler(budget=6, seats=3)
    add(scheduler, 4, 4)
    run_step(scheduler)  # the second has 2 of 4
    add(scheduler, 4, first_id=2)
    run_step(scheduler)
    assert [seq.num_pending for seq in scheduler.queues.running] == [1, 1, 1]
    scheduler = make_scheduler(budget=3, seats=3, policy=YoungestFirst())
    add(scheduler, 2, 9)
    run_step(scheduler)
    step = run_step(scheduler)  # the youngest takes it all
    assert sizes_of(step) == {(1, 0): 3}
    assert step.waits == (((0, 0), BUDGET),)


# --- seats and other reasons to wait ------------------------------------------------------------


def test_seats_limit_who_runs() -> None:
    scheduler = make_scheduler(seats=2)
    add(scheduler, 3, 3, 3, 3)
    step = run_step(scheduler)
    assert sizes_of(step) == {(0, 0): 3, (1, 0): 3}
    assert step.waits == (((2, 0), SEATS), ((3, 0), SEATS))
    assert run_step(scheduler).waits == step.waits


def test_who_waits_for_blocks_says_so() -> None:
    scheduler = make_scheduler(4, 4)
    add(scheduler, 8, 10, 9, max_tokens=6)
    step = run_step(scheduler)
    assert sizes_of(step) == {(0, 0): 8}
    assert step.waits == (((1, 0), BLOCKS), ((2, 0), BLOCKS))
    add(scheduler, 1, first_id=3)
    step = run_step(scheduler)  # the oldest that waits has no room: nobody overtakes it
    assert sizes_of(step) == {(0, 0): 1}
    assert step.waits == tuple(((i, 0), BLOCKS) for i in (1, 2, 3))


def test_who_waits_for_the_policy_says_so() -> None:
    scheduler = make_scheduler(policy=Static())
    add(scheduler, 3)
    run_step(scheduler)
    add(scheduler, 3, first_id=1)
    assert run_step(scheduler).waits == (((1, 0), POLICY),)


@pytest.mark.parametrize("policy", [Static(), Orca()])
def test_whole_prompts_wait_for_a_step_with_room(policy: Policy) -> None:
    scheduler = make_scheduler(budget=20, policy=policy)
    add(scheduler, 12, 9, 1)
    step = run_step(scheduler)
    assert sizes_of(step) == {(0, 0): 12}
    assert step.waits == (((1, 0), BUDGET), ((2, 0), BUDGET))


@pytest.mark.parametrize("policy", [Static(), Orca()])
def test_a_whole_prompt_needs_budget_only_for_what_is_not_cached(policy: Policy) -> None:
    """Of 17 tokens 16 are cached, so one is to be computed; the budget of 24 has room for that."""
    scheduler = make_scheduler(budget=24, policy=policy)
    for request_id, prompt in enumerate(([*range(17)], [*range(50, 58)], [*range(17)])):
        scheduler.add(make_request(request_id, prompt, max_tokens=1))
        if request_id == 0:
            run_step(scheduler)
    add(scheduler, 15, 1, first_id=3, max_tokens=1)
    step = run_step(scheduler)
    assert sizes_of(step) == {(1, 0): 8, (2, 0): 1, (3, 0): 15}
    assert step.admitted == (((1, 0), 0), ((2, 0), 16), ((3, 0), 0))
    assert step.waits == (((4, 0), BUDGET),)


def test_a_whole_prompt_whose_rest_is_too_long_waits_and_evicts_nothing() -> None:
    scheduler = make_scheduler(10, 4, budget=24, policy=Orca())
    scheduler.add(make_request(0, range(17), max_tokens=1))
    run_step(scheduler)
    known = set(scheduler.queues.kv.pool.index[0])
    scheduler.add(make_request(1, range(50, 66), max_tokens=1))
    scheduler.add(make_request(2, [*range(8), *range(90, 99)], max_tokens=1))  # 8 are cached
    step = run_step(scheduler)
    assert sizes_of(step) == {(1, 0): 16}
    assert step.waits == (((2, 0), BUDGET),)
    assert len(known) == 4
    assert known <= set(scheduler.queues.kv.pool.index[0])
    assert run_step(scheduler).admitted == (((2, 0), 8),)


def test_orca_admits_between_steps_and_static_between_batches() -> None:
    for policy, joins in ((Orca(), True), (Static(), False)):
        scheduler = make_scheduler(policy=policy)
        add(scheduler, 3, max_tokens=2)
        run_step(scheduler)
        add(scheduler, 3, first_id=1)
        assert ((1, 0) in sizes_of(run_step(scheduler))) is joins
        assert (1, 0) in sizes_of(run_step(scheduler))


def test_reserving_policies_take_blocks_for_the_longest_answer() -> None:
    for policy, num_blocks in ((Orca(), 4), (make_scheduler().policy, 1)):
        scheduler = make_scheduler(policy=policy)
        add(scheduler, 3, max_tokens=10)
        run_step(scheduler)
        assert len(scheduler.queues.running[0].table) == num_blocks


# --- admission ----------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(4, 4)
    with pytest.raises(ValueError, match=r"17 tokens = 5 blocks of 4, but the KV cache has 4"):
        add(scheduler, 9, max_tokens=8)
    assert not scheduler.queues.has_work()
    add(scheduler, 9, max_tokens=7)
    assert scheduler.queues.has_work()


def test_whole_prompt_policies_refuse_what_exceeds_the_budget() -> None:
    scheduler = make_scheduler(budget=16, policy=Orca())
    with pytest.raises(ValueError, match=r"17 tokens: more than --max-num-batched-tokens \(16\)"):
        add(scheduler, 9, max_tokens=8)
    add(scheduler, 9, max_tokens=7)
    add(make_scheduler(budget=16), 9, max_tokens=8)


def test_admission_says_how_much_of_the_prompt_was_cached() -> None:
    scheduler = make_scheduler(block_size=4)
    prompt = list(range(10))
    scheduler.add(make_request(0, prompt, max_tokens=1))
    assert run_step(scheduler).admitted == (((0, 0), 0),)
    scheduler.add(make_request(1, prompt, max_tokens=1))
    scheduler.add(make_request(2, [*prompt[:5], 77, 78, 79], max_tokens=1))
    step = run_step(scheduler)
    assert step.admitted == (((1, 0), 8), ((2, 0), 4))
    assert [(work.start, work.tokens) for work in step.work] == [(8, (8, 9)), (4, (4, 77, 78, 79))]


def test_requests_queue_in_order_of_their_ids() -> None:
    scheduler = make_scheduler()
    for request_id in (2, 0, 1):
        scheduler.add(make_request(request_id, [request_id]))
    assert list(sizes_of(run_step(scheduler))) == [(0, 0), (1, 0), (2, 0)]


# --- preemption ---------------------------------------------------------------------------------


def test_the_youngest_gives_way_to_the_oldest() -> None:
    scheduler = make_scheduler(3, 4)
    requests = add(scheduler, 4, 4, 4, max_tokens=6)
    assert len(run_step(scheduler).work) == 3
    step = run_step(scheduler)  # all need a second block
    assert step.preempted == ((2, 0),)
    assert sizes_of(step) == {(0, 0): 1}
    assert dict(step.waits) == {(1, 0): BLOCKS, (2, 0): BLOCKS}
    victim = requests[2].sequences[0]
    assert (victim.status, victim.num_generated) == (Status.PREEMPTED, 1)
    assert requests[2].num_preemptions == 1
    assert (victim.num_computed, victim.num_pending, victim.table) == (0, 5, ())
    assert requests[1].num_preemptions == 0


def test_as_many_give_way_as_it_takes_the_youngest_first() -> None:
    scheduler = make_scheduler(2, 4)
    add(scheduler, 4, max_tokens=4)
    add(scheduler, 4, max_tokens=4, n=2, first_id=1)
    run_step(scheduler)
    step = run_step(scheduler)  # one answer's blocks are all shared with the other's
    assert step.preempted == ((1, 1), (1, 0))
    assert sizes_of(step) == {(0, 0): 1}


def test_the_young_never_take_from_the_old() -> None:
    scheduler = make_scheduler(4, 4)
    add(scheduler, 8, 4)
    run_step(scheduler)
    step = run_step(scheduler)  # the old takes the last block, the young has nobody to take from
    assert step.preempted == ()
    assert sizes_of(step) == {(0, 0): 1}
    assert step.waits == (((1, 0), BLOCKS),)
    assert [seq.id for seq in scheduler.queues.running] == [(0, 0), (1, 0)]


def test_nobody_is_admitted_into_a_step_that_preempts() -> None:
    scheduler = make_scheduler(3, 4)
    add(scheduler, 8, 4, max_tokens=4)
    run_step(scheduler)
    add(scheduler, 1, first_id=2)
    step = run_step(scheduler)
    assert step.preempted == ((1, 0),)
    assert step.admitted == ()
    assert dict(step.waits) == {(1, 0): BLOCKS, (2, 0): BLOCKS}


def test_what_the_youngest_was_granted_in_this_step_is_taken_back() -> None:
    scheduler = make_scheduler(2, 4, policy=YoungestFirst())
    add(scheduler, 4, 1, max_tokens=4)
    run_step(scheduler)
    step = scheduler.schedule()  # 1 is granted a token first, and loses its block to 0
    assert step.preempted == ((1, 0),)
    assert sizes_of(step) == {(0, 0): 1}
    assert step.waits == (((1, 0), BLOCKS),)
    assert [event.seq_id for event in commit(scheduler.queues, step, StepOutput(((0,),)))] == [
        (0, 0)
    ]
    scheduler.queues.check()


def test_tokens_that_are_taken_back_can_be_granted_again() -> None:
    scheduler = make_scheduler(4, 4, policy=YoungestFirst(), budget=4, seats=3)
    add(scheduler, 1, 1)
    for _ in range(3):
        run_step(scheduler)
    add(scheduler, 5, first_id=2)
    assert sizes_of(run_step(scheduler)) == {(1, 0): 1, (0, 0): 1, (2, 0): 2}
    step = run_step(scheduler)  # 2 is granted three of the four; 1 and 0 take its blocks
    assert step.preempted == ((2, 0),)
    assert sizes_of(step) == {(1, 0): 1, (0, 0): 1}


# --- n > 1 --------------------------------------------------------------------------------------


def test_answers_fork_from_one_computed_prompt() -> None:
    scheduler = make_scheduler(block_size=4)
    request = make_request(0, range(6), n=3, seed=1)
    scheduler.add(request)
    step = scheduler.schedule()
    assert len(step.work) == 1
    assert len(set(step.work[0].seeds)) == 3
    used = len(scheduler.queues.kv.pool.refs) - len(scheduler.queues.kv.pool.free)
    events = commit(scheduler.queues, step, StepOutput(((7, 8, 9),)))
    assert [(event.seq_id, event.token) for event in events] == [
        ((0, 0), 7),
        ((0, 1), 8),
        ((0, 2), 9),
    ]
    assert len({seq.table for seq in request.sequences}) == 1
    assert len(scheduler.queues.kv.pool.refs) - len(scheduler.queues.kv.pool.free) == used
    scheduler.queues.check()
    seeds = step.work[0].seeds
    step = scheduler.schedule()
    assert [work.seeds for work in step.work] == [(seed,) for seed in seeds]
    assert [work.tokens for work in step.work] == [(7,), (8,), (9,)]
    assert len(step.copies) == 2, "the last to write keeps the block"
    tables = [work.table for work in step.work]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3


def test_an_answer_without_a_seat_comes_back_through_the_prefix_cache() -> None:
    scheduler = make_scheduler(block_size=4, seats=2)
    request = make_request(0, range(9), n=3, max_tokens=3)
    scheduler.add(request)
    step = run_step(scheduler, {(0, 0): (7, 8, 9)})
    assert [seq.status for seq in request.sequences] == [
        Status.RUNNING,
        Status.RUNNING,
        Status.WAITING,
    ]
    step = run_step(scheduler)
    assert step.waits == (((0, 2), SEATS),)
    run_step(scheduler)
    step = run_step(scheduler)
    assert step.admitted == (((0, 2), 8),)
    assert [(work.start, work.tokens) for work in step.work] == [(8, (8, 9))]


def test_an_answer_may_end_with_its_first_token_while_others_go_on() -> None:
    scheduler = make_scheduler()
    request = make_request(0, range(6), n=2, stop_token_ids=[5])
    scheduler.add(request)
    run_step(scheduler, {(0, 0): (5, 6)})
    assert [seq.finish_reason for seq in request.sequences] == [FinishReason.STOP, None]
    assert not request.is_finished
    assert sizes_of(run_step(scheduler)) == {(0, 1): 1}


# --- what a backend is told ---------------------------------------------------------------------


def test_history_and_targets_only_for_those_who_need_them() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request(0, [1, 2], presence_penalty=1.0))
    scheduler.add(make_request(1, [3, 4, 5, 6, 7, 8, 9], prompt_logprobs=0))
    first, second = run_step(scheduler, {(0, 0): (11,)}).work
    assert (first.history, first.targets) == ((1, 2), ())
    assert (second.history, second.targets) == ((), (4, 5, 6, 7, 8, 9))
    assert len(second.tokens) == 6
    first, second = run_step(scheduler).work
    assert first.history == (1, 2, 11)
    assert (second.tokens, second.targets) == ((9,), ())


def test_dry_and_bad_words_need_the_history_too() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request(0, [1, 2], dry_multiplier=1.0))
    scheduler.add(make_request(1, [3], bad_words=["x"]))
    scheduler.add(make_request(2, [4], typical_p=0.5))
    assert [work.history for work in run_step(scheduler).work] == [(1, 2), (3,), ()]


def test_what_parameters_mean_in_ids_reaches_the_backend() -> None:
    rules = TokenRules(allowed=b"\x07", banned=(1,))
    request = Request(0, (1, 2), SamplingParams(), max_model_len=9, token_rules=rules)
    assert request.sampling.tokens is rules
    assert make_request(1, [3]).sampling.tokens == TokenRules()


def test_history_is_not_sent_before_a_token_is_sampled() -> None:
    scheduler = make_scheduler(budget=4, seats=1)
    scheduler.add(make_request(0, range(6), frequency_penalty=1.0))
    assert run_step(scheduler).work[0].history == ()
    assert run_step(scheduler).work[0].history == (0, 1, 2, 3, 4, 5)


def test_logprobs_go_to_their_tokens() -> None:
    scheduler = make_scheduler(budget=3, seats=3)
    ranks = [TokenLogprobs(i, -float(i), i, ()) for i in range(10)]
    request = make_request(0, [1, 2, 3, 4], prompt_logprobs=1, logprobs=1, n=2)
    scheduler.add(request)
    step = scheduler.schedule()
    output = StepOutput(((),), prompt_logprobs={0: (ranks[1], ranks[2], ranks[3])})
    assert commit(scheduler.queues, step, output) == []
    assert request.prompt_logprobs == {1: ranks[1], 2: ranks[2], 3: ranks[3]}
    step = scheduler.schedule()
    events = commit(
        scheduler.queues, step, StepOutput(((7, 8),), logprobs={0: (ranks[7], ranks[8])})
    )
    assert [event.logprobs for event in events] == [ranks[7], ranks[8]]
    step = scheduler.schedule()
    events = commit(scheduler.queues, step, StepOutput(((5,), (6,)), logprobs={1: (ranks[6],)}))
    assert [event.logprobs for event in events] == [None, ranks[6]]


# --- check --------------------------------------------------------------------------------------


def test_check_sees_what_is_broken() -> None:
    scheduler = make_scheduler(seats=2)
    add(scheduler, 3, 3, 3, 3)
    run_step(scheduler)
    scheduler.queues.check()
    scheduler.queues.waiting.reverse()
    with pytest.raises(AssertionError, match="out of order"):
        scheduler.queues.check()
    scheduler.queues.waiting.reverse()
    scheduler.queues.max_num_seqs = 1
    with pytest.raises(AssertionError, match="too many"):
        scheduler.queues.check()


def test_room_is_what_the_queues_leave_of_a_step() -> None:
    scheduler = make_scheduler(budget=24, seats=4)
    assert scheduler.room()[:4] == (4, 24, 3, 12)
    add(scheduler, 30, 2)
    assert scheduler.room()[:4] == (2, -8, 3, 10)
    run_step(scheduler)  # the second, and 22 tokens of the first
    assert scheduler.room()[:4] == (2, 16, 3, 12)


# --- a runner that goes on before it is asked ---------------------------------------------------


def test_looking_ahead_keeps_room_for_one_token_more() -> None:
    scheduler = make_scheduler(looks_ahead=True)
    add(scheduler, 6, max_tokens=4)
    tables = [len(run_step(scheduler).work[0].table) for _ in range(4)]
    assert tables == [2, 2, 3, 3]  # of 6, 7, 8 and 9 tokens: the third comes with the eighth
    plain = make_scheduler()
    add(plain, 6, max_tokens=4)
    assert [len(run_step(plain).work[0].table) for _ in range(4)] == [2, 2, 2, 3]


def test_looking_ahead_keeps_no_room_behind_an_answers_end() -> None:
    scheduler = make_scheduler(looks_ahead=True)
    add(scheduler, 6, max_tokens=2)
    assert [len(run_step(scheduler).work[0].table) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize(("num_blocks", "wanted"), [(3, 2), (4, 3)])
def test_looking_ahead_leaves_an_eighth_of_all_blocks(num_blocks: int, wanted: int) -> None:
    scheduler = make_scheduler(num_blocks, looks_ahead=True)
    add(scheduler, 8, max_tokens=4)
    assert len(run_step(scheduler).work[0].table) == wanted
