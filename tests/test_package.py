"""What a package index and its users' tools read of this package."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def test_the_types_can_be_seen(project: dict[str, Any]) -> None:
    assert "Typing :: Typed" in project["classifiers"]
    assert files("ridgeline").joinpath("py.typed").is_file()  # without it type checkers see Any


def test_the_python_versions_are_named_without_a_gap(project: dict[str, Any]) -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [int(c.removeprefix(prefix)) for c in project["classifiers"] if c.startswith(prefix)]
    assert minors == list(range(11, 11 + len(minors)))
    assert project["requires-python"] == f">=3.{minors[0]}"


def test_there_are_links_to_all_that_a_user_looks_for(project: dict[str, Any]) -> None:
    urls = project["urls"]
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Source"]) for url in urls.values())
    for name in ("Documentation", "Changelog"):
        path = urls[name].removeprefix(urls["Source"]).split("/main/")[1]
        assert Path(__file__).parents[1].joinpath(path).exists()


def test_an_entry_of_the_changelog_fits_on_one_screen() -> None:
    _, *entries = re.split(r"^## ", ROOT.joinpath("CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for entry in entries:
        assert len(entry.splitlines()) <= 45, entry.splitlines()[0]


def test_the_readme_has_no_link_that_a_package_page_cannot_follow(project: dict[str, Any]) -> None:
    root = Path(__file__).parents[1]
    text = root.joinpath("README.md").read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    links = [inline or defined for inline, defined in targets]
    assert len(links) > 5
    owner = project["urls"]["Source"].removeprefix("https://github.com/")
    for link in links:
        assert link.startswith("https://"), link
        if owner in link:
            assert root.joinpath(link.split("/main/")[1]).exists(), link
    for name in re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE):
        assert text.count(f"[{name}]") > 1, f"nothing links to {name}"


def test_tests_stand_in_the_folders_of_what_they_test() -> None:
    rooms = {path.parent.name for path in ROOT.glob("src/ridgeline/*/*.py")}
    folders = {
        path.parent.relative_to(ROOT / "tests") for path in ROOT.glob("tests/*/**/test_*.py")
    }
    of_rooms = {folder for folder in folders if folder.parts[0] in rooms}
    assert len(of_rooms) > 30
    assert {f for f in of_rooms if not (ROOT / "src" / "ridgeline" / f).is_dir()} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_a_document_names_exist(path: Path) -> None:
    named = re.findall(r"(?:\w+/)*test_\w+\.py", path.read_text())
    paths = [ROOT / "tests" / name.rpartition("tests/")[2] for name in named]
    assert [path for path in paths if not path.exists()] == []


def test_decisions_that_are_named_have_a_page_and_pages_are_few() -> None:
    pages = {int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert len(pages) <= 40
    named = {}
    for path in [*DOCUMENTS, *(ROOT / "src").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        # A page's status says which numbers it took over.
        text = re.sub(r"^Status:.*?\n\n", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        named |= {int(number): path for number in re.findall(r"\bADR\s+(\d+)", text)}
        named |= {int(number): path for number in re.findall(r"\badr/(\d{4})", text)}
    assert len(named) > 20
    assert {number: path for number, path in named.items() if number not in pages} == {}


# Sentences that a native reader stumbles over: "so many tokens" for an argument, free relatives
# ("whoever asks", "what nobody reads"), and "knows no X" for "knows nothing of X".
STUMBLES = re.compile(
    r"\bso many(?:th)?\b|\b(?:whoever|somebody)\b|\b(?:what|that) nobody\b"
    r"|\b(?:it|module) knows no\b",
    re.IGNORECASE,
)


def test_the_program_is_written_in_plain_english() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        words = re.sub(r"\s+(?:# )?", " ", path.read_text())
        assert not STUMBLES.findall(words), path
