"""The settings in a real browser: all samplers, as the server describes them, and thinking."""

from __future__ import annotations

import json
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from tests.serve.answer.test_tools import thinker
from tests.serve.page.browser import (
    DESK,
    PHONE,
    ask,
    find,
    open_settings,
    record,
    says,
    sees,
    sent,
    set_size,
    texts,
)
from tests.serve.page.test_parts import opened, parts
from tests.serve.serving import Served

__all__ = ["parts", "thinker"]  # fixtures

FIELDS = """
return [...document.querySelectorAll('#samplers [name]')].map((field) => [
  field.name, field.placeholder, field.title, field.labels[0].firstChild.data ])
"""


def test_all_samplers_show_the_defaults_of_the_server(page: Chrome, slow: Served) -> None:
    expected = slow.call("/props")[1]["sampling_fields"]
    open_settings(page)
    assert not find(page, "#thinking").is_displayed()  # this model never does
    shown: list[Any] = page.execute_script(FIELDS)
    assert [name for name, *_ in shown] == [one["name"] for one in expected]
    for (name, default, title, label), one in zip(shown, expected, strict=True):
        usual = "none" if one["default"] is None else one["default"]
        assert default == usual or json.loads(default) == usual
        assert (title, label.lower()) == (one["description"], name.replace("_", " "))
    assert says(page, "#samplers .note", "at most 128 tokens")
    set_size(page, PHONE)
    find(page, "#samplers summary").click()
    width = "return document.querySelector('#tune-dialog').scrollWidth <= innerWidth"
    assert page.execute_script(width)
    set_size(page, DESK)


def test_samplers_that_are_set_are_sent_and_kept(page: Chrome) -> None:
    record(page)
    open_settings(page)
    find(page, "#samplers summary").click()
    find(page, "[name=top_k]").send_keys("7")
    stop = find(page, "[name=stop]")
    stop.send_keys("[1]")
    assert says(page, "#samplers .problem", 'This is a list of texts: ["one", "two"].')
    find(page, "#tune-dialog button").click()
    assert find(page, "#tune-dialog").is_displayed()  # Done waits
    stop.clear()
    stop.send_keys('["zzz"]')
    find(page, "#tune-dialog button").click()
    hint = 'max tokens 60  ·  stop ["zzz"]  ·  temperature 0  ·  top k 7'
    assert texts(page, "#hint") == [hint]
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "tokens"))
    [body] = sent(page)
    assert (body["top_k"], body["stop"], body["temperature"]) == (7, ["zzz"], 0)
    assert "min_p" not in body
    page.refresh()
    assert texts(page, "#hint") == [hint]
    open_settings(page)
    assert find(page, "[name=top_k]").is_displayed()  # not folded away
    find(page, "[name=top_k]").clear()
    find(page, "[name=stop]").clear()
    find(page, "#tune-dialog button").click()
    assert texts(page, "#hint") == ["max tokens 60  ·  temperature 0"]


def test_an_answer_has_no_limit_of_the_page(page: Chrome) -> None:
    page.execute_script("localStorage.clear()")
    page.refresh()
    assert texts(page, "#hint") == [""]
    record(page)
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "tokens"))
    assert "max_tokens" not in sent(page)[0]


def test_thinking_can_be_switched(parts: Chrome, thinker: Served) -> None:
    opened(parts, thinker, {})
    for choice, is_on in (("on", True), ("off", False)):
        open_settings(parts)
        Select(find(parts, "[name=thinking]")).select_by_value(choice)
        find(parts, "#tune-dialog button").click()
        assert says(parts, "#hint", f"thinking {choice}")
        ask(parts, "hello")
        sees(lambda: says(parts, "article:last-child .facts", "tokens"))
        assert parts.execute_script("return window.sent.at(-1).enable_thinking") is is_on
        last = "article:last-child details.reasoning"
        assert bool(parts.find_elements(By.CSS_SELECTOR, last)) is is_on


def test_settings_open_also_without_the_server(page: Chrome) -> None:
    page.execute_script("window.fetch = () => Promise.reject(new Error('away'))")
    find(page, "#tune-button").click()
    sees(lambda: says(page, "#tune-problem", "the server cannot be reached"))
    find(page, "[name=system]").send_keys("Be brief.")
    find(page, "#tune-dialog button").click()
    assert texts(page, "#hint") == ["system prompt set  ·  max tokens 60  ·  temperature 0"]
