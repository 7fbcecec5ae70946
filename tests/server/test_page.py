"""The web page in a real browser: chat, what it keeps, what it refuses to be, and the live view."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.server.serving import Served, eventually, serving

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SETTINGS = {"temperature": 0, "max_tokens": 60}  # the model is small, and so is its length
PHONE, DESK = (390, 844), (1440, 900)
HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>
[run](javascript:window.hacked=1) [data](data:text/html,x) [fine](https://example.org/a?b=1)

# Head <b>bold</b>

- **strong** and `<i>code</i>`
- two

```html
<iframe src="javascript:window.hacked=1"></iframe>
```
| a | b |
|---|---|
| <u>x</u> | 2 |
"""


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[Served]:
    """A server whose steps take so long that a person, or a test, can see them."""
    with serving(model) as served:
        served.valve.before = lambda step: time.sleep(0.04)
        yield served


@contextmanager
def browsing(profile: Path, size: tuple[int, int] = DESK) -> Iterator[Chrome]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        set_size(browser, size)
        yield browser


def set_size(browser: Chrome, size: tuple[int, int]) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Chrome, slow: Served) -> Iterator[Chrome]:
    """A page that nobody has used; at the end the browser's log has no complaint."""
    browser.get(slow.url)
    keep(browser)
    yield browser
    assert [line for line in browser.get_log("browser") if line["source"] != "network"] == []
    browser.get("about:blank")
    slow.assert_idle()


def keep(browser: Chrome, *conversations: dict[str, Any]) -> None:
    """Let the page find these conversations, and no others."""
    browser.execute_script(
        """
        localStorage.clear();
        localStorage.setItem('ridgeline.settings', JSON.stringify(arguments[0]));
        for (const [i, one] of arguments[1].entries())
          localStorage.setItem(`ridgeline.conversation.${i}`, JSON.stringify(one));
        """,
        SETTINGS,
        conversations,
    )
    browser.refresh()


def find(browser: Chrome, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser: Chrome, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText)"
    return [str(text) for text in browser.execute_script(script, selector)]


def ask(browser: Chrome, text: str) -> None:
    find(browser, "#question").send_keys(text + Keys.ENTER)


def click(browser: Chrome, title: str) -> None:
    """Click a button that shows when the pointer is over its row."""
    row = find(browser, f'li:has([title="{title}"])')
    ActionChains(browser).move_to_element(row).perform()
    find(browser, f'[title="{title}"]').click()


def answer(browser: Chrome) -> str:
    script = "return document.querySelector('.assistant:last-child .body')?.textContent ?? ''"
    return str(browser.execute_script(script))


def says(browser: Chrome, selector: str, text: str) -> bool:
    return any(text in found for found in texts(browser, selector))


def picture(browser: Chrome, selector: str) -> str:
    return str(browser.execute_script(f"return document.querySelector('{selector}').toDataURL()"))


def sees(condition: Callable[[], object]) -> None:
    eventually(condition, 10)


def test_a_question_is_answered_as_it_streams(page: Chrome, slow: Served, tmp_path: Path) -> None:
    sees(lambda: texts(page, "#model, #state") == ["tiny", "live"])
    empty = picture(page, "#blocks")
    ask(page, "hello")
    sees(lambda: answer(page))
    early = answer(page)
    sees(lambda: len(answer(page)) > len(early))
    assert answer(page).startswith(early)
    sees(lambda: len(page.find_elements(By.CSS_SELECTOR, "#sequences .running")) == 1)
    sees(lambda: picture(page, "#blocks") != empty)
    assert page.save_screenshot(str(tmp_path / "page.png"))
    sees(lambda: says(page, ".facts", "tokens/s"))
    assert says(page, ".facts", "+ 60 tokens")  # as the settings say
    assert says(page, ".facts", "cut at max tokens")
    sees(lambda: find(page, "#quiet").is_displayed())
    assert slow.lines[-1].count("finish=length") == 1


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_answer_and_the_request(page: Chrome, slow: Served, by: str) -> None:
    ask(page, "hello")
    sees(lambda: answer(page))
    button = find(page, "#send")
    assert button.accessible_name == "Stop"
    button.click() if by == "button" else find(page, "#question").send_keys(Keys.ESCAPE)
    sees(lambda: texts(page, ".facts") == ["stopped"])
    sees(lambda: not slow.llm.engine.requests)
    assert button.accessible_name == "Send"
    assert any("finish=abort" in line for line in slow.lines[-3:])
    text = answer(page)
    page.refresh()
    assert answer(page).strip() == text.strip()


