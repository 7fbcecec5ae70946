"""The course: what it says of order, its formulas, its drawings, and the page with two roofs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from ridgeline.engine.setup.home import stores
from ridgeline.planner import plan
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec
from tests.documents import LEARN, Page, pages, read_page
from tests.serve.page.browser import PHONE, browsing, sees

sys.path.insert(0, str(LEARN))  # its programs import each other

import drawing
import estimate
import mechanisms_of_devices as over_devices
import mechanisms_of_layers as layers
import mechanisms_of_runs as runs
import roofs

# What is said of order, or of one thing among others: it is not enough that a number occurs.
ORDER = re.compile(
    r"\b(cheapest|dearest|slowest of|fastest|largest (?:part|cause)|longest step|only \d+% busy"
    r"|(?:first|second|third|fourth|fifth|last) (?:row|line))\b"
)
_SENTENCE = re.compile(r"(?<=[.?!:])\s+(?=[A-Z*(])|</?[a-z]+>|\n\n")


def paragraphs(text: str) -> list[str]:
    """Return the rows of a table whose cells are wrapped."""
    return re.split(r"\n(?=\S)", text)[2:]


def choices(shown: str) -> list[dict[str, str]]:
    """Return the rows of a plan's choices."""
    head, *lines = shown[shown.index("choice  ") :].splitlines()
    names = re.split(r"\s{2,}", head.strip())
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return [dict(zip(names, row, strict=True)) for row in cells if len(row) == len(names)]


def usd(row: dict[str, str]) -> float:
    return float(row["USD/h"])


def milliseconds(row: dict[str, str]) -> float:
    return float(row["tpot p95, ms"].partition(" ")[0])


def of_device(rows: list[dict[str, str]], name: str) -> dict[str, str]:
    return next(row for row in rows if row["choice"].endswith(name))


def is_surely_first(page: Page, number: int) -> bool:
    """Whether the row of this number, from 0, is the first that holds surely."""
    rows = choices(page.examples[0].shown)
    return [row["holds"].startswith("surely") for row in rows].index(True) == number


def is_slowest(page: Page) -> bool:
    asked = [one for one in records("busy.jsonl") if one["type"] == "request"]
    slowest = max(asked, key=lambda one: one["finish_s"] - one["arrival_s"])
    return (slowest["request_id"], len(asked)) == (13, 14) and "Request 13" in page.examples[
        0
    ].shown


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (LEARN / name).read_text().splitlines()]


def causes(shown: str) -> list[tuple[str, float]]:
    """Return causes and their shares, as ``explain`` prints them."""
    return [(name.strip(), float(share)) for name, share in
            re.findall(r"^(.+?)\s{2,}[\d.]+ \w+\s+([\d.]+)%$", shown, re.M)]  # fmt: skip


def is_largest(page: Page, example: int, said: str) -> bool:
    found = [one for one in causes(page.examples[example].shown) if one[0] != "all"]
    return said in max(found, key=lambda one: one[1])[0]


def first_choice(page: Page, example: int) -> dict[str, str]:
    rows = choices(page.examples[example].shown)
    return min(rows, key=usd)


def h100_is_busier(page: Page) -> bool:
    before, after = (of_device(choices(page.examples[i].shown), "x h100-sxm") for i in (0, 2))
    busier = int(after["busy"].rstrip("%")) > 2 * int(before["busy"].rstrip("%"))
    return before["busy"] == "20%" and busier and usd(after) / 5 < usd(before) / 2


def line_is_of_h100s(page: Page) -> bool:
    """Whether the picture's blue line goes through the points of H100s, and through no others."""
    svg = (LEARN / "cost.svg").read_text()
    (line,) = re.findall(r'<polyline points="([^"]+)"', svg)
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<]+)', svg)
    names = [name for x, y, name in dots if f"{x},{y}" in line.split()]
    rows = choices(page.examples[0].shown)
    num_rows = len([row for row in rows if "h100" in row["choice"]])
    return all("h100" in name for name in names) and len(names) == num_rows


def slots_take(page: Page, name: str) -> int:
    example = next(one for one in page.examples if one.command.endswith("draw.py slots"))
    return int(next(line for line in example.shown.splitlines() if name in line).split()[-1])


def shown(page: Page) -> list[str]:
    return page.examples[0].shown.splitlines()


def table_row(page: Page, number: int) -> str:
    return paragraphs(page.examples[0].shown)[number]


