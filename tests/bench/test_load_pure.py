"""The load generator's pure parts: arrivals, prompts, what the numbers mean. No network."""

from __future__ import annotations

import math
import os
import re
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ridgeline.bench.load.main import Load, make_plan
from ridgeline.bench.load.plan import (
    draw_prompts,
    gamma_arrivals,
    parse_prompts,
    parse_trace,
    synthetic_prompts,
)
from ridgeline.bench.load.stats import (
    DEFINITIONS,
    LATENCIES,
    Outcome,
    parse_limits,
    summarise,
    summary_ms,
    warnings,
)

DATA = Path(os.environ.get("RIDGELINE_BENCH_DATA", "/nonexistent"))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def load(**flags: Any) -> Load:
    return Load(base_url="http://127.0.0.1:1", model="m", **flags)


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
    one, two, other = (make_plan(load(request_rate=5.0, seed=s)) for s in (7, 7, 8))
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


def test_a_plan_takes_times_and_bounded_lengths_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "1,50,3\n2,500,40\n3,7,9\n")
    plan = make_plan(load(trace_file=path, prompt_words=60, max_tokens=20, num_warmups=2))
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
    prompts = DATA / "prompts" / "spec_bench_dev.jsonl"
    trace = DATA / "traces" / "azure_2023_code.csv"
    plan = make_plan(load(prompts=prompts, trace_file=trace, num_prompts=200, num_warmups=0))
    assert len({p.prompt for p in plan}) == 200
    assert (plan[0].arrival_s, plan[0].max_tokens) == (0, 10)
    arrivals = [p.arrival_s or 0.0 for p in plan]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] > 60


# --- numbers -------------------------------------------------------------------------------------

GOOD = Outcome(0, 1.0, 1.5, 4.0, [2.0, 2.5, 4.0], 10, 4, 5)
ONE_TOKEN = Outcome(1, 2.0, 2.0, 2.2, [2.2], 10, 0, 1)
COUNTED = Outcome(2, 3.0, 3.0, 5.0, [4.0, 5.0])
SILENT = Outcome(3, 3.0, 3.0, 3.5, [], 10, None, 0)
FAILED = [Outcome(i, 5.0, 5.0, 8.0, [6.0], error=e) for i, e in ((4, "a"), (5, "b"), (6, "b"))]


def test_latencies_are_those_of_their_definitions() -> None:
    assert GOOD.latencies_s() == {
        "ttft_from_send": 0.5,
        "ttft_from_scheduled_arrival": 1.0,
        "tpot_excl_first": 2.0 / 4,  # five tokens in three chunks
        "tpot_incl_first": 2.5 / 5,
        "e2e": 2.5,
    }
    assert "tpot_excl_first" not in ONE_TOKEN.latencies_s()
    assert SILENT.latencies_s() == {"e2e": 0.5}
    closed = Outcome(0, None, 1.5, 4.0, [2.0, 4.0])
    assert "ttft_from_scheduled_arrival" not in closed.latencies_s()


def test_a_summary_in_milliseconds() -> None:
    found = summary_ms([0.004, 0.001, 0.002, 0.003])
    assert found is not None
    assert (found["num"], found["mean_ms"], found["p50_ms"]) == (4, 2.5, 2.5)
    assert (found["min_ms"], found["max_ms"]) == (1, 4)
    assert found["p90_ms"] == pytest.approx(3.7)
    assert found["std_ms"] == pytest.approx(statistics.stdev([1, 2, 3, 4]), abs=1e-3)
    assert summary_ms([]) is None
    one = summary_ms([0.5])
    assert one is not None
    assert one["std_ms"] == 0


def test_a_summary_counts_failures_and_leaves_them_out_of_latencies() -> None:
    found = summarise([GOOD, ONE_TOKEN, COUNTED, SILENT, *FAILED], {})
    assert (found["num_requests"], found["num_successful"], found["num_failed"]) == (7, 4, 3)
    assert found["failures"] == [
        {"error": "b", "num": 2, "request_indices": [5, 6]},
        {"error": "a", "num": 1, "request_indices": [4]},
    ]
    assert found["duration_s"] == 8  # until the last failure, too
    assert (found["total_input_tokens"], found["total_cached_input_tokens"]) == (30, 4)
    assert found["total_output_tokens"] == 5 + 1 + 2 + 0
    assert found["token_source"] == "counted_chunks and server_usage"
    assert found["request_throughput_per_s"] == 0.5
    assert found["output_tokens_per_s"] == 1
    assert found["total_tokens_per_s"] == pytest.approx(38 / 8)
    assert found["ttft_from_send"]["num"] == 3
    assert found["itl_chunk_pooled"]["num"] == 3  # 0.5, 1.5 and 1.0 s
    assert found["itl_chunk_pooled"]["mean_ms"] == 1000
    assert found["e2e"]["num"] == 4
    assert found["goodput"] is None


