"""The page in a real browser: questions asked anew, settings of each conversation, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import ask, find, keep, open_settings, says, sees, texts
from tests.serve.page.test_store import RECORD, change_temperature, press

TURNS = [
    {"role": role, "content": f"{role} {i}", "reason": "stop"}
    for i in range(2)
    for role in ("user", "assistant")
]
BODIES = "article > .body"


def done(page: Chrome) -> None:
    sees(lambda: "+ 60 tokens" in "".join(texts(page, ".facts")[-1:]))


def test_a_question_that_is_edited_is_asked_anew_and_the_old_one_stays(page: Chrome) -> None:
    keep(page, {"title": "two turns", "messages": TURNS})
    before = texts(page, BODIES)
    page.execute_script(RECORD)
    press(page, "Edit", 0)
    field = find(page, ".edited textarea")
    assert field.get_attribute("value") == "user 0"
    field.clear()
    field.send_keys("in other words" + Keys.ENTER)
    done(page)
    assert page.execute_script("return window.sent") == [["in other words"]]
    now = texts(page, BODIES)
    assert (now[0], len(now)) == ("in other words", 2)
    assert texts(page, ".version") == ["2 / 2"]
    press(page, "Earlier question")
    assert texts(page, BODIES) == before
    page.refresh()
    assert texts(page, BODIES) == before
    press(page, "Later question")
    assert texts(page, BODIES) == now
    ask(page, "and then?")
    sees(lambda: len(texts(page, BODIES)) == 4 and not texts(page, ".growing"))
    press(page, "Earlier question")
    assert texts(page, BODIES) == before


@pytest.mark.parametrize("by", ["Escape", "Cancel"])
def test_an_edit_that_is_given_up_changes_nothing(page: Chrome, by: str) -> None:
    keep(page, {"title": "two turns", "messages": TURNS})
    before = texts(page, BODIES)
    page.execute_script(RECORD)
    press(page, "Edit", 1)
    find(page, ".edited textarea").send_keys("x")
    if by == "Escape":
        find(page, ".edited textarea").send_keys(Keys.ESCAPE)
    else:
        find(page, ".edited .action").click()
    assert texts(page, BODIES) == before
    assert page.execute_script("return document.activeElement.title") == "Edit"
    assert page.execute_script("return window.sent") == []


def test_an_answer_in_the_middle_is_given_again(page: Chrome) -> None:
    keep(page, {"title": "two turns", "messages": TURNS})
    page.execute_script(RECORD)
    press(page, "Answer again", 0)
    done(page)
    assert page.execute_script("return window.sent") == [["user 0"]]
    assert len(texts(page, BODIES)) == 2
    press(page, "Earlier answer")
    assert len(texts(page, BODIES)) == 4


def test_each_conversation_has_its_settings(page: Chrome) -> None:
    ask(page, "hello")
    done(page)
    change_temperature(page, "0.5")
    find(page, "#new").click()
    assert "temperature 0" in texts(page, "#hint")[0].split("  ·  ")
    open_settings(page)
    find(page, "[name=seed]").send_keys("7")
    find(page, "#tune-default").click()
    find(page, "#tune-dialog button").click()
    ask(page, "another")
    done(page)
    find(page, "#new").click()
    hints = [find(page, "#hint").text]
    for _ in range(2):
        for nth in (-2, -1):
            page.find_elements(By.CSS_SELECTOR, "#conversations .title")[nth].click()
            hints.append(find(page, "#hint").text)
        page.refresh()
    mine, others = "max tokens 60  ·  temperature 0.5", "max tokens 60  ·  seed 7  ·  temperature 0"
    assert hints == [others, others, mine, others, mine]


def exported(page: Chrome, folder: Path) -> Path:
    command = {"behavior": "allow", "downloadPath": str(folder)}
    page.execute_cdp_cmd("Browser.setDownloadBehavior", command)
    find(page, "#export").click()
    sees(lambda: list(folder.glob("ridgeline-conversations-*.json")))
    return next(folder.glob("ridgeline-conversations-*.json"))


def test_what_is_exported_comes_back(page: Chrome, tmp_path: Path) -> None:
    other = {"title": "ä <b>", "messages": [{"role": "user", "content": "<img src=x>"}]}
    keep(page, {"title": "two turns", "messages": TURNS}, other)
    change_temperature(page, "0.5")
    titles, bodies, hint = "#conversations .title", texts(page, BODIES), find(page, "#hint").text
    file = exported(page, tmp_path)
    keep(page)
    assert texts(page, titles) == ["New conversation"]
    for _ in range(2):  # the second time there is nothing new
        page.execute_script("document.getElementById('transfer-note').textContent = ''")
        find(page, "#import-file").send_keys(str(file))
        sees(lambda: says(page, "#transfer-note", "2 conversations imported."))
        assert texts(page, titles)[-2:] == ["ä <b>", "two turns"]
    page.refresh()
    page.find_elements(By.CSS_SELECTOR, titles)[-2].click()
    assert (texts(page, BODIES), find(page, "#hint").text) == (bodies, hint)


GOOD: dict[str, Any] = {"id": "a", "title": "t", "settings": {}, "messages": TURNS}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "it is not JSON"),
        ("[]", "its format is not"),
        (json.dumps({"format": "ridgeline conversations"}), "its format is not"),
        ([GOOD, GOOD | {"messages": [{"role": "user"}]}], "conversation 2 of 2 is damaged"),
        ([GOOD | {"messages": [TURNS[0] | {"id": "x", "parent": "x"}] * 2}], "1 of 1 is damaged"),
        ([GOOD | {"settings": {"tools": "{"}}], "conversation 1 of 1 is damaged"),
        ([GOOD | {"id": 3}], "conversation 1 of 1 is damaged"),
    ],
)
def test_a_file_that_is_wrong_is_refused_whole(
    page: Chrome, tmp_path: Path, content: Any, reason: str
) -> None:
    before = texts(page, "#conversations .title")
    file = tmp_path / "wrong.json"
    if not isinstance(content, str):
        content = json.dumps({"format": "ridgeline conversations", "conversations": content})
    file.write_text(content)
    find(page, "#import-file").send_keys(str(file))
    sees(lambda: says(page, "#transfer-note", f"Nothing was imported from {file.name}: "))
    assert says(page, "#transfer-note", reason)
    assert texts(page, "#conversations .title") == before
    assert page.execute_script("return Object.keys(localStorage)") == ["ridgeline.settings"]