# A sentence, by its page and some of its words, and what must hold.
SAID: list[tuple[str, str, Callable[[Page], bool]]] = [
    ("04", "last column of the output says", lambda p: shown(p)[0].endswith("of the roof")),
    ("06", "In the first row, batches", lambda p: "static -> orca" in table_row(p, 0)),
    ("06", "a batch had room for 8", lambda p: "static, 8" in table_row(p, 1)),
    ("06", "takes 64 ms instead of 97", lambda p: (
        (slots_take(p, "pieces"), slots_take(p, "blocks")) == (64, 97))),
    ("07", "In the first row only 6", lambda p: " 6.3 " in table_row(p, 0)),
    ("07", "In the second row the model", lambda p: "28,920" in table_row(p, 1)),
    ("13", "This was the slowest of", is_slowest),
    ("13", "By far the largest part", lambda p: is_largest(p, 0, "before the engine")),
    ("13", "The last line says why", lambda p: "--max-num-seqs 8" in shown(p)[-1]),
    ("13", "What was the largest cause?", lambda p: is_largest(p, 1, "others in the same steps")),
    ("14", "What is the cheapest machine", lambda p: bool(choices(p.examples[0].shown))),
    ("14", "the cheapest comes first: 2 cards", lambda p: (
        (rows := choices(p.examples[0].shown)) == sorted(rows, key=usd)
        and rows[0]["choice"] == "2 x rtx4090" and usd(rows[0]) == 0.80)),
    ("14", "The third row costs 1.00 and is only", lambda p: (
        (row := choices(p.examples[0].shown)[2])["holds"] == "likely" and usd(row) == 1.00)),
    ("14", "The fourth row, for 1.60", partial(is_surely_first, number=3)),
    ("14", "All points on this line are H100s, and yet", lambda p: (
        line_is_of_h100s(p) and "h100" not in first_choice(p, 0)["choice"])),
    ("14", "The H100 is only 20% busy", h100_is_busier),
    ("14", "7 of them for 2.80 are still the cheapest", lambda p: (
        (row := first_choice(p, 2))["choice"] == "7 x rtx4090" and usd(row) == 2.80
        and usd(of_device(choices(p.examples[2].shown), "2 x h100-sxm")) == 5.00)),
    ("14", "four times as fast as the cheapest", lambda p: (
        3.5 < milliseconds(first_choice(p, 2))
        / milliseconds(of_device(choices(p.examples[2].shown), "x h100-sxm")) < 4.5)),
    ("14", "what is the cheapest now?", lambda p: (
        (row := first_choice(p, 3))["choice"] == "1 x rtx4090" and usd(row) == 0.40)),
]  # fmt: skip


def sentences(page: Page) -> Iterator[str]:
    prose = re.sub(r"^    .*$", "", page.prose, flags=re.M)
    yield from (" ".join(one.split()) for one in _SENTENCE.split(prose))


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_what_is_said_of_order_is_what_commands_print(path: Path) -> None:
    """What they print is compared with the page elsewhere; here prose is compared with that."""
    page = read_page(path)
    said = [(words, holds) for number, words, holds in SAID if path.name.startswith(number)]
    text = " ".join(page.prose.split())
    for words, holds in said:
        assert words in text, words
        assert holds(page), words
    unchecked = [one for one in sentences(page)
                 if ORDER.search(one) and not any(words in one for words, _ in said)]  # fmt: skip
    assert unchecked == [], "give each a check above"


def test_a_false_claim_of_order_is_found() -> None:
    page = read_page(LEARN / "14-cost.md")
    assert is_surely_first(page, 3)
    assert not is_surely_first(page, 2)
    assert not is_largest(read_page(LEARN / "13-latency.md"), 0, "its prompt")


