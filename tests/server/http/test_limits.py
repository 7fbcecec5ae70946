"""Limits of a key: buckets that fill with time."""

from __future__ import annotations

import pytest

from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.limits import Limits


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
