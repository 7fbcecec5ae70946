"""What the page keeps, in a real browser: in two tabs, across answers, and where it may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import (
    DESK,
    agree,
    answer,
    ask,
    browsing,
    click,
    find,
    keep,
    open_settings,
    says,
    sees,
    set_size,
    texts,
)
from tests.serve.serving import Served, hold, serving
from tests.waiting import PATIENCE_S

QUESTION = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "kept", "reason": "stop"}
ROLES = "return [...document.querySelectorAll('#messages article')].map((one) => one.className)"
RECORD = """
const fetch = window.fetch;
window.sent = [];
window.fetch = (path, options) => {
  if (options?.body) window.sent.push(JSON.parse(options.body).messages.map((one) => one.content));
  return fetch(path, options);
};
"""


@pytest.fixture
def tabs(page: Chrome, slow: Served) -> Any:
    """Two tabs that show the same conversation; the second is in front."""
    keep(page, {"title": "both", "messages": [QUESTION, ANSWER]})
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    set_size(page, DESK)
    second = page.current_window_handle
    page.get(slow.url)
    sees(lambda: texts(page, ".body") == ["hello", "kept"])
    yield first, second
    page.switch_to.window(second)
    page.close()
    page.switch_to.window(first)


def test_two_tabs_of_one_conversation_lose_nothing(
    page: Chrome, tabs: tuple[str, str], slow: Served
) -> None:
    go_on = hold(slow, 0, 0.04)  # with one of the answers the other question would be too long
    ask(page, "from two")
    page.switch_to.window(tabs[0])
    sees(lambda: "from two" in texts(page, ".user .body"))  # without a reload
    ask(page, "from one")
    sees(lambda: slow.running.async_engine.num_streams == 2)
    go_on.set()
    for tab in tabs:
        page.switch_to.window(tab)
        sees(lambda: sum("+ 60 tokens" in facts for facts in texts(page, ".facts")) == 2)
    seen = []
    for tab in tabs:
        page.switch_to.window(tab)
        for _ in range(2):
            assert page.execute_script(ROLES) == ["user", "assistant"] * 3
            seen.append(texts(page, ".body"))
            page.refresh()
    assert seen[0][0::2] == ["hello", "from two", "from one"]
    assert seen[0][1] == "kept"
    assert all(seen[0])
    assert all(other == seen[0] for other in seen)


def test_a_tab_that_hears_nothing_of_the_other_loses_nothing(
    page: Chrome, tabs: tuple[str, str]
) -> None:
    """A tab at rest may be told of changes late: what it writes must still leave the others' in."""
    deafen = "Object.defineProperty(StorageEvent.prototype, 'key', { get: () => null })"
    page.execute_script(deafen)
    page.switch_to.window(tabs[0])
    ask(page, "from one")
    sees(lambda: says(page, ".facts", "tokens/s"))
    page.switch_to.window(tabs[1])
    assert "from one" not in texts(page, ".user .body")
    ask(page, "from two")
    sees(lambda: says(page, ".facts", "tokens/s"))
    for tab in tabs:
        page.switch_to.window(tab)
        page.refresh()
        assert page.execute_script(ROLES) == ["user", "assistant"] * 2
        seen = []
        for step in ("Later question", "Earlier question"):  # two versions of what comes second
            if page.find_element(By.CSS_SELECTOR, f'[title="{step}"]').is_enabled():
                press(page, step)
            seen.append(texts(page, ".user .body")[1])
        assert seen == ["from two", "from one"]


def test_what_another_tab_has_written_over_is_written_again(
    page: Chrome, tabs: tuple[str, str]
) -> None:
    """Two tabs may write at once, when neither has heard of the other."""
    name = "ridgeline.conversation.0"
    page.switch_to.window(tabs[0])
    older = json.dumps({"title": "both", "messages": [QUESTION]})
    page.execute_script("localStorage.setItem(arguments[0], arguments[1])", name, older)
    page.switch_to.window(tabs[1])

    def kept() -> list[str]:
        stored = json.loads(page.execute_script("return localStorage[arguments[0]]", name))
        return [one["content"] for one in stored["messages"]]

    sees(lambda: kept() == ["hello", "kept"])
    assert texts(page, ".body") == ["hello", "kept"]


