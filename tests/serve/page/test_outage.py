"""What the page says, in a real browser, when the server hangs or dies amid an answer."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.serve.page.browser import answer, ask, find, keep, says, sees, texts
from tests.serve.test_main import process

LENGTH = 60_000  # tokens: an answer that outlasts the test


@pytest.fixture(scope="module")
def long_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, for long answers that nothing ends early."""
    path = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(model, path)
    for name, changes in (
        ("config", {"max_position_embeddings": LENGTH + 100, "eos_token_id": None}),
        ("generation_config", {"eos_token_id": None}),
    ):
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def test_the_page_says_that_the_server_hangs_and_that_it_died(
    browser: Chrome, long_model: Path
) -> None:
    with process(long_model, "--kv-cache-memory", "32MiB") as (server, url):
        browser.get(url)
        keep(browser)
        browser.execute_script(
            "localStorage.setItem('ridgeline.settings', arguments[0])",
            json.dumps({"temperature": 0, "max_tokens": LENGTH}),
        )
        browser.refresh()
        ask(browser, "hello")
        sees(lambda: answer(browser))
        sees(lambda: texts(browser, "#sequences-note") == ["1 running, 0 waiting"])
        assert find(browser, "#sequences-note").is_displayed()

        server.send_signal(signal.SIGSTOP)
        silent = ["the server does not answer"]
        sees(lambda: texts(browser, "#state") == silent)
        server.send_signal(signal.SIGCONT)
        sees(lambda: texts(browser, "#state") == ["live"])
        assert find(browser, "#sequences .running").is_displayed()

        server.kill()
        sees(lambda: texts(browser, "#state") == ["the server cannot be reached"])
        for part in ("#sequences-note", "#sequences", "#blocks", "#generated"):
            assert not find(browser, part).is_displayed()
        assert find(browser, ".away-note").is_displayed()
        lost = "The connection to the server was lost before the answer was complete."
        sees(lambda: says(browser, ".problem", lost))
        assert says(browser, ".problem", "choose “Answer again”")
        text = answer(browser)
        assert text
        find(browser, '[title="Answer again"]').click()
        sees(lambda: says(browser, ".problem", "The server cannot be reached."))
        assert answer(browser) == text
        assert len(browser.find_elements(By.CSS_SELECTOR, ".assistant")) == 1
    browser.get("about:blank")
