"""Limits of a key: buckets that fill with time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import ANYONE, Limits, Pacer


def test_buckets_fill_with_time_and_remember_debt() -> None:
    now_s = [0.0]
    limits = Limits(None, 60, None, lambda: now_s[0])
    limits.take("a", 30)
    limits.charge("a", 90)  # an answer longer than what was left
    with pytest.raises(ApiError) as refused:
        limits.take("a", 10)
    assert refused.value.headers["retry-after"] == "70"  # 60 tokens of debt, and 10 more
    now_s[0] = 70.0
    limits.take("a", 10)
    now_s[0] = 1e6
    limits.take("a", 200)  # more than a minute's
    limits.take("b", 1)
    left = [limits.headers(key)["x-ratelimit-remaining-tokens"] for key in "ab"]
    assert left == ["0", "59"]


def test_a_flood_is_spaced_out_beside_another_key_and_alone_is_not() -> None:
    now_s = [100.0]
    pace = Pacer(lambda: now_s[0])
    assert [pace.wait_s("a", 0) for _ in range(1000)] == [0.0] * 1000
    pace.wait_s(ANYONE, 0)  # a probe without a key is no other key
    assert pace.wait_s("a", 0) == 0.0
    pace.wait_s("v", 0)
    waits = [pace.wait_s("a", 0) for _ in range(100)]
    assert waits[:10] == [0.0] * 10, "a few come at once"
    assert waits[-1] == pytest.approx(waits[-2] + 1 / 200)
    assert pace.wait_s("v", 0) == 0.0, "the other key has its own pace"
    now_s[0] += waits[-1]
    assert [pace.wait_s("v", 0) for _ in range(20)] == [0.0] * 20
    now_s[0] += 1.5
    assert pace.wait_s("a", 0) == 0.0, "it is alone again"


def test_a_long_body_counts_as_many_requests_and_nobody_waits_for_ever() -> None:
    now_s = [100.0]
    pace = Pacer(lambda: now_s[0])
    pace.wait_s("v", 0)
    waits = [pace.wait_s("a", 1 << 20) for _ in range(4)]
    assert waits[3] - waits[2] == pytest.approx(17 / 200)
    assert pace.wait_s("b", 1 << 30) == 0.0
    assert pace.wait_s("b", 0) < 0.1, "no body counts as more than a MiB"
    assert max(pace.wait_s("a", 1 << 20) for _ in range(1000)) == 5.0


def test_what_is_held_back_is_given_back_once() -> None:
    limits = Limits(None, 60, None, lambda: 0.0)
    release = limits.reserve("a", 50)
    with pytest.raises(ApiError):
        limits.reserve("a", 20)
    limits.charge("a", 5)  # as a server says
    release()
    release()
    assert limits.headers("a")["x-ratelimit-remaining-tokens"] == "55"
    assert limits.spent == {"a": 5}
    limits.only_count()
    limits.take("a", 1000)
    assert limits.spent == {"a": 1005}
    assert limits.headers("a") == {}


def test_who_comes_again_at_once_after_a_refusal_waits_longer() -> None:
    now_s = [0.0]
    pace = Pacer(lambda: now_s[0])
    pace.note_refusal("a")  # alone it costs nothing
    assert pace.wait_s("a", 0) == 0
    pace.wait_s("v", 0)
    waits_s = []
    for _ in range(4):
        waits_s.append(pace.wait_s("a", 0))
        pace.note_refusal("a")
    assert waits_s[0] == 0
    assert all(after - before > 0.09 for before, after in pairwise(waits_s))
    assert pace.wait_s("v", 0) < 0.01, "others are not delayed"


def test_a_key_that_was_worked_for_beside_others_rests_and_alone_does_not() -> None:
    now_s = [100.0]
    pace = Pacer(lambda: now_s[0], num_processors=2)
    pace.wait_s("a", 0)
    pace.note_work("a", 10.0)
    assert pace.rest_s("a") == 0.0, "alone it costs nothing"
    pace.wait_s("v", 0)
    now_s[0] += 0.05
    pace.note_work("a", 0.05)
    assert pace.rest_s("a") == 0.0, "a little is done at once"
    for _ in range(4):
        now_s[0] += 0.1
        pace.note_work("a", 0.1)
    # 0.45 s of work at a quarter of a processor take 1.8 s; 0.45 s are over, 0.25 s are free.
    assert pace.rest_s("a") == pytest.approx(1.8 - 0.45 - 0.25)
    assert pace.rest_s("v") == 0.0, "the other key has its own account"
    now_s[0] += pace.rest_s("a") + 0.01
    assert pace.rest_s("a") == 0.0
    pace.wait_s("v", 0)
    pace.note_work("a", 1000.0)
    assert pace.rest_s("a") < 30, "nobody rests for ever"
    now_s[0] += 1.5
    assert pace.rest_s("a") == 0.0, "it is alone again"


def test_on_many_processors_one_thread_of_work_needs_no_rest() -> None:
    now_s = [100.0]
    pace = Pacer(lambda: now_s[0], num_processors=8)
    pace.wait_s("v", 0)
    for _ in range(100):
        now_s[0] += 0.1
        pace.wait_s("v", 0)
        pace.note_work("a", 0.1)
        assert pace.rest_s("a") == 0.0


def test_a_key_is_there_as_long_as_it_waits_for_an_answer() -> None:
    now_s = [100.0]
    limits = Limits(clock=lambda: now_s[0])
    limits.pace.wait_s("v", 0)
    with limits.counted("v"):
        now_s[0] += 60
        limits.pace.note_work("a", 1.0)
        assert limits.pace.rest_s("a") > 0
    now_s[0] += 1.5
    assert limits.pace.rest_s("a") == 0.0