def terms() -> list[tuple[str, int]]:
    """Return the words of the index, each with the number of the page that explains it."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (LEARN / "README.md").read_text(), re.M)
    return [(word, int(number)) for number, words in rows for word in words.split(", ")]


@pytest.mark.parametrize(("word", "number"), terms())
def test_a_word_is_explained_where_it_first_appears(word: str, number: int) -> None:
    pattern = re.compile(rf"\b{re.escape(word)}s?\b", re.I)
    prose = [re.sub(r"^    .*$|`[^`]*`", "", path.read_text(), flags=re.M) for path in pages()]
    explained = re.findall(r"\*+([^*\n]+(?:\n[^*\n]+)?)\*+|\(([A-Z0-9]+)\)", prose[number - 1])
    said = [" ".join((one or other).split()) for one, other in explained]
    assert any(pattern.search(one) for one in said), "its page sets it in italics, or in brackets"
    before = [i for i, text in enumerate(prose[: number - 1], start=1)
              if pattern.search(re.sub(r"^#.*$|^Next: .*$", "", text, flags=re.M))]  # fmt: skip
    assert before == [], "it is used before"


def estimated(model: str, device: str, **given: Any) -> estimate.Estimate:
    shape = read_model_spec(str(LEARN / f"{model}.json"), stores()).shape
    return estimate.Estimate(shape, devices()[device], **given)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "gpt-oss-20b", "deepseek-v3"])
def test_the_estimate_counts_as_the_plan_does(model: str) -> None:
    asked = {"on": "h200-sxm", "dtype": "bf16", "context": 4096, "concurrency": 3}
    found = plan(str(LEARN / f"{model}.json"), tensor_parallel_size="1", **asked)
    lines = {line["name"]: line["bytes"] for line in found.as_dict()["memory"]["lines"]}
    one = estimated(model, "h200-sxm", batch=3, context=4096)
    weights = sum(size for name, size in lines.items() if name.startswith("weights"))
    cache = sum(size for name, size in lines.items() if name.startswith("KV cache"))
    assert one.params * 2 == pytest.approx(weights, rel=0.02)
    assert one.kv_bytes == pytest.approx(cache, rel=0.02)


def test_the_least_time_is_that_of_the_slower_roof() -> None:
    alone, many = (estimated("llama-3.1-8b", "l4", batch=n, context=0) for n in (1, 1000))
    assert alone.step_s == alone.read_s > alone.compute_s
    assert many.step_s == many.compute_s > many.read_s
    assert alone.step_s == pytest.approx(2 * 7_504_924_672 / 300e9)
    ridge = alone.flop_per_s / alone.bytes_per_s
    below, above = (estimated("llama-3.1-8b", "l4", batch=round(n * ridge), context=0)
                    for n in (0.95, 1.05))  # fmt: skip
    assert below.read_s > below.compute_s
    assert above.read_s < above.compute_s


def test_a_batch_meets_more_experts_and_a_window_keeps_less() -> None:
    one, many = (estimated("gpt-oss-20b", "rtx4090").weight_read_bytes(n) for n in (1, 64))
    assert one < many / 4
    assert many < estimated("gpt-oss-20b", "rtx4090").params * 2
    short, long = (estimated("gpt-oss-20b", "rtx4090", context=n).kv_bytes for n in (128, 12800))
    assert long / short == pytest.approx(0.5 * 100 + 0.5)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_drawn_tokens_choose_different_experts_and_meet_as_many_as_is_said(tokens: int) -> None:
    got = layers.chosen(tokens, 4, 32)
    assert got.total() == 4 * tokens
    assert max(got.values()) <= tokens
    assert set(got) <= set(range(32))
    assert len(got) == pytest.approx(32 * (1 - (1 - 4 / 32) ** tokens), abs=4)


def test_attention_in_blocks_is_attention() -> None:
    for i, query in enumerate(layers.QUERIES):
        keys, values = layers.KEYS[: i + 1], layers.VALUES[: i + 1]
        parts = layers.weights_of(query, keys)
        assert sum(parts) == pytest.approx(1)
        whole = [sum(p * v[c] for p, v in zip(parts, values, strict=True)) for c in (0, 1)]
        assert layers.in_blocks(query, keys, values) == pytest.approx(whole)


def test_drawn_ways_of_batching_serve_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draws what the scheduler did: all tokens of all requests, static with the most steps."""
    monkeypatch.chdir(LEARN)
    steps = {}
    for name, (policy, given) in runs.WAYS.items():
        seen = runs.run(runs.LOAD, policy, **given)
        tokens = sum(len(work.tokens) for one in seen for work in one.step.work)
        assert tokens == sum(len(one.prompt) + one.num_new[0] - 1 for one in runs.LOAD)
        steps[name] = len(seen)
    assert max(steps, key=lambda name: steps[name]) == "static"


