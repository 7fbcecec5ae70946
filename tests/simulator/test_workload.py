"""Workloads: arrivals, lengths, prompts. No network."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ridgeline.simulator.workload import (
    Workload,
    draw_prompts,
    gamma_arrivals,
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


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_counts_from_its_first_request_in_date_times_or_seconds() -> None:
    dates = (
        "2023-11-16 23:59:59.9799600,4808,10\n"
        "2023-11-17 00:00:02.4799600,34,12\n"
        "2023-11-17 00:00:00.4799600,110,27\n"
    )
    wanted = [(0.0, 4808, 10), (0.5, 110, 27), (2.5, 34, 12)]
    for text in (dates, "7,4808,10\n7.5,110,27\n9.5,34,12\n"):
        rows = parse_trace(AZURE + text, 10)
        assert [(round(when, 3), *lengths) for when, *lengths in rows] == wanted
    assert len(parse_trace(AZURE + dates, 2)) == 2


def test_a_rate_stretches_the_times_and_keeps_their_shape() -> None:
    rows = parse_trace(AZURE + "0,1,1\n1,1,1\n4,1,1\n9,1,1\n", 3, 0.25)
    assert [row[0] for row in rows] == [0, 2, 8]  # two gaps in 8 s: 0.25 per second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AZURE + "1,2,3\nyesterday,2,3\n", "line 3"),
        (AZURE + "1,2\n", "line 2"),
        (AZURE + "1,0,3\n", "line 2"),
        (AZURE + "nan,1,3\n", "line 2"),
        ("when,in,out\n1,2,3\n", "TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("", "no requests"),
    ],
)
def test_a_bad_trace_names_the_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_trace(text, 10)


def test_a_plan_takes_times_and_bounded_lengths_of_the_trace() -> None:
    trace = AZURE + "1,50,3\n2,500,40\n3,7,9\n"
    load = Workload(trace_file="t", prompt_words=60, max_tokens=20, num_warmups=2)
    plan = make_plan(load, trace)
    assert [p.index for p in plan] == [-2, -1, 0, 1, 2]
    assert [p.arrival_s for p in plan] == [None, None, 0, 1, 2]
    assert [len(p.prompt.split()) for p in plan[2:]] == [50, 60, 7]
    assert [p.max_tokens for p in plan[2:]] == [3, 20, 9]


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_of_every_kind_of_line() -> None:
    text = 'plain words \n\n{"prompt": "two\\nlines"}\n{"turns": ["first", "second"]}\n'
    assert parse_prompts(text) == ["plain words", "two\nlines", "first"]


@pytest.mark.parametrize("line", ['{"text": "x"}', '{"turns": []}', "{broken", '{"prompt": 3}'])
def test_a_line_without_a_prompt_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 of the prompts"):
        parse_prompts("fine\n" + line)


def test_no_prompt_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        parse_prompts("\n \n")


def test_none_comes_again_before_all_have_come() -> None:
    prompts = [str(i) for i in range(10)]
    drawn = draw_prompts(prompts, 25, Random(3))
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == prompts
    assert drawn[:10] != prompts  # a file is often sorted by kind


def test_synthetic_prompts_share_exactly_what_was_asked() -> None:
    for share in (0.0, 0.25, 1.0):
        words = [p.split() for p in synthetic_prompts([80] * 30, share, Random(0))]
        assert {len(w) for w in words} == {80}
        common = sum(len(set(column)) == 1 for column in zip(*words, strict=True))
        assert common == 80 * share
    lengths = [len(p.split()) for p in synthetic_prompts([3, 1, 200], 0.5, Random(0))]
    assert lengths == [3, 1, 200]


@pytest.mark.skipif(not DATA.is_dir(), reason="RIDGELINE_BENCH_DATA names no folder of real traces")
def test_real_files_make_a_plan() -> None:
    prompts = (DATA / "prompts" / "spec_bench_dev.jsonl").read_text()
    trace = (DATA / "traces" / "azure_2023_code.csv").read_text()
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
            {"trace_file": "t", "request_rate": 2.0, "prompt_words": 60},
            7,
            "2a1169a51a3c57e9aa212fe5447b0c29cadaff3e20a140ea17396974a9f3c129",
        ),
        (
            {"max_concurrency": 3, "prompts": "p", "num_prompts": 9, "max_tokens": 5},
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
    trace = AZURE + "1,50,3\n2,500,40\n3,7,9\n" if load.trace_file else None
    plan = make_plan(load, trace, "one\ntwo\nthree\n" if load.prompts else None)
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
        ({"request_rate": 1.0, "prompt_words": 0}, "--prompt-words is 0"),
        ({"request_rate": 1.0, "num_warmups": -1}, "--num-warmups is -1"),
        ({"request_rate": 1.0, "prefix_share": 1.5}, "--prefix-share is 1.5"),
    ],
)
def test_workloads_that_make_no_sense(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**flags)
