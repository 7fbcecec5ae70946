"""The page below a prefix, as behind a proxy."""

from __future__ import annotations

from pathlib import Path

from selenium.webdriver import Chrome

from tests.serve.page.browser import answer, ask, keep
from tests.serve.serving import serving
from tests.waiting import eventually


def test_the_page_works_below_a_prefix(model: Path, browser: Chrome) -> None:
    with serving(model, root_path="/llm") as served:
        browser.get(f"{served.url}/llm/")
        keep(browser)
        ask(browser, "Hello")
        eventually(lambda: answer(browser))
        lost = [line for line in browser.get_log("browser") if " 404 " in line["message"]]
        assert lost == []
        browser.get("about:blank")
        served.assert_idle()
