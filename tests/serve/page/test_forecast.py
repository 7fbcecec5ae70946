"""What the live view says of its forecast: how far off it is, once there are enough steps."""

from __future__ import annotations

import re

from selenium.webdriver import Chrome

from tests.serve.page.browser import ask, find, sees, texts
from tests.serve.serving import Served


def test_a_forecast_is_judged_after_some_hundred_steps(page: Chrome, slow: Served) -> None:
    ask(page, "hello")  # 60 steps
    sees(lambda: re.search(r"learning: [1-9]\d* of 200 steps", texts(page, "#foreseen-note")[0]))
    assert "off by" not in texts(page, "#foreseen-note")[0]
    for _ in range(20):  # each in a conversation of its own, as the context is short
        sees(lambda: any(texts(page, ".facts")))
        if re.match(r"off by \d+ %, ", texts(page, "#foreseen-note")[0]):
            return
        find(page, "#new").click()
        sees(lambda: not texts(page, ".facts"))
        ask(page, "hello again")
    raise AssertionError(texts(page, "#foreseen-note"))
