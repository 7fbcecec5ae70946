"""Messages of errors: short, whatever they quote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serve.http.errors import ApiError, shortened


@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_a_message_is_short_however_long_the_value_is_that_it_quotes(quote: str) -> None:
    message = str(ApiError(400, f"keep_alive: {quote}{'x' * 8_000_000}{quote} is not a time"))
    assert message == f"keep_alive: {quote}{'x' * 80}...{quote} is not a time"


def test_a_short_message_stays_as_it_is() -> None:
    for message in (
        "the server's log says more than the client's own words, which nobody has ever read at all",
        f"{'x' * 80!r} is not a time: write seconds, or a number with s, m, h or d",
        "this server has " + ", ".join(f"'model {i}'" for i in range(60)),
    ):
        assert shortened(message) == message


@given(st.text("a' \"", max_size=3000))
def test_every_message_is_short(text: str) -> None:
    assert len(str(ApiError(400, text, param=text))) <= 1005
