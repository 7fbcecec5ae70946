"""Policies: the order of their requests, and that each stays small."""

from __future__ import annotations

import inspect

import pytest

from ridgeline.core.request import Sequence
from ridgeline.core.scheduling.policies import Load, Orca, Policy, SplitFuse, Static
from tests.core.harness import POLICIES, make_request


def seq(request_id: int, num_pending: int) -> Sequence:
    one = make_request(request_id, [1] * 10).sequences[0]
    one.num_computed, one.num_pending = 10 - num_pending, num_pending
    return one


def requested(
    policy: Policy, running: list[Sequence], waiting: list[Sequence]
) -> list[tuple[int, int]]:
    return [
        (s.id[0], wanted) for s, wanted in policy.token_requests(running, waiting, Load(), 1000)
    ]


def test_static_names_nobody_new_before_the_batch_is_done() -> None:
    running, waiting = [seq(0, 1), seq(1, 1)], [seq(2, 9), seq(3, 4)]
    assert requested(Static(), running, waiting) == [(0, 1), (1, 1)]
    assert requested(Static(), [], waiting) == [(2, 9), (3, 4)]


def test_orca_names_all_whole_the_running_first() -> None:
    running, waiting = [seq(0, 1), seq(1, 1)], [seq(2, 9)]
    assert requested(Orca(), running, waiting) == [(0, 1), (1, 1), (2, 9)]


def test_splitfuse_decodes_before_prompts_and_takes_them_in_pieces() -> None:
    running, waiting = [seq(0, 7), seq(1, 1), seq(2, 5), seq(3, 1)], [seq(4, 1), seq(5, 9)]
    assert requested(SplitFuse(), running, waiting) == [
        (1, 1),
        (3, 1),
        (0, 7),
        (4, 1),
        (2, 5),
        (5, 9),
    ]


def test_the_oldest_prompt_leaves_half_to_others_and_the_shortest_come_first() -> None:
    def wanted(budget: int, *lengths: int, is_read: bool = True) -> list[tuple[int, int]]:
        seqs, load = [seq(i, length) for i, length in enumerate(lengths)], Load(is_read=is_read)
        found = SplitFuse().token_requests(seqs[:1], seqs[1:], load, budget)
        return [(s.id[0], count) for s, count in found]

    assert wanted(100, 1000) == [(0, 100)]
    assert wanted(100, 1000, 20) == [(0, 80), (1, 20)]
    assert wanted(100, 1000, 90, 20) == [(0, 50), (2, 20), (1, 30)]
    assert wanted(100, 30, 90, 20) == [(0, 30), (2, 20), (1, 50)]
    assert wanted(100, 80, 80, 80) == [(0, 80), (1, 20)]  # of equal ones the first is done first
    assert wanted(100, 1000, 90, 20, is_read=False) == [(0, 100)]


def test_a_ranked_prompt_counts_twice_while_others_decode() -> None:
    ranked = make_request(0, range(900), prompt_logprobs=0).sequences[0]
    plain, decoding = seq(1, 10), seq(2, 1)
    found = SplitFuse(min_chunk=64).token_requests([decoding], [ranked, plain], Load(), 1000)
    assert [(s.id[0], wanted) for s, wanted in found] == [(2, 1), (0, 59), (1, 10)]
    found = SplitFuse(min_chunk=64).token_requests([], [ranked], Load(), 500)  # nobody is held up
    assert [(s.id[0], wanted) for s, wanted in found] == [(0, 500)]


def test_prompts_get_as_many_tokens_as_decode_unless_more_wait() -> None:
    def wanted(running: list[int], waiting: list[int]) -> list[int]:
        seqs = [seq(i, count) for i, count in enumerate((*running, *waiting))]
        split = len(running)
        return [w for _, w in requested(SplitFuse(min_chunk=5), seqs[:split], seqs[split:])]

    assert wanted([9, 4], [8]) == [9, 4, 8]  # nobody decodes: all there is
    assert wanted([1, 9], []) == [1, 5]
    assert wanted([1, 1, 3], [8, 9]) == [1, 1, 3, 4]  # 7: three wait, two decode
    assert wanted([1] * 8, [10]) == [1] * 8 + [8]
    assert wanted([1] * 8, [6, 10]) == [1] * 8 + [6, 2]
    assert wanted([1], [9, 9, 9, 9]) == [1, 9, 9, 2]
    one, two = seq(0, 1), seq(1, 40)
    found = SplitFuse(min_chunk=5).token_requests(
        [one], [two], Load(3), 1000
    )  # who waits elsewhere counts too
    assert [wanted for _, wanted in found] == [1, 20]
    found = SplitFuse(min_chunk=5).token_requests([one], [two], Load(3, is_read=False), 1000)
    assert [wanted for _, wanted in found] == [1, 40]  # nobody reads along: prompts first


def test_what_a_prompt_finds_in_the_cache_is_left_for_the_next() -> None:
    """Admission, between two requests, may leave less to compute than was pending before."""
    decoding, cached, other = seq(0, 1), seq(1, 9), seq(2, 9)
    found = SplitFuse(min_chunk=5).token_requests([decoding], [cached, other], Load(), 1000)
    assert [next(found)[1], next(found)[1]] == [1, 9]  # of 10 for both
    cached.num_computed, cached.num_pending = 8, 2
    assert next(found) == (other, 8)


def test_who_reserves_and_who_runs_whole() -> None:
    assert [(policy.reserve_full, policy.whole_prompts) for policy in POLICIES] == [
        (True, True),
        (True, True),
        (False, False),
    ]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_policy_is_a_generator_of_few_lines(policy: Policy) -> None:
    assert inspect.isgeneratorfunction(policy.token_requests)
    assert len(inspect.getsource(type(policy)).splitlines()) <= 40