def test_an_answer_is_never_html(page: Chrome) -> None:
    message = {"role": "assistant", "content": HOSTILE}
    keep(page, {"title": HOSTILE, "messages": [{**message, "role": "user"}, message]})
    script = "return [...document.querySelectorAll('.body *, #title *')].map((e) => e.localName)"
    names = set(page.execute_script(script))
    expected = {"p", "a", "h3", "ul", "li", "strong", "code", "div", "pre", "table", "td", "th"}
    assert expected <= names
    assert not names & {"img", "script", "iframe", "b", "i", "u", "style", "form", "input"}
    (link,) = page.find_elements(By.CSS_SELECTOR, ".body a")
    assert link.get_attribute("href") == "https://example.org/a?b=1"
    assert "noopener" in str(link.get_attribute("rel"))
    for literal in ("<img src=x", "<script>", "[run](javascript:", "<b>bold</b>", "<u>x</u>"):
        assert literal in answer(page)
    assert find(page, ".user .body").get_attribute("textContent") == HOSTILE
    assert page.execute_script("return window.hacked") is None


def test_no_answer_holds_the_page_up(page: Chrome) -> None:
    pieces = ("*", "[", "`a", "_a ", "> ", "# ", "- ", "|", "``` ", " ", "~~a", "[a](", "1. \n ")
    texts_ = [piece * (40_000 // len(piece)) for piece in pieces]
    texts_ += ["|" + " " * 40_000 + "x\n" + "|" + " " * 40_000 + "x", "#" + " " * 40_000 + "x"]
    messages = [{"role": "assistant", "content": text} for text in texts_]
    start_s = time.monotonic()
    keep(page, {"title": "long", "messages": messages})
    sees(lambda: len(page.find_elements(By.CSS_SELECTOR, ".assistant footer")) == len(messages))
    assert time.monotonic() - start_s < 8


def test_conversations_are_kept_renamed_and_deleted(page: Chrome) -> None:
    hello = {"role": "user", "content": "hello"}
    keep(page, {"title": "old", "messages": [hello]}, {"title": "new", "messages": [hello]})
    rows = "#conversations .title"
    assert texts(page, rows) == ["new", "old"]
    click(page, "Rename new")
    find(page, "#conversations input").send_keys("mine" + Keys.ENTER)
    assert texts(page, rows) == ["mine", "old"]
    page.refresh()
    assert texts(page, rows) == ["mine", "old"]
    click(page, "Delete mine")
    page.switch_to.alert.accept()
    assert texts(page, rows) == ["old"]
    page.refresh()
    assert texts(page, rows) == ["old"]
    find(page, "#new").click()
    assert texts(page, rows) == ["New conversation", "old"]


def test_settings_reach_the_server_and_errors_are_shown(page: Chrome) -> None:
    find(page, "#tune-button").click()
    find(page, "[name=max_tokens]").clear()
    find(page, "[name=max_tokens]").send_keys("5000")
    find(page, "#tune-dialog button").click()
    assert "max tokens 5000" in find(page, "#hint").text
    ask(page, "hello")
    sees(lambda: says(page, ".assistant .problem", "max_tokens asks for 5000"))
    page.refresh()
    assert says(page, ".assistant .problem", "max_tokens asks for 5000")


@pytest.mark.parametrize("view", ["chat", "live", "side"])
def test_a_phone_shows_all_without_scrolling_sideways(page: Chrome, view: str) -> None:
    keep(page, {"title": "t" * 60, "messages": [{"role": "assistant", "content": HOSTILE}]})
    set_size(page, PHONE)
    try:
        find(page, f"[data-show={view}]").click()
        assert page.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        part = {"chat": "#question", "live": "#blocks", "side": "#new"}[view]
        assert find(page, part).is_displayed()
    finally:
        set_size(page, DESK)


def test_nobody_looks_while_the_panel_is_hidden(page: Chrome, slow: Served) -> None:
    listeners = slow.running.bridge.listeners
    sees(lambda: len(listeners) == 2)
    set_size(page, PHONE)  # the chat alone is to be seen
    sees(lambda: len(listeners) == 1)
    set_size(page, DESK)
    sees(lambda: len(listeners) == 2)


def test_the_page_asks_for_a_key_once(model: Path, tmp_path: Path) -> None:
    with serving(model, api_key=["open sesame"]) as served, browsing(tmp_path) as browser:
        browser.get(served.url)
        for key in ("wrong", "open sesame"):
            sees(lambda: find(browser, "#key-dialog").is_displayed())
            find(browser, "#key-dialog input").send_keys(key + Keys.ENTER)
        sees(lambda: texts(browser, "#model, #state") == ["tiny", "live"])
        browser.refresh()
        sees(lambda: texts(browser, "#model") == ["tiny"])
        assert "sesame" not in json.dumps(browser.execute_script("return {...localStorage}"))
