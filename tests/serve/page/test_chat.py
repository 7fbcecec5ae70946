"""The web page in a real browser: chat, Markdown, settings, and the live view."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import (
    DESK,
    PHONE,
    agree,
    answer,
    ask,
    browsing,
    click,
    find,
    keep,
    num_viewers,
    open_settings,
    picture,
    says,
    sees,
    set_size,
    texts,
)
from tests.serve.serving import Served, hold, serving

MARKDOWN = r"""- one
  - two
    - three
    - three too

      with a paragraph
- a

1. one
2. two

text

1. first
   - two
     - in numbers

- [ ] open
- [x] done

So \(a_1 * b * c_1\) and $$a*b*c$$, and escaped \* \(star).

\[
x = \{1\}
\]

| a | b | c |
|:--|:-:|--:|
| 1 | 2 | 3 |
"""
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


def test_a_question_is_answered_as_it_streams(page: Chrome, slow: Served, tmp_path: Path) -> None:
    sees(lambda: texts(page, "#model, #state") == ["tiny", "live"])
    empty, num_lines = picture(page, "#blocks"), len(slow.lines)
    go_on = hold(slow, 10, 0.04)
    ask(page, "hello")
    sees(lambda: answer(page))
    early, more = answer(page), hold(slow, 20, 0.04)
    go_on.set()
    sees(lambda: len(answer(page)) > len(early))
    assert answer(page).startswith(early)
    sees(lambda: len(page.find_elements(By.CSS_SELECTOR, "#sequences .running")) == 1)
    sees(lambda: picture(page, "#blocks") != empty)
    more.set()
    assert page.save_screenshot(str(tmp_path / "page.png"))
    sees(lambda: says(page, ".facts", "tokens/s"))
    assert says(page, ".facts", "+ 60 tokens")  # as the settings say
    assert says(page, ".facts", "cut at max tokens")
    sees(lambda: find(page, "#quiet").is_displayed())
    sees(lambda: any("finish=length" in line for line in slow.lines[num_lines:]))


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_answer_and_the_request(page: Chrome, slow: Served, by: str) -> None:
    go_on, num_lines = hold(slow, 10), len(slow.lines)
    ask(page, "hello")
    sees(lambda: answer(page))
    button = find(page, "#send")
    assert button.accessible_name == "Stop"
    button.click() if by == "button" else find(page, "#question").send_keys(Keys.ESCAPE)
    sees(lambda: says(page, ".facts", "stopped"))
    go_on.set()
    sees(lambda: not slow.llm.engine.requests)
    assert button.accessible_name == "Send"
    sees(lambda: any("finish=abort" in line for line in slow.lines[num_lines:]))
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
    pieces = (
        "*",
        "[",
        "\\(",
        "\\[",
        "$$",
        "$$\n",
        "\\[\n",
        "$a ",
        "$a\\",
        "```python\n",
        "`a",
        "_a ",
        "> ",
        "# ",
        "- ",
        "|",
        "``` ",
        " ",
        "~~a",
        "[a](",
        "1. \n ",
    )
    texts_ = [piece * (40_000 // len(piece)) for piece in pieces]
    texts_ += ["|" + " " * 40_000 + "x\n" + "|" + " " * 40_000 + "x", "#" + " " * 40_000 + "x"]
    messages = [{"role": "assistant", "content": text} for text in texts_]
    clock = {"timeDomain": "threadTicks"}  # what the page computes, not how long it has to wait
    page.execute_cdp_cmd("Performance.enable", clock)
    before_s, spent_s = 0.0, list[float]()
    while not spent_s or min(spent_s) > 4:  # any machine is slow for a while
        assert len(spent_s) < 5, spent_s
        keep(page, {"title": "long", "messages": messages})
        sees(lambda: len(page.find_elements(By.CSS_SELECTOR, ".assistant footer")) == len(messages))
        metrics = page.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        (script_s,) = [one["value"] for one in metrics if one["name"] == "ScriptDuration"]
        spent_s.append(script_s - before_s)
        before_s = script_s


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
    agree(page)
    assert texts(page, rows) == ["old"]
    page.refresh()
    assert texts(page, rows) == ["old"]
    find(page, "#new").click()
    assert texts(page, rows) == ["New conversation", "old"]


def test_settings_reach_the_server_and_a_limit_beyond_the_context_is_one(page: Chrome) -> None:
    open_settings(page)
    find(page, "[name=max_tokens]").clear()
    find(page, "[name=max_tokens]").send_keys("5000")
    find(page, "#tune-dialog button").click()
    assert "max tokens 5000" in find(page, "#hint").text
    ask(page, "hello")
    sees(lambda: says(page, ".assistant", "tokens/s"))
    assert page.find_elements(By.CSS_SELECTOR, ".assistant .problem") == []
    assert says(page, ".facts", "limit lowered to what fits: max_tokens 5000 → ")
    assert not says(page, ".facts", "cut at max tokens")


def test_markdown_as_models_write_it(page: Chrome) -> None:
    keep(page, {"title": "md", "messages": [{"role": "assistant", "content": MARKDOWN}]})
    body = ".body > "
    assert texts(page, body + "ul > li > ul > li > ul > li") == [
        "three",
        "three too\n\nwith a paragraph",
    ]
    assert texts(page, body + "p + ol > li > ul > li > ul > li") == ["in numbers"]
    assert texts(page, body + "ul + ol > li") == ["one", "two"]
    assert texts(page, body + "ol + ul > li") == ["open", "done"]
    boxes = page.find_elements(By.CSS_SELECTOR, body + "ul > .task > .box")
    assert [box.accessible_name for box in boxes] == ["To do", "Done"]
    assert "escaped * (star)" in answer(page)
    cells = "[...document.querySelectorAll('.body td')]"
    script = f"return {cells}.map((cell) => getComputedStyle(cell).textAlign)"
    assert page.execute_script(script) == ["left", "center", "right"]


TABLE = """| Processor | Memory bandwidth | Remarks on what it is good for |
|---|---|---|
| Workstation | 204 gigabytes | {long} |
""".format(long="Decoding is bound by its memory, prefill by its arithmetic units. " * 3)
# How many lines the words of cells are on, at most; whether the table scrolls in a box of its own.
WORDS = """
const lines = [...document.querySelectorAll('.body :is(td, th)')].flatMap((cell) => {
  const node = cell.firstChild;
  return [...node.data.matchAll(/\\S+/g)].map(({ 0: word, index }) => {
    const range = document.createRange();
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    return range.getClientRects().length;
  });
});
return [lines.length, Math.max(...lines), document.documentElement.scrollWidth];
"""


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_words_in_tables_are_not_broken(page: Chrome, size: tuple[int, int]) -> None:
    keep(page, {"title": "table", "messages": [{"role": "assistant", "content": TABLE}]})
    set_size(page, size)
    try:
        num_words, most_lines, width = page.execute_script(WORDS)
        assert num_words > 40
        assert most_lines == 1
        assert width <= size[0], "a table scrolls in its own box"
    finally:
        set_size(page, DESK)


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
    sees(lambda: num_viewers(slow) == 1)
    set_size(page, PHONE)  # the chat alone is to be seen
    sees(lambda: num_viewers(slow) == 0)
    set_size(page, DESK)
    sees(lambda: num_viewers(slow) == 1)


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
