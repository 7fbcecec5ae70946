"""What the page shows of the process's memory, and what the server says of it."""

from __future__ import annotations

import re
from pathlib import Path

from selenium.webdriver import Chrome

from ridgeline.system.report import gb
from tests.serve.page.browser import PHONE, ask, browsing, find, says, sees, set_size, texts
from tests.serve.serving import Served, serving

BAR = """
return [...document.querySelectorAll('#memory-bar i')]
  .map((piece) => [piece.title, piece.getBoundingClientRect().width]);
"""


def bytes_in(text: str) -> float:
    """Return the bytes that a text such as "KV cache 12.3 MB" ends with."""
    found = re.search(r"([\d.]+) ([MG])B", text)
    assert found
    return float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]


def test_the_bar_shows_what_the_lines_say(page: Chrome, slow: Served) -> None:
    sees(lambda: says(page, "#memory-note", "in use"))
    ask(page, "Hello")
    sees(lambda: says(page, ".facts", "tokens/s"))  # from now on the cache takes no more
    find(page, "#memory summary").click()

    def shows_what_is_said() -> bool:
        cells = texts(page, "#memory td")
        shown = dict(zip(cells[::3], cells[1::3], strict=True))
        said = {line["name"]: line["bytes"] for line in slow.call("/v1/memory")[1]["lines"]}
        is_same = bytes_in(shown["KV cache"]) == round(said["kv_cache"], -5)
        return is_same and len(shown) == len(said)

    sees(shows_what_is_said)  # lines come and go meanwhile
    sees(lambda: says(page, "#memory-legend", "KV cache"))
    pieces = dict(page.execute_script(BAR))
    total = sum(map(bytes_in, pieces))
    shown = bytes_in(texts(page, "#memory-note")[0])
    assert abs(total - shown) < 0.01 * shown
    needed = gb(slow.call("/v1/memory")[1]["needs"]["bytes"])
    assert says(page, "#memory-note", f", needs {needed} for a text of ")
    for title, width in pieces.items():
        share = width / sum(pieces.values())
        assert abs(share - bytes_in(title) / total) < 0.02, title
    assert says(page, "#memory-notes", "takes memory as its blocks are first used")
    set_size(page, PHONE)
    try:
        find(page, "[data-show=live]").click()
        assert page.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    finally:
        set_size(page, (1440, 900))


def test_nobody_measures_while_nobody_looks(model: Path, tmp_path: Path) -> None:
    with serving(model) as served, browsing(tmp_path, PHONE) as browser:
        browser.get(served.url)
        sees(lambda: texts(browser, "#model") == ["tiny"])
        asked = [line for line in served.lines if "/v1/memory" in line]
        assert asked == []
        find(browser, "[data-show=live]").click()
        sees(lambda: says(browser, "#memory-note", "in use"))
