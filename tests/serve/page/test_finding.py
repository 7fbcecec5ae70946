"""The page in a real browser: the search, the panel that folds, and keys."""

from __future__ import annotations

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import (
    DESK,
    PHONE,
    agree,
    find,
    keep,
    num_viewers,
    open_settings,
    sees,
    set_size,
    texts,
)
from tests.serve.serving import Served

TITLES = "#conversations .title > span"
LONG = "One line.\n\n" * 80


def keep_three(page: Chrome) -> None:
    def said(*contents: str) -> list[dict[str, str]]:
        pairs = zip(("user", "assistant"), contents, strict=False)
        return [{"role": role, "content": text, "reason": "stop"} for role, text in pairs]

    bees = [*said(LONG, "Bees <b>dance</b> to point"), *said(LONG, LONG)]
    file = {"name": "notes.txt", "text": "the word stands here alone"}
    cats = [{"role": "user", "content": "a", "attachments": [file]}, said("b", "dogs")[1]]
    keep(
        page,
        {"title": "Of bees", "messages": bees},
        {"title": "Of cats", "messages": cats},
        {"title": "Empty", "messages": said("nothing")},
    )


def press(page: Chrome, *keys: str) -> None:
    """Press keys together, as a person does: whatever has the focus receives them.

    They are not sent to an element. After a dialog has closed, its button is still the active
    element until the browser draws, and a driver refuses to type into what is hidden.
    """
    *held, last = keys
    chain = ActionChains(page)
    for key in held:
        chain.key_down(key)
    chain.send_keys(last)
    for key in reversed(held):
        chain.key_up(key)
    chain.perform()


def test_the_search_finds_titles_texts_and_files(page: Chrome) -> None:
    keep_three(page)
    field = find(page, "#search")
    assert field.accessible_name == "Search conversations"
    for words, found in (
        ("OF", ["Of cats", "Of bees"]),
        ("dance</B>", ["Of bees"]),
        ("stands here", ["Of cats"]),
        ("nowhere at all", []),
    ):
        field.clear()
        field.send_keys(words)
        assert texts(page, TITLES) == found
        assert texts(page, "#search-note") == [f"found in {len(found)} of 3"]
    field.send_keys(Keys.ESCAPE)
    assert len(texts(page, TITLES)) == 3
    assert texts(page, "#search-note") == [""]


def test_what_was_found_is_marked_and_shown(page: Chrome) -> None:
    keep_three(page)
    find(page, "#search").send_keys("dance")
    assert texts(page, "#conversations mark") == ["dance"]
    assert "<b>dance</b>" in texts(page, "#conversations small")[0]  # text, never HTML
    press(page, Keys.ENTER)
    assert texts(page, "#title") == ["Of bees"]
    script = """
    const place = [...document.querySelectorAll('.assistant .body')][0].getBoundingClientRect();
    return place.top >= 0 && place.top < innerHeight / 2;
    """
    assert page.execute_script(script)


def test_the_panel_folds_and_stays_folded(page: Chrome, slow: Served) -> None:
    sees(lambda: num_viewers(slow) == 1)
    button = find(page, "#fold")
    assert (button.accessible_name, button.get_attribute("aria-expanded")) == (
        "Fold the engine panel",
        "true",
    )
    button.click()
    assert not find(page, "#live").is_displayed()
    assert button.get_attribute("aria-expanded") == "false"
    sees(lambda: num_viewers(slow) == 0)  # nobody looks
    page.refresh()
    assert not find(page, "#live").is_displayed()
    set_size(page, PHONE)  # there it has a tab of its own
    find(page, "[data-show=live]").click()
    assert find(page, "#live").is_displayed()
    set_size(page, DESK)
    assert find(page, "#fold").accessible_name == "Show the engine panel"
    find(page, "#fold").click()
    sees(lambda: num_viewers(slow) == 1)


def test_keys_do_what_the_list_says(page: Chrome) -> None:
    keep_three(page)
    sees(lambda: page.switch_to.active_element == find(page, "#question"))  # from the first frame
    press(page, "?")
    assert find(page, "#question").get_attribute("value") == "?"  # in a field it is a letter
    find(page, "#question").clear()
    page.execute_script("document.activeElement.blur()")
    press(page, "?")
    assert find(page, "#shortcut-dialog").is_displayed()
    listed = [row.replace("\t", " ").replace("\n", " ") for row in texts(page, "#shortcut-rows tr")]
    assert any(row.startswith("Search conversations") for row in listed)
    press(page, Keys.ESCAPE)
    press(page, Keys.CONTROL, "k")
    assert page.switch_to.active_element == find(page, "#search")
    press(page, Keys.SHIFT, Keys.ESCAPE)
    assert page.switch_to.active_element == find(page, "#question")
    press(page, Keys.CONTROL, Keys.SHIFT, Keys.BACKSPACE)
    agree(page)
    assert texts(page, TITLES) == ["Of cats", "Of bees"]
    press(page, Keys.CONTROL, Keys.SHIFT, "o")
    assert texts(page, TITLES)[0] == "New conversation"
    press(page, Keys.CONTROL, "b")
    assert not find(page, "#live").is_displayed()
    press(page, Keys.CONTROL, "b")
    assert find(page, "#live").is_displayed()
    press(page, Keys.CONTROL, ",")
    assert find(page, "#tune-dialog").is_displayed()
    press(page, Keys.ESCAPE)
    find(page, "#shortcuts").click()
    assert find(page, "#shortcut-dialog").is_displayed()
    press(page, Keys.ESCAPE)


def test_a_phone_has_all_of_it(page: Chrome) -> None:
    keep_three(page)
    set_size(page, PHONE)
    find(page, "[data-show=side]").click()
    find(page, "#search").send_keys("dance")
    width = "return document.documentElement.scrollWidth"
    assert page.execute_script(width) <= PHONE[0]
    find(page, "#shortcuts").click()
    wide = "return document.querySelector('dialog[open]').scrollWidth <= innerWidth"
    assert page.execute_script(wide)
    press(page, Keys.ESCAPE)
    find(page, "#search").send_keys(Keys.ENTER)
    assert texts(page, "#title") == ["Of bees"]
    open_settings(page)
    assert page.execute_script(wide)
    press(page, Keys.ESCAPE)
    set_size(page, DESK)
