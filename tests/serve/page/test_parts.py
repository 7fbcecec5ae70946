"""The page in a real browser: reasoning folded away, calls of tools, answers under a schema."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from tests.serve.answer.test_tools import TOOLS, thinker
from tests.serve.page.browser import (
    DESK,
    PHONE,
    answer,
    ask,
    browser,
    find,
    open_settings,
    says,
    sees,
    set_size,
    texts,
)
from tests.serve.serving import Served, hold

__all__ = ["browser", "thinker"]  # fixtures

ONE = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
# The page asks as it always does; what a random model would not do by itself is added on the way.
ADDING = """
const send = window.fetch;
window.sent = [];
window.fetch = (path, options) => {
  if (!options?.body) return send(path, options);
  const body = JSON.parse(options.body);
  window.sent.push(body);
  return send(path, { ...options, body: JSON.stringify({ ...body, ...arguments[0] }) });
};
""".replace("arguments[0]", "window.added")


@pytest.fixture
def parts(browser: Chrome, thinker: Served) -> Iterator[Chrome]:
    thinker.valve.before = lambda step: time.sleep(0.01)
    yield browser
    assert [line for line in browser.get_log("browser") if line["source"] != "network"] == []
    browser.get("about:blank")
    thinker.valve.before = lambda step: None
    thinker.assert_idle()


def opened(page: Chrome, served: Served, added: dict[str, Any], **settings: Any) -> None:
    page.get(served.url)
    script = "localStorage.clear(); localStorage.setItem('ridgeline.settings', arguments[0])"
    page.execute_script(script, json.dumps({"temperature": 0, "max_tokens": 60} | settings))
    page.refresh()
    page.execute_script("window.added = arguments[0];" + ADDING, added)


def test_reasoning_is_open_while_it_comes_and_folded_then(parts: Chrome, thinker: Served) -> None:
    opened(parts, thinker, {"chat_template_kwargs": {"enable_thinking": True}})
    go_on = hold(thinker, 30)
    ask(parts, "hello")
    is_open = "return document.querySelector('details.reasoning')?.open"
    sees(lambda: parts.execute_script(is_open))
    go_on.set()
    sees(lambda: says(parts, ".facts", "cut at max tokens"))
    assert parts.execute_script(is_open) is False
    find(parts, "details.reasoning summary").click()
    assert parts.execute_script(is_open) is True
    assert len(texts(parts, "details.reasoning div")[0]) > 10
    assert answer(parts).strip() == ""
    parts.refresh()
    sees(lambda: len(texts(parts, "details.reasoning")) == 1)


def test_a_call_is_shown_and_its_result_sent(
    parts: Chrome,
    thinker: Served,
    tmp_path: Path,
) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    opened(parts, thinker, {"tool_choice": named}, tools=json.dumps(TOOLS), max_tokens=300)
    ask(parts, "add something")
    sees(lambda: says(parts, ".call header", "add"))
    sees(lambda: says(parts, ".call", "Result"))
    arguments = json.loads(texts(parts, ".call pre")[0])
    assert set(arguments) <= {"a", "b"}
    assert parts.save_screenshot(str(tmp_path / "call.png"))
    set_size(parts, PHONE)
    assert parts.save_screenshot(str(tmp_path / "call_phone.png"))
    set_size(parts, DESK)
    find(parts, ".call textarea").send_keys("<b>7</b>")
    parts.execute_script("window.added = {tool_choice: 'none'}")
    find(parts, ".calls .action").click()
    sees(lambda: len(parts.execute_script("return window.sent")) == 2)
    sees(lambda: says(parts, "article:last-child .facts", "tokens"))
    first, second = parts.execute_script("return window.sent")
    assert first["tools"] == TOOLS
    _, said, result = second["messages"]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == arguments
    assert result == {
        "role": "tool",
        "tool_call_id": said["tool_calls"][0]["id"],
        "content": "<b>7</b>",
    }
    assert texts(parts, ".call .result") == ["<b>7</b>"]  # text, never HTML


def test_an_answer_under_a_schema_is_code(parts: Chrome, thinker: Served) -> None:
    opened(parts, thinker, {}, schema=json.dumps(ONE | {"additionalProperties": False}))
    ask(parts, "hello")
    sees(lambda: says(parts, ".facts", "tokens"))
    assert json.loads(texts(parts, ".body pre")[0]) == {"a": 1}
    assert texts(parts, ".body pre")[0].split() == ["{", '"a":', "1", "}"]
    assert texts(parts, "#hint") == ["JSON schema set  ·  max tokens 60  ·  temperature 0"]


def test_settings_that_are_wrong_say_so_in_place(
    parts: Chrome,
    thinker: Served,
    tmp_path: Path,
) -> None:
    opened(parts, thinker, {})
    open_settings(parts)
    tools, schema = find(parts, "[name=tools]"), find(parts, "[name=schema]")
    tools.send_keys('{"a"')
    schema.send_keys("[1]")
    assert says(parts, "#tune-dialog .problem", "This is not JSON")
    assert says(parts, "#tune-dialog .problem", "A JSON schema is an object.")
    assert parts.save_screenshot(str(tmp_path / "settings.png"))
    find(parts, "#tune-dialog button").click()
    assert find(parts, "#tune-dialog").is_displayed()
    for field, text in ((tools, json.dumps(TOOLS)), (schema, "{}")):
        field.clear()
        field.send_keys(text)
    assert set(texts(parts, "#tune-dialog .problem")) == {""}
    find(parts, "#tune-dialog button").click()
    sees(lambda: not find(parts, "#tune-dialog").is_displayed())
    assert says(parts, "#hint", "tools set")
