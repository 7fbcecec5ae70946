"""An answer token by token in a real browser: how likely each was, and its alternatives."""

from __future__ import annotations

import math

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.serve.page.browser import find, keep, says, sees, texts
from tests.serve.serving import Served

QUESTION = {"role": "user", "content": "hello"}


def read_again(page: Chrome) -> None:
    page.find_element(By.XPATH, "//button[text()='How sure?']").click()


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))


def labels(page: Chrome) -> list[float]:
    script = "return [...document.querySelectorAll('.token')].map((one) => one.ariaLabel)"
    return [percent(label.rsplit(", ", 1)[1]) for label in page.execute_script(script)]


def close(shares: list[float], logprobs: list[float]) -> bool:
    return len(shares) == len(logprobs) and all(
        abs(share - 100 * math.exp(logprob)) <= 0.51
        for share, logprob in zip(shares, logprobs, strict=True)
    )


def test_the_page_shows_how_likely_each_token_was(page: Chrome, slow: Served) -> None:
    told = {"role": "assistant", "content": "hello there, \U0001f389 and more"}
    alone = slow.call("/v1/chat/completions", {"messages": [QUESTION], "max_tokens": 0})[1]
    start = alone["usage"]["prompt_tokens"]
    body = {"messages": [QUESTION, told], "continue_final_message": True, "max_tokens": 0}
    body |= {"prompt_logprobs": 5, "return_token_ids": True}
    read = slow.call("/v1/chat/completions", body)[1]
    ids, logprobs = read["prompt_token_ids"][start:], read["prompt_logprobs"][start:]
    wanted = [logprobs[i][str(token)]["logprob"] for i, token in enumerate(ids)]
    usage = {"prompt_tokens": start, "completion_tokens": len(ids) + 1}
    answer = told | {"reason": "stop", "usage": usage, "requests": [{"id": "a"}]}
    keep(page, {"title": "t", "messages": [QUESTION, answer]})

    read_again(page)
    sees(lambda: texts(page, ".token"))
    shown = page.execute_script("return document.querySelector('.token-text').textContent")
    assert shown.replace("·", "") == told["content"]
    assert close(labels(page), wanted)
    assert not find(page, ".assistant .body").is_displayed()
    assert "other tokens" not in texts(page, ".alternatives .note")[0]

    page.execute_script("document.querySelector('.token').focus()")
    find(page, ".token").send_keys(Keys.ARROW_RIGHT)
    ranked = sorted((one["logprob"] for one in logprobs[1].values()), reverse=True)
    shares = [percent(row) for row in texts(page, ".alternatives td:nth-child(2)")]
    assert close(shares, [*ranked[:5], *([wanted[1]] if wanted[1] < ranked[4] else [])])
    assert len(texts(page, ".alternatives tr.chosen")) >= 1

    read_again(page)
    assert find(page, ".assistant .body").is_displayed()
    assert not texts(page, ".token")


def test_an_answer_that_no_longer_fits_its_prompt_says_so(page: Chrome) -> None:
    message = {
        "role": "assistant",
        "content": "so far",
        "reason": "stop",
        "requests": [{"id": "a"}],
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    keep(page, {"title": "t", "messages": [QUESTION, message | {"usage": usage}]})
    read_again(page)
    sees(lambda: says(page, ".problem", "can no longer be read token by token"))
    assert find(page, ".assistant .body").is_displayed()


def test_only_an_answer_of_one_request_and_of_text_can_be_read_again(page: Chrome) -> None:
    message = {"role": "assistant", "content": "so far", "reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    twice = {"usage": usage, "requests": [{"id": "a"}, {"id": "b"}]}
    thought = {"usage": usage, "requests": [{"id": "a"}], "reasoning": "hm"}
    for more in (twice, thought, {"requests": [{"id": "a"}]}):
        keep(page, {"title": "t", "messages": [QUESTION, message | more]})
        assert "How sure?" not in texts(page, ".why")