def test_all_failed_is_a_summary_too() -> None:
    found = summarise(FAILED, {"e2e": 1.0})
    assert (found["num_successful"], found["token_source"]) == (0, "")
    assert all(found[name] is None for name in LATENCIES)
    assert found["total_input_tokens"] is None
    assert found["goodput"]["share_of_all_requests"] == 0


def test_every_latency_in_a_summary_is_defined() -> None:
    assert LATENCIES.keys() <= DEFINITIONS.keys() & summarise([GOOD], {}).keys()


@pytest.mark.parametrize(
    ("limits", "num"),
    [
        ("ttft:500", 2),  # GOOD and ONE_TOKEN; COUNTED is late, SILENT never had text
        ("ttft:499", 1),
        ("tpot:500", 3),  # GOOD and those without a second token
        ("e2el:500", 2),
        ("ttft_from_scheduled_arrival:900", 1),
    ],
)
def test_goodput_is_of_all_requests(limits: str, num: int) -> None:
    outcomes = [GOOD, ONE_TOKEN, COUNTED, SILENT, *FAILED]
    goodput = summarise(outcomes, parse_limits([limits]))["goodput"]
    assert goodput["num_within_all_limits"] == num
    assert goodput["share_of_all_requests"] == pytest.approx(num / 7, abs=1e-4)
    assert goodput["requests_per_s"] == pytest.approx(num / 8, abs=1e-4)


def test_goodput_needs_every_limit() -> None:
    found = summarise([GOOD, ONE_TOKEN], parse_limits(["ttft:500", "e2el:1000"]))
    assert found["goodput"]["num_within_all_limits"] == 1


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:soon", "itl:5", ":5", ""])
def test_a_limit_that_is_none_says_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match="tpot_excl_first"):
        parse_limits([text])


# --- warnings ------------------------------------------------------------------------------------

MANY = [Outcome(i, None, 0.0, 1.0, [0.5, 1.0], 100, 10, 2) for i in range(100)]
CALM = {"event_loop_lag": {"p99_ms": 1.0}, "send_lateness": None, "cpu_share_of_one_core": 0.1}
FAIR = {"num_warmups": 4, "num_repeated_prompts": 0, "prefix_share": 0.0}


def test_a_sound_run_has_no_warnings() -> None:
    assert warnings(summarise(MANY, {}), CALM, FAIR) == []


@pytest.mark.parametrize(
    ("outcomes", "client", "asked", "words"),
    [
        ([*MANY, *FAILED], {}, {}, "3 of 103 requests failed"),
        (MANY, {"event_loop_lag": {"p99_ms": 40.0}}, {}, "saturated.*lag 40 ms"),
        (MANY, {"send_lateness": {"p99_ms": 40.0}}, {}, "saturated.*lateness 40 ms"),
        (MANY, {"cpu_share_of_one_core": 0.93}, {}, "saturated.*93%"),
        (MANY, {}, {"num_repeated_prompts": 7}, "7 prompts came before"),
        (MANY, {}, {"num_warmups": 0}, "no warm-up"),
        ([Outcome(i, 0, 0, 1, [0.5], 100, 60, 1) for i in range(100)], {}, {}, "6000 of 10000"),
        ([Outcome(i, 0, 0, 1, [0.5]) for i in range(100)], {}, {}, "chunks are counted"),
        ([Outcome(i, 0, 0, 1, [0.5], 9, 0, 4) for i in range(100)], {}, {}, "400 tokens .* 100"),
        (MANY[:99], {}, {}, "p99 of 99"),
    ],
)
def test_each_warning_has_its_cause(
    outcomes: list[Outcome], client: dict[str, Any], asked: dict[str, Any], words: str
) -> None:
    said = warnings(summarise(outcomes, {}), CALM | client, FAIR | asked)
    assert len(said) == 1
    assert re.search(words, said[0])


def test_a_stated_prefix_may_come_from_the_cache() -> None:
    outcomes = [Outcome(i, 0, 0, 1, [0.5], 100, 60, 1) for i in range(100)]
    assert warnings(summarise(outcomes, {}), CALM, FAIR | {"prefix_share": 0.5}) == []


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--request-rate or --trace-file"),
        ({"request_rate": 1.0, "max_concurrency": 2}, "both at once"),
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"max_concurrency": 1, "timeout_s": -1.0}, "--timeout-s is -1"),
        ({"max_concurrency": 1, "extra_body": "[]"}, "--extra-body"),
        ({"max_concurrency": 1, "extra_body": "{"}, "--extra-body"),
        ({"max_concurrency": 1, "goodput": ["x:1"]}, "--goodput x:1"),
    ],
)
def test_flags_that_make_no_sense(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(**flags)


def test_a_base_url_is_one() -> None:
    with pytest.raises(ValueError, match="localhost:8000 is not like http"):
        Load(base_url="localhost:8000", model="m", max_concurrency=1)
