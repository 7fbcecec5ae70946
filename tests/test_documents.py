"""What documents say that commands print is what they print; prose says what the output says."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.documents import (
    LEARN,
    ROOT,
    SUM,
    as_shown,
    differences,
    examples,
    pages,
    read_page,
    run_example,
    unsupported,
    words_of,
)
from tests.model.cost.published_configs import PUBLISHED

PAGES = pages()
LONG = ("15-testing",)  # it measures for half a minute of a quiet machine
OFTEN_AND_LONG = [
    pytest.param(path, marks=[pytest.mark.full] if path.stem in LONG else []) for path in PAGES
]


def check_page(path: Path, folder: Path) -> None:
    """Run a page's commands, and compare what they print and draw with the page."""
    page = read_page(path)
    for example in page.examples:
        tolerance = page.tolerance_of(example)
        printed = run_example(example, folder)
        assert differences(example.shown, printed, tolerance) == [], example.command
        if example.out is None or tolerance is None:  # measured axes go as far as their dots
            continue
        shown, drawn = (words_of((place / example.out).read_text()) for place in (LEARN, folder))
        assert differences(shown, drawn, tolerance) == [], example.command
    drawn_by = {example.out for example in page.examples}
    assert drawn_by - {None} == set(page.pictures)


@pytest.mark.parametrize("path", OFTEN_AND_LONG, ids=lambda path: path.stem)
def test_a_page_shows_what_its_command_prints_and_draws(path: Path, tmp_path: Path) -> None:
    """Often also one of the two pages that measure.

    What the other one prints of a real model, tests/bench/claims asks of a tiny one.
    """
    check_page(path, tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_ends_with_three_exercises_whose_answers_are_checked(path: Path) -> None:
    """By a command, or by a sum of numbers that commands print."""
    exercises = read_page(path).exercises
    assert len(exercises) == 3
    for exercise in exercises:
        question, found, answer = exercise.partition("<summary>Answer</summary>")
        assert found
        assert "?" in question, question
        assert examples(answer) or SUM.search(answer), question


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_numbers_in_prose_are_those_of_the_output(path: Path) -> None:
    page = read_page(path)
    said = "\n".join(f"{one.command}\n{one.shown}" for one in page.examples)
    said += "\n".join(words_of((LEARN / name).read_text()) for name in page.pictures)
    said += "\n".join(one.partition("<summary>")[0] for one in page.exercises)  # what is given
    assert unsupported(page.prose, said) == []
    cited = len(re.findall(r"\d", page.prose))
    assert cited > 5, "the explanation reads nothing off the output"


def test_the_index_names_all_pages_in_their_order() -> None:
    titles = {path.name: path.read_text().partition("\n")[0] for path in PAGES}
    listed = re.findall(r"^(\d+)\. \[(.+)\]\((.+)\)", (LEARN / "README.md").read_text(), re.M)
    assert [(f"# {number}. {title}", name) for number, title, name in listed] == [
        (title, name) for name, title in titles.items()
    ]
    assert [int(number) for number, _, _ in listed] == list(range(1, len(PAGES) + 1))
    for path, after in pairwise(PAGES):
        assert f"]({after.name})" in path.read_text(), f"{path.name} does not lead on"


def test_configs_beside_the_pages_are_the_published_ones() -> None:
    for name in ("llama-3.1-8b", "llama-3.1-70b", "gpt-oss-20b", "deepseek-v3"):
        assert json.loads((LEARN / f"{name}.json").read_text()) == PUBLISHED[name]["config"]


def test_the_example_of_plans_is_what_the_program_prints(tmp_path: Path) -> None:
    (example,) = examples((ROOT / "docs" / "planning.md").read_text())
    assert differences(example.shown, run_example(example, tmp_path), 0.0) == []


def test_a_number_outside_the_tolerance_is_a_difference() -> None:
    assert differences("12 ms of 1,000", "12 ms  of 1,000", 0.0) == []
    assert differences("12 ms of 1,000", "12 ms of 1,040", 0.05) == []
    assert differences("12 ms of 1,000", "12 ms of 1,060", 0.05) == ["1,000 is now 1,060"]
    assert differences("12 ms (1-2) to ends", "to 99 ms ends", None) == []
    assert differences("12 ms", "12 us", None) != []
    assert differences("a 1\n...", "a 1\nb 2", 0.0) == []
    assert differences("a 1\n...", "a 2\nb 2", 0.0) != []
    assert as_shown("a\nb\nc", "a\nb\n...") == "a\nb\n..."


def test_prose_may_say_what_was_printed_and_sums_of_it() -> None:
    printed = "weights 15.0 GiB, cache 5.00 GiB, 1,024 tokens"
    assert unsupported("It has 1,024 tokens, on an H100 (`--x 7`).", printed) == []
    assert unsupported("Together 15.0 GiB + 5.00 GiB = 20.0 GiB, so 20.0.", printed) == []
    assert unsupported("15.0 / 5.00 = 4", printed) == ["15.0 / 5.00 = 4"]
    assert unsupported("It has 1,025 tokens.", printed) == ["1,025"]