def test_a_tab_follows_what_another_changes(page: Chrome, tabs: tuple[str, str]) -> None:
    click(page, "Rename both")
    find(page, "#conversations input").send_keys("mine" + Keys.ENTER)
    change_temperature(page, "0.5")
    page.switch_to.window(tabs[0])
    sees(lambda: texts(page, "#conversations .title, #title") == ["mine", "mine"])
    sees(lambda: says(page, "#hint", "temperature 0.5"))
    ask(page, "once more")
    sees(lambda: says(page, ".facts", "tokens/s"))
    assert texts(page, "#title") == ["mine"]
    click(page, "Delete mine")
    agree(page)
    page.switch_to.window(tabs[1])
    sees(lambda: texts(page, "#conversations .title") == ["New conversation"])
    assert texts(page, "#messages article") == []


def change_temperature(page: Chrome, value: str) -> None:
    """Enter a temperature and choose Done."""
    open_settings(page)
    find(page, "[name=temperature]").clear()
    find(page, "[name=temperature]").send_keys(value)
    find(page, "#tune-dialog button").click()


def kept_settings(page: Chrome) -> dict[str, Any]:
    """Return the settings of the only conversation that is kept, as soon as one is."""
    script = """
    const names = Object.keys(localStorage).filter((name) => name.startsWith('ridgeline.c'));
    return names.map((name) => JSON.parse(localStorage[name]).settings)"""
    sees(lambda: len(page.execute_script(script)) == 1)
    return dict(page.execute_script(script)[0])


def press(page: Chrome, title: str, nth: int = 0) -> None:
    """Press a button of a message, which may show only when the pointer is there."""

    def has_pressed() -> bool:
        try:
            button = page.find_elements(By.CSS_SELECTOR, f'article [title="{title}"]')[nth]
            page.execute_script("arguments[0].focus()", button)
            button.send_keys(Keys.ENTER)
        except StaleElementReferenceException:  # the page drew its messages anew meanwhile
            return False
        return True

    sees(has_pressed)


@pytest.mark.parametrize("value", ["9", "0.5"])
def test_escape_discards_settings(page: Chrome, value: str) -> None:
    change_temperature(page, "0")
    before, hint = kept_settings(page), find(page, "#hint").text
    open_settings(page)
    field = find(page, "[name=temperature]")
    field.clear()
    field.send_keys(value + Keys.ESCAPE)
    sees(lambda: not find(page, "#tune-dialog").is_displayed())
    assert kept_settings(page) == before
    assert find(page, "#hint").text == hint
    open_settings(page)
    assert find(page, "[name=temperature]").get_attribute("value") == "0"
    find(page, "#tune-dialog button").click()


def test_done_refuses_a_wrong_setting_and_says_why(page: Chrome) -> None:
    change_temperature(page, "1")
    before = kept_settings(page)
    change_temperature(page, "9")
    assert find(page, "#tune-dialog").is_displayed()
    assert "2" in str(find(page, "[name=temperature]").get_property("validationMessage"))
    assert kept_settings(page) == before
    find(page, "[name=temperature]").clear()
    find(page, "[name=temperature]").send_keys("1.5" + Keys.ENTER)
    sees(lambda: not find(page, "#tune-dialog").is_displayed())
    sees(lambda: kept_settings(page) == before | {"temperature": 1.5})


def test_answers_to_one_question_are_all_kept(page: Chrome) -> None:
    change_temperature(page, "2")
    ask(page, "hello")
    sees(lambda: says(page, ".facts", "tokens/s"))
    first = answer(page)
    find(page, '[title="Answer again"]').click()
    sees(lambda: texts(page, ".version") == ["2 / 2"])
    second = answer(page)
    assert len(page.find_elements(By.CSS_SELECTOR, ".assistant")) == 1
    assert second != first
    assert not find(page, '[title="Later answer"]').is_enabled()
    find(page, '[title="Earlier answer"]').click()
    assert (texts(page, ".version"), answer(page)) == (["1 / 2"], first)
    page.refresh()
    assert (texts(page, ".version"), answer(page)) == (["1 / 2"], first)
    page.execute_script(RECORD)
    ask(page, "and then?")
    sees(lambda: len(texts(page, ".facts")) == 2)
    assert page.execute_script("return window.sent") == [["hello", first, "and then?"]]


