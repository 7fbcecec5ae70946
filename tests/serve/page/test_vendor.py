"""Libraries of others that the page has: as they were published, small, and no way out."""

from __future__ import annotations

import hashlib
import re
import tomllib
from importlib.resources import files
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from ridgeline.serve.page import FILES
from tests.serve.page.browser import keep, sees, texts

ROOT = Path(__file__).parents[3]
VENDOR = Path(str(files("ridgeline.serve"))) / "page" / "vendor"
CODE = """Text, \\(\\frac{1}{2}\\) and $a_1 * b * c_1$, of $5 and $6, \\$7, $HOME/$USER.

\\[
x = \\begin{pmatrix} a \\\\ b \\end{pmatrix}
- \\undefined
\\]

$$
x^2
- y
$$

$$\\href{javascript:window.hacked=1}{x}$$

```python
def f(x: int) -> str:
    return "<b>" + str(x)  # text
```

```unknownlanguage
def f
```
"""


def test_each_file_is_as_it_was_published() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(\w{64})` \|", (VENDOR / "README.md").read_text(), re.M)
    found = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*.*")}
    found = {name: path for name, path in found.items() if path.is_file() and name != "README.md"}
    assert dict(rows) == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()
    }


def test_each_library_is_in_the_documents_with_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    documents = (ROOT / "docs" / "dependencies.md").read_text()
    libraries = [path for path in VENDOR.iterdir() if path.is_dir()]
    assert len(libraries) == 4
    for library in libraries:
        name, _, version = library.name.rpartition("-")
        assert f"| {name} {version} |" in documents
        assert (library / "LICENSE").read_text()
    licences = [path for pattern in project["license-files"] for path in ROOT.glob(pattern)]
    assert {library / "LICENSE" for library in libraries} < set(licences)


def test_the_page_gives_away_no_more_than_before() -> None:
    for file in FILES.values():
        policy = file.headers["content-security-policy"]
        assert policy == "default-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    kept = {path for path, file in FILES.items() if "immutable" in file.headers["cache-control"]}
    assert kept == {path for path in FILES if path.startswith("/page/vendor/")}
    assert not any(path.endswith(("LICENSE", ".md")) for path in FILES)


def test_formulas_and_colours(page: Chrome) -> None:
    keep(page, {"title": "t", "messages": [{"role": "assistant", "content": CODE}]})
    sees(lambda: len(page.execute_script("return document.querySelectorAll('math')")) >= 3)
    script = "return [...document.querySelectorAll('p:first-child math')].map((e) => e.textContent)"
    assert page.execute_script(script) == ["12", "a1\u2217b\u2217c1"]
    [plain] = texts(page, ".body > p:first-child")
    assert plain.endswith("of $5 and $6, $7, $HOME/$USER.")
    shown = texts(page, ".formula.display")
    assert shown[0].startswith("\\[")  # \undefined cannot be read: the source
    assert "\u2212" in shown[1]  # a minus, no list
    assert page.execute_script("return window.hacked") is None
    assert page.find_elements(By.CSS_SELECTOR, "math a, math [href]") == []
    sees(lambda: texts(page, ".hl-keyword") == ["def", "return"])
    first, second = texts(page, ".body pre")
    assert first.splitlines() == CODE.split("```python\n")[1].split("\n```")[0].splitlines()
    assert (texts(page, ".hl-string"), second.strip()) == (['"<b>"'], "def f")
    script = "return performance.getEntriesByType('resource').map((one) => one.name)"
    origin = page.execute_script("return location.origin")
    assert {name.startswith(f"{origin}/") for name in page.execute_script(script)} == {True}
