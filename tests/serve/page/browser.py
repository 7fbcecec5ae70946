"""A real browser: fixtures, and what the tests of the page do and see in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoAlertPresentException, WebDriverException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from ridgeline.core.step import Step
from ridgeline.serve.observe.live import Live
from tests.serve.serving import Served, serving
from tests.waiting import eventually

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SETTINGS = {"temperature": 0, "max_tokens": 60}  # the model is small, and so is its length
PHONE, DESK = (390, 844), (1440, 900)


class Browser(Chrome):
    """Chrome whose pages have loaded when ``get`` and ``refresh`` return: a driver may not wait."""

    def get(self, url: str) -> None:
        """Load a page; one that differs from this page by its fragment alone is not loaded."""
        self._leave(partial(super().get, url))

    def refresh(self) -> None:
        """Load this page anew."""
        self._leave(super().refresh)

    def _leave(self, go: Callable[[], None]) -> None:
        self.execute_script("window.isLeft = true")
        go()
        sees(self._has_loaded)

    def _has_loaded(self) -> bool:
        try:
            script = "return !window.isLeft && document.readyState === 'complete'"
            return bool(self.execute_script(script))
        except WebDriverException:  # one page takes the other's place
            return False


def draw_slowly(step: Step) -> None:
    time.sleep(0.04)


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[Served]:
    """A server whose steps take so long that a person, or a test, can see them."""
    with serving(model) as served:
        served.valve.before = draw_slowly
        yield served


@contextmanager
def browsing(
    profile: Path,
    size: tuple[int, int] = DESK,
    preferences: dict[str, Any] | None = None,
    flags: tuple[str, ...] = (),
) -> Iterator[Chrome]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", preferences or {})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Browser(options, webdriver.ChromeService(DRIVER)) as browser:
        set_size(browser, size)
        yield browser


def set_size(browser: Chrome, size: tuple[int, int]) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    sees(lambda: browser.execute_script("return [innerWidth, innerHeight]") == [*size])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Chrome, slow: Served) -> Iterator[Chrome]:
    """A page that nobody has used; at the end the browser's log has no complaint."""
    slow.valve.before = draw_slowly
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


def num_viewers(served: Served) -> int:
    """Return how many views the engine makes: one, shared by all who look, or none."""
    owners = [getattr(one, "__self__", None) for one in served.running.async_engine.listeners]
    return sum(isinstance(owner, Live) for owner in owners)


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


def agree(browser: Chrome) -> None:
    """Agree to what the page asks, as soon as it asks."""

    def has_agreed() -> bool:
        try:
            browser.switch_to.alert.accept()
        except NoAlertPresentException:
            return False
        return True

    sees(has_agreed)


def open_settings(browser: Chrome) -> None:
    """Open the dialog, and wait until the server has said which samplers there are."""
    find(browser, "#tune-button").click()
    sees(lambda: browser.find_elements(By.CSS_SELECTOR, "#samplers [name=temperature]"))


def record(browser: Chrome) -> None:
    """Keep what the page sends from now on, for ``sent``."""
    browser.execute_script(
        """
        const send = window.fetch;
        window.sent = [];
        window.fetch = (path, options) => {
          window.sent.push({ path: String(path), ...JSON.parse(options?.body ?? '{}') });
          return send(path, options);
        };
        """
    )


def sent(browser: Chrome) -> list[dict[str, Any]]:
    """Return the requests for answers since ``record``."""
    every: list[dict[str, Any]] = browser.execute_script("return window.sent")
    return [one for one in every if "messages" in one]


def answer(browser: Chrome) -> str:
    script = "return document.querySelector('.assistant:last-child .body')?.textContent ?? ''"
    return str(browser.execute_script(script))


def says(browser: Chrome, selector: str, text: str) -> bool:
    return any(text in found for found in texts(browser, selector))


def picture(browser: Chrome, selector: str) -> str:
    return str(browser.execute_script(f"return document.querySelector('{selector}').toDataURL()"))


def sees(condition: Callable[[], object]) -> None:
    eventually(condition)  # a busy machine draws a background tab late
