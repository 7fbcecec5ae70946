"""The page before several models: those that sleep are asked once, encoders are not offered."""

from __future__ import annotations

import shutil
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.support.select import Select

from tests.fleet.test_router import routing
from tests.model.files.encoders import write_encoder
from tests.serve.page.browser import ask, find, keep, says, sees

REFUSED = """
return performance.getEntriesByType('resource')
  .filter(({ name, responseStatus }) => name.includes('/v1/live') && responseStatus === 503).length;
"""


def test_a_model_that_sleeps_is_asked_once_and_encoders_are_not_offered(
    browser: Chrome, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    for name in ("first", "second"):
        shutil.copytree(model, folder / name)
    write_encoder(folder / "encoder")
    with routing(folder, tmp_path / "log") as routed:
        browser.get(f"http://127.0.0.1:{routed.port}")
        keep(browser)
        sees(lambda: says(browser, "#state", "loads with its first question"))
        offered = Select(find(browser, "#models")).options
        assert [one.text for one in offered] == ["first", "second"]
        ask(browser, "hello")
        sees(lambda: says(browser, ".facts", "tokens/s"))
        sees(lambda: says(browser, "#state", "live"))
        assert browser.execute_script(REFUSED) == 1
        Select(find(browser, "#models")).select_by_visible_text("second")
        sees(lambda: says(browser, "#state", "loads with its first question"))
        assert not find(browser, ".figures").is_displayed(), "they are of another model"
        browser.get("about:blank")
