"""Answers in a real browser: going on with one, the model that gave it, and why it took so long."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import answer, ask, find, keep, record, says, sees, sent, texts
from tests.serve.serving import Served, hold

QUESTION = {"role": "user", "content": "hello"}
SHORT = {"temperature": 0, "max_tokens": 30}


def go_on(page: Chrome) -> None:
    page.find_element(By.XPATH, "//footer/button[text()='Continue']").click()


def can_go_on(page: Chrome) -> bool:
    return "Continue" in texts(page, "article footer .action")


def continued(slow: Served, text: str, most: int) -> str:
    """Return how the server goes on with an answer."""
    messages = [QUESTION, {"role": "assistant", "content": text}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": most}
    found = slow.call("/v1/chat/completions", body | {"temperature": 0})[1]
    return str(found["choices"][0]["message"]["content"])


def test_an_answer_that_was_cut_goes_on(page: Chrome, slow: Served) -> None:
    slow.valve.before = lambda step: None
    keep(page, {"title": "short", "settings": SHORT, "messages": []})
    record(page)
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "cut at max tokens"))
    begun = page.execute_script("return document.querySelector('.assistant .body').innerText")
    go_on(page)
    sees(lambda: says(page, ".facts", "+ 60 tokens"))
    said = sent(page)[1]["messages"][-1]
    assert (sent(page)[1]["continue_final_message"], said["role"]) == (True, "assistant")
    assert answer(page).startswith(begun.strip()[:20])
    assert continued(slow, said["content"], 30).split()[-1] in answer(page)
    for _ in range(4):  # the model takes 128 tokens
        if can_go_on(page):
            go_on(page)
            sees(lambda: not texts(page, ".growing"))
    assert not can_go_on(page)
    assert says(page, "footer", "the context is full") or says(page, "footer", "too long")
    whole = answer(page)
    page.refresh()
    assert answer(page) == whole
    assert len(texts(page, "article")) == 2


def test_an_answer_that_was_stopped_goes_on(page: Chrome, slow: Served) -> None:
    held = hold(slow, 10)
    ask(page, "hello")
    sees(lambda: answer(page))
    find(page, "#question").send_keys(Keys.ESCAPE)
    sees(lambda: says(page, ".facts", "stopped"))
    begun = answer(page)
    held.set()
    go_on(page)
    sees(lambda: says(page, ".facts", "+ 60 tokens"))
    assert answer(page).startswith(begun)
    assert len(answer(page)) > len(begun)
    assert not says(page, ".facts", "stopped")


@pytest.mark.parametrize(
    ("how", "can"),
    [
        ({"reason": "length"}, True),
        ({}, True),
        ({"reason": "stop"}, False),
        ({"reason": "length", "isFull": True}, False),
        ({"reason": "length", "isJson": True}, False),
        ({"reason": "length", "content": ""}, False),
        ({"reason": "stopped", "calls": [{"id": "a", "name": "f", "arguments": "{"}]}, False),
    ],
)
def test_only_what_can_go_on_offers_it(page: Chrome, how: dict[str, Any], can: bool) -> None:
    message = {"role": "assistant", "content": "so far"} | how
    keep(page, {"title": "t", "messages": [QUESTION, message]})
    assert can_go_on(page) is can


def test_an_answer_names_its_model_and_says_why_it_was_slow_after_a_reload(
    page: Chrome, slow: Served
) -> None:
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "+ 60 tokens"))
    page.refresh()
    assert texts(page, ".facts")[0].startswith("tiny  ·  ")
    find(page, ".why").click()
    title = "return document.querySelector('.explanation svg text')?.textContent"
    sees(lambda: page.execute_script(title))
    request = slow.llm.engine._next_id - 1
    assert page.execute_script(title).startswith(f"Request {request} took")
    find(page, ".explanation form button").click()
    trace_buffer = slow.running.model_server.trace_buffer
    with trace_buffer._lock:
        trace_buffer._lines.clear()
    find(page, ".why").click()
    sees(lambda: says(page, ".explanation .problem", "is known as"))
    find(page, ".explanation form button").click()


def test_the_model_that_answered_is_asked_why(page: Chrome) -> None:
    """With several models each remembers its own requests."""
    requests = [{"id": "one", "model": "first"}, {"id": "a b", "model": "c&d"}]
    message = {"role": "assistant", "content": "text", "reason": "stop", "requests": requests}
    keep(page, {"title": "t", "messages": [QUESTION, message]})
    assert texts(page, ".facts") == ["first  ·  c&d"]
    record(page)
    find(page, ".why").click()
    sees(lambda: says(page, ".explanation .problem", "is known as"))
    paths = [one["path"] for one in page.execute_script("return window.sent")]
    assert "v1/requests/a%20b/explain?format=json&model=c%26d" in paths
    find(page, ".explanation form button").click()