def test_an_answer_is_kept_when_the_next_does_not_begin(browser: Chrome, model: Path) -> None:
    with serving(model) as served:
        browser.get(served.url)
        keep(browser, {"title": "old", "messages": [QUESTION, ANSWER]})
        sees(lambda: texts(browser, "#state") == ["live"])
        served.loop.call_soon_threadsafe(served.running.stop)
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()
        find(browser, '[title="Answer again"]').click()
        sees(lambda: says(browser, ".problem", "cannot be reached. Check that it runs"))
        assert answer(browser).strip() == "kept"
        script = "return localStorage.getItem('ridgeline.conversation.0')"
        kept = json.loads(browser.execute_script(script))["messages"]
        assert [one["content"] for one in kept] == ["hello", "kept"]
    browser.get("about:blank")


def test_a_conversation_that_is_too_long_goes_on(page: Chrome) -> None:
    turns = [{**one, "content": f"{i} " + "x" * 40} for i in range(4) for one in (QUESTION, ANSWER)]
    keep(page, {"title": "long", "messages": turns})
    page.execute_script(RECORD)
    ask(page, "hello")
    sees(lambda: says(page, ".problem", "has become too long: the model takes 128 tokens"))
    assert says(page, ".problem", "(about 96 words)")
    find(page, "footer .action").click()
    sees(lambda: says(page, ".facts", "tokens/s"))
    assert texts(page, ".problem") == [""] * len(texts(page, ".problem"))
    everything = [str(turn["content"]) for turn in turns]
    sent = page.execute_script("return window.sent")
    assert sent[0] == [*everything, "hello"]
    assert sent[-1][-1] == "hello"
    assert sent[-1] == sent[0][-len(sent[-1]) :]
    assert len(texts(page, ".user")) == 5  # all are shown, and a line says which are sent
    assert says(page, ".left-out", "are not sent to the model")
    page.refresh()
    assert says(page, ".left-out", "are not sent to the model")
    find(page, ".left-out .action").click()
    assert texts(page, ".left-out") == [""] * 10
    page.execute_script(RECORD)
    ask(page, "x")
    sees(lambda: says(page, ".problem", "has become too long"))
    assert page.execute_script("return window.sent")[0][:9] == [*everything, "hello"]


def test_a_message_that_is_too_long_alone_says_so(page: Chrome) -> None:
    ask(page, "x" * 120)
    sees(lambda: says(page, ".problem", "This message is too long: the model takes 128 tokens"))
    assert page.find_elements(By.CSS_SELECTOR, "footer .action") == []
    ask(page, "hello")  # now there is something to leave out
    sees(lambda: page.find_elements(By.CSS_SELECTOR, "footer .action"))
    find(page, "footer .action").click()
    sees(lambda: says(page, ".facts", "tokens/s"))


def test_the_page_works_where_storage_is_blocked(slow: Served, tmp_path: Path) -> None:
    blocked = {"profile.default_content_setting_values.cookies": 2}
    with browsing(tmp_path, preferences=blocked) as browser:
        browser.get(slow.url)
        script = "try { return localStorage.length } catch (error) { return error.name }"
        assert browser.execute_script(script) == "SecurityError"
        sees(lambda: texts(browser, "#model, #state") == ["tiny", "live"])
        assert "Storage is blocked" in find(browser, "#hint").text
        change_temperature(browser, "0.5")
        open_settings(browser)
        find(browser, "[name=max_tokens]").clear()
        find(browser, "[name=max_tokens]").send_keys("20" + Keys.ENTER)
        ask(browser, "hello")
        sees(lambda: says(browser, ".facts", "+ 20 tokens"))
        click(browser, "Delete hello")
        agree(browser)
        assert texts(browser, "#conversations .title") == ["New conversation"]
        assert [line for line in browser.get_log("browser") if line["source"] != "network"] == []
    slow.assert_idle()