def test_the_tree_of_beams_leads_to_the_recorded_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LEARN)
    lines, picture = runs.beam_tree()
    best = [re.findall(r"'([^']*)'|\"([^\"]*)\"", line) for line in lines[1:]]
    firsts = ["".join(row[0]) for row in best]
    assert firsts[:3] == [" a", " cat", "."]  # the server answered: a cat. What's your ...
    assert picture.count("score ") == 4 * len(firsts)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stage_works_on_one_part_at_a_time_and_in_order(count: int) -> None:
    found = over_devices.schedule(count, 5)
    assert len({(stage, begin) for stage, begin, _, _ in found}) == len(found)
    begins = {(part, token, stage): begin for stage, begin, part, token in found}
    for (part, token, stage), begin in begins.items():
        before = (part, token, stage - 1) if stage else (part, token - 1, over_devices.STAGES - 1)
        assert before[1] < 0 or begins[before] < begin
    assert over_devices.busy(count, 1000) == pytest.approx(count / 4, abs=0.01)


def test_colours_are_mixed_with_white() -> None:
    assert (drawing.light("#000000", 0.5), drawing.light("#ffffff")) == ("#808080", "#ffffff")


def test_sizes_and_speeds_of_the_page_are_those_of_today() -> None:
    page = (LEARN / "roofs.html").read_text()
    assert roofs.with_data(page) == page, "python roofs.py"


@pytest.fixture(scope="module")
def two_roofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browsing(tmp_path_factory.mktemp("browser"), PHONE) as browser:
        browser.get((LEARN / "roofs.html").as_uri())
        yield browser
        assert browser.get_log("browser") == []


def move(browser: Chrome, name: str, power: int) -> None:
    """Move a slider to a power of two, as a hand does."""
    script = """
    arguments[0].value = arguments[1];
    arguments[0].dispatchEvent(new Event('input', { bubbles: true }));
    """
    browser.execute_script(script, browser.find_element(By.NAME, name), power)


def dot(browser: Chrome, name: str) -> tuple[float, float]:
    found = browser.find_element(By.ID, name)
    return float(found.get_attribute("cx") or 0), float(found.get_attribute("cy") or 0)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
@pytest.mark.parametrize("power", [0, 4, 10])
def test_the_page_says_what_the_estimate_says(two_roofs: Chrome, model: str, power: int) -> None:
    Select(two_roofs.find_element(By.NAME, "model")).select_by_value(model)
    move(two_roofs, "context", 8)
    move(two_roofs, "batch", power)
    one = estimated(model, "l4", batch=2**power, context=256)
    verdict = two_roofs.find_element(By.ID, "verdict").text
    slower = "memory" if one.read_s > one.compute_s else "arithmetic"
    assert f"at least {1e3 * one.step_s:.1f} ms: {slower} decides" in verdict
    shown = float(re.search(r"([\d,.]+) tokens/s", verdict)[1].replace(",", ""))  # type: ignore[index]
    assert shown == pytest.approx(one.batch / one.step_s, rel=0.001)


def test_the_dot_climbs_along_the_slanted_roof_and_then_stays(two_roofs: Chrome) -> None:
    Select(two_roofs.find_element(By.NAME, "model")).select_by_value("llama-3.1-8b")
    move(two_roofs, "context", 0)
    places = []
    for power in range(11):
        move(two_roofs, "batch", power)
        sees(
            lambda power=power: (
                two_roofs.find_element(By.NAME, "batch-shown").text == f"{2**power:,}"
            )
        )
        places.append(dot(two_roofs, "answers"))
    xs, ys = zip(*places, strict=True)
    assert list(xs) == sorted(xs)
    assert ys[0] > ys[4] > ys[8]  # up, as pixels go down
    assert ys[9] == pytest.approx(ys[10])  # behind the ridge of 403
    width = two_roofs.execute_script("return document.documentElement.scrollWidth")
    assert width <= PHONE[0], "a phone need not scroll to the side"


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
def test_names_of_dots_never_cover_each_other(two_roofs: Chrome, model: str) -> None:
    Select(two_roofs.find_element(By.NAME, "model")).select_by_value(model)
    move(two_roofs, "context", 8)
    script = """
    const of = (name) => [...document.querySelectorAll('svg text')]
      .find((one) => one.textContent === name).getBoundingClientRect();
    const [one, other] = [of('answers'), of('prompt')];
    return one.left < other.right && other.left < one.right
      && one.top + 3 < other.bottom && other.top + 3 < one.bottom;
    """
    covered = []
    for device in roofs.DEVICES:
        Select(two_roofs.find_element(By.NAME, "device")).select_by_value(device)
        for power in range(11):
            move(two_roofs, "batch", power)
            if two_roofs.execute_script(script):
                covered.append((device, 2**power))
    assert covered == []
