"""The load generator's pure parts: flags, and what the numbers mean. No network."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import (
    DEFINITIONS,
    LATENCIES,
    Outcome,
    parse_limits,
    summarise,
    summary_ms,
    warnings,
)

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
        (MANY, {"event_loop_lag": {"p99_ms": 40.0}}, {}, "late.*lag 40 ms"),
        (MANY, {"send_lateness": {"p99_ms": 40.0}}, {}, "late .*lateness 40 ms"),
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
        ({"timeout_s": -1.0}, "--timeout-s is -1"),
        ({"temperature": -0.5}, "--temperature is -0.5"),
        ({"extra_body": "[]"}, "--extra-body"),
        ({"extra_body": "{"}, "--extra-body"),
        ({"base_url": "localhost:8000"}, "localhost:8000 is not like http"),
    ],
)
def test_flags_that_no_server_could_make_sense_of(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ClientFlags(**{"base_url": "http://127.0.0.1:1", "model": "m"} | flags)
