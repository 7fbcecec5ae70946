"""The page shows where the time of a request went that has ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.server.browsing import DESK, PHONE, ask, find, says, sees, set_size, texts
from tests.server.serving import Served


def test_a_request_that_has_ended_can_be_explained(page: Chrome, slow: Served) -> None:
    ask(page, "why does it take so long")
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "#sequences .running"))
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "#ended button"))
    request = slow.llm.engine._next_id - 1
    assert texts(page, "#ended button") == [str(request)]
    find(page, "#ended button").click()
    title = "return document.querySelector('.explanation svg text')?.textContent"
    sees(lambda: page.execute_script(title))
    assert page.execute_script(title).startswith(f"Request {request} took")
    told = texts(page, ".explanation p")[0]
    assert told.startswith(f"Request {request} took")
    assert "Computing its answer of 60 tokens took" in told
    assert find(page, ".explanation .timeline").text == "Save a timeline"
    saved = "return new Promise((done) => { const before = URL.createObjectURL; "
    saved += "URL.createObjectURL = (file) => { file.text().then(done); return before(file); }; "
    saved += "document.querySelector('.explanation .timeline').click(); })"
    events = json.loads(page.execute_script(saved))["traceEvents"]
    assert {"execute", "answer"} <= {event.get("cat") for event in events}
    bar = page.find_elements(By.CSS_SELECTOR, ".explanation rect")
    assert len(bar) > 4
    assert all(rect.is_displayed() for rect in bar[1:2])
    _keep_picture(page, "desk")
    set_size(page, PHONE)
    _keep_picture(page, "phone")
    width = "return document.querySelector('.explanation').scrollWidth <= innerWidth"
    assert page.execute_script(width)
    set_size(page, DESK)
    find(page, ".explanation form button").click()
    sees(lambda: not find(page, ".explanation").is_displayed())


def test_what_is_forgotten_is_said(page: Chrome, slow: Served) -> None:
    ask(page, "soon forgotten")
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "#ended button"))
    history = slow.running.service.history
    with history._lock:
        history._lines.clear()
    find(page, "#ended button").click()
    sees(lambda: says(page, ".explanation .problem", "none has ended yet"))
    find(page, ".explanation form button").click()


def _keep_picture(page: Chrome, name: str) -> None:
    """Write a screenshot where one is asked for."""
    if folder := os.environ.get("RIDGELINE_SCREENSHOTS"):
        page.save_screenshot(Path(folder) / f"explain-{name}.png")
