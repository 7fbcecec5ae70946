"""Workloads: arrivals, lengths, prompts. No network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.foresight.simulator.workload import (
    LoadTrace,
    Traced,
    Workload,
    draw,
    gamma_arrivals,
    lognormal_lengths,
    make_plan,
    parse_prompts,
    parse_trace,
    synthetic_prompts,
)

DATA = Path(os.environ.get("RIDGELINE_BENCH_DATA", "/nonexistent"))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


# --- arrivals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_a_gamma_distribution(shape: float) -> None:
    times = gamma_arrivals(20_000, 8.0, shape, Random(1))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(shape**-0.5, rel=0.05)


def test_the_end_of_a_poisson_run_varies_as_much_as_it_should() -> None:
    """Rescaled arrivals, which end at the same time each time, would have no variance here."""
    ends = [gamma_arrivals(50, 1.0, 1.0, Random(seed))[-1] for seed in range(400)]
    assert statistics.variance(ends) == pytest.approx(50, rel=0.2)


def test_even_and_all_at_once_are_the_ends_of_the_scale() -> None:
    assert gamma_arrivals(4, 2.0, math.inf, Random(0)) == [0, 0.5, 1, 1.5]
    assert gamma_arrivals(3, math.inf, 1.0, Random(0)) == [0, 0, 0]


def test_a_seed_repeats_the_plan_and_no_seed_does_not() -> None:
    one, two, other = (make_plan(Workload(request_rate=5.0, seed=s)) for s in (7, 7, 8))
    assert one == two
    assert one != other
    assert {p.prompt for p in one}.isdisjoint(p.prompt for p in other)


# --- times and lengths of a trace -----------------------------------------------------------------


def test_a_rate_stretches_the_times_and_keeps_their_shape() -> None:
    load = Workload(trace_file="t", num_prompts=3, request_rate=0.25, num_warmups=0)
    plan = make_plan(load, parse_trace(AZURE + "0,1,1\n1,1,1\n4,1,1\n9,1,1\n", "t"))
    assert [p.arrival_s for p in plan] == [0, 2, 8]  # two gaps in 8 s: 0.25 per second


def test_a_plan_takes_times_and_bounded_lengths_of_the_trace() -> None:
    trace = parse_trace(AZURE + "1,50,3\n2,500,40\n3,7,9\n", "t")
    load = Workload(trace_file="t", prompt_words="60", max_tokens="20", num_warmups=2)
    plan = make_plan(load, trace)
    assert [p.index for p in plan] == [-2, -1, 0, 1, 2]
    assert [p.arrival_s for p in plan] == [None, None, 0, 1, 2]
    assert [len(p.prompt.split()) for p in plan[2:]] == [50, 60, 7]
    assert [p.max_tokens for p in plan[2:]] == [3, 20, 9]


def test_lengths_of_a_trace_come_in_pairs_in_any_order_and_arrivals_from_elsewhere() -> None:
    trace = parse_trace(AZURE + "".join(f"{i},{10 + i},{30 + i}\n" for i in range(20)), "t")
    load = Workload(lengths_from="t", max_concurrency=2, num_prompts=40, num_warmups=0, seed=1)
    pairs = [(len(p.prompt.split()), p.max_tokens) for p in make_plan(load, trace)]
    assert all(answer == prompt + 20 for prompt, answer in pairs)
    assert sorted(pairs[:20]) == sorted(pairs[20:]) == [(10 + i, 30 + i) for i in range(20)]
    assert pairs[:20] != sorted(pairs[:20])
    assert {p.arrival_s for p in make_plan(load, trace)} == {None}


@pytest.mark.parametrize("variation", [0.2, 1.0])
def test_lengths_have_the_mean_and_the_variation_that_were_asked_for(variation: float) -> None:
    lengths = lognormal_lengths(f"400:{variation}", "max_tokens", 20_000, Random(2))
    assert statistics.mean(lengths) == pytest.approx(400, rel=0.03)
    assert statistics.stdev(lengths) / 400 == pytest.approx(variation, rel=0.08)
    assert min(lengths) >= 1


def test_prompts_share_the_blocks_whose_ids_are_equal_and_no_others() -> None:
    rows = [(1300, [1, 2, 3]), (1024, [1, 2]), (1100, [1, 9, 3]), (600, [7, 2])]
    text = "".join(
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
        for n, ids in rows
    )
    load = Workload(trace_file="t", seed=4, num_warmups=0)
    plan = make_plan(load, parse_trace(text, "t"))
    words = [p.prompt.split() for p in plan]
    assert [len(w) for w in words] == [n for n, _ in rows]
    assert words[0][:1024] == words[1]
    assert words[0][:512] == words[2][:512]
    assert words[0][512:1024] != words[2][512:1024]
    assert words[0][1024:1100] == words[2][1024:]  # but behind another block: no cache has it
    assert words[3][512:] == words[0][512:600]
    other = make_plan(dataclasses.replace(load, seed=5), parse_trace(text, "t"))
    assert all(a.prompt != b.prompt for a, b in zip(plan, other, strict=True))
    bounded = dataclasses.replace(load, prompt_words="700")
    assert [len(p.prompt.split()) for p in make_plan(bounded, parse_trace(text, "t"))] == (
        [700, 700, 700, 600]
    )


def test_token_ids_of_a_trace_are_the_prompts() -> None:
    trace = LoadTrace((Traced(5.0, 3, 7, token_ids=(4, 5, 6)), Traced(6.0, 2, 1, token_ids=(4, 9))))
    plan = make_plan(Workload(trace_file="t", num_warmups=0), trace)
    assert [(p.prompt, p.max_tokens, p.arrival_s) for p in plan] == [
        ((4, 5, 6), 7, 0.0),
        ((4, 9), 1, 1.0),
    ]


# --- sessions ------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_sessions_have_their_turns_in_order_and_arrive_once(
    num: int, turns: int, num_warmups: int, is_open: bool
) -> None:
    how: dict[str, Any] = {"request_rate": 2.0} if is_open else {"max_concurrency": 2}
    load = Workload(
        num_prompts=num, turns=turns, think_s=0.5, num_warmups=num_warmups, seed=3, **how
    )
    plan = make_plan(load)
    assert [p.index for p in plan] == list(range(-num_warmups, num))
    for p in plan:
        assert p.turn == (p.index % turns if p.index > 0 else 0)
        assert (p.arrival_s is not None) == (is_open and p.index >= 0 and p.turn == 0)
        assert p.think_s == (0.5 if p.turn else 0)


def test_sessions_keep_the_rate_of_requests() -> None:
    load = Workload(num_prompts=4000, turns=4, request_rate=8.0, num_warmups=0, seed=1)
    last_s = max(p.arrival_s or 0.0 for p in make_plan(load))
    assert 4000 / last_s == pytest.approx(8.0, rel=0.1)


def test_only_first_turns_share_a_prefix() -> None:
    load = Workload(num_prompts=8, turns=2, prefix_share=1.0, max_concurrency=1, num_warmups=0)
    plan = make_plan(dataclasses.replace(load, seed=1))
    assert len({p.prompt for p in plan if p.turn == 0}) == 1
    assert len({p.prompt for p in plan if p.turn == 1}) == 4


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_of_every_kind_of_line() -> None:
    text = 'plain words \n\n{"prompt": "two\\nlines"}\n{"turns": ["first", "second"]}\n'
    assert parse_prompts(text, "p") == ["plain words", "two\nlines", "first"]


@pytest.mark.parametrize("line", ['{"text": "x"}', '{"turns": []}', "{broken", '{"prompt": 3}'])
def test_a_line_without_a_prompt_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="p, line 2"):
        parse_prompts("fine\n" + line, "p")


def test_no_prompt_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        parse_prompts("\n \n", "p")


def test_none_comes_again_before_all_have_come() -> None:
    prompts = [str(i) for i in range(10)]
    drawn = draw(prompts, 25, Random(3))
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == prompts
    assert drawn[:10] != prompts  # a file is often sorted by kind


def test_synthetic_prompts_share_exactly_what_was_asked() -> None:
    for share in (0.0, 0.25, 1.0):
        words = [p.split() for p in synthetic_prompts([80] * 30, [share] * 30, Random(0))]
        assert {len(w) for w in words} == {80}
        common = sum(len(set(column)) == 1 for column in zip(*words, strict=True))
        assert common == 80 * share
    lengths = [len(p.split()) for p in synthetic_prompts([3, 1, 200], [0.5] * 3, Random(0))]
    assert lengths == [3, 1, 200]


@pytest.mark.skipif(not DATA.is_dir(), reason="RIDGELINE_BENCH_DATA names no folder of real traces")
def test_real_files_make_a_plan() -> None:
    prompts = parse_prompts((DATA / "prompts" / "spec_bench_dev.jsonl").read_text(), "p")
    trace = parse_trace((DATA / "traces" / "azure_2023_code.csv").read_text(), "t")
    load = Workload(trace_file="t", prompts="p", num_prompts=200, num_warmups=0)
    plan = make_plan(load, trace, prompts)
    assert len({p.prompt for p in plan}) == 200
    assert (plan[0].arrival_s, plan[0].max_tokens) == (0, 10)
    arrivals = [p.arrival_s or 0.0 for p in plan]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] > 60


# --- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "num", "digest"),
    [
        (
            {"request_rate": 5.0, "burstiness": 0.5, "num_prompts": 20, "prefix_share": 0.25},
            24,
            "540eb5a8090ec82ce6e1753e9ce027f56daccf478f0e3e7b369dba31e277fc36",
        ),
        (
            {"trace_file": "t", "request_rate": 2.0, "prompt_words": "60"},
            7,
            "2a1169a51a3c57e9aa212fe5447b0c29cadaff3e20a140ea17396974a9f3c129",
        ),
        (
            {"max_concurrency": 3, "prompts": "p", "num_prompts": 9, "max_tokens": "5"},
            13,
            "e8ecd244cb4cdef5590dd8c8cef8d1806210175d6ec61bf4f9a81645535abdab",
        ),
    ],
)
def test_a_seed_means_the_same_plan_in_every_version(
    flags: dict[str, Any], num: int, digest: str
) -> None:
    """Results that name their seed can be repeated only while this holds."""
    load = Workload(seed=7, **flags)
    trace = parse_trace(AZURE + "1,50,3\n2,500,40\n3,7,9\n", "t") if load.trace_file else None
    plan = make_plan(load, trace, ["one", "two", "three"] if load.prompts else None)
    text = repr([(p.index, p.prompt, p.max_tokens, p.arrival_s) for p in plan])
    assert (len(plan), hashlib.sha256(text.encode()).hexdigest()) == (num, digest)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--request-rate or --trace-file"),
        ({"request_rate": 1.0, "max_concurrency": 2}, "both at once"),
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"max_concurrency": 0}, "--max-concurrency is 0"),
        ({"request_rate": 1.0, "prompt_words": "0"}, "--prompt-words is 0"),
        ({"request_rate": 1.0, "max_tokens": "9:-1"}, "--max-tokens is 9:-1.*MEAN:CV"),
        ({"request_rate": 1.0, "max_tokens": "many"}, "--max-tokens is many"),
        ({"trace_file": "t", "max_tokens": "9:1"}, "--max-tokens 9:1 has a variation"),
        ({"trace_file": "t", "turns": 2}, "cannot be used with --turns"),
        ({"trace_file": "t", "lengths_from": "u"}, "cannot be used with --lengths-from"),
        ({"request_rate": 1.0, "turns": 0}, "--turns is 0"),
        ({"request_rate": 1.0, "think_s": math.nan}, "--think-s is nan"),
        ({"request_rate": 1.0, "num_warmups": -1}, "--num-warmups is -1"),
        ({"request_rate": 1.0, "prefix_share": 1.5}, "--prefix-share is 1.5"),
    ],
)
def test_workloads_that_make_no_sense(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**flags)
