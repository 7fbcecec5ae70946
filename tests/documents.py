"""Documents that show what a command prints: read, run again, compared, written anew.

An example is a block that begins with ``$ ridgeline``, or ``$ python`` and a program of docs/learn;
what it prints follows. Its pages each begin with one, the picture that it draws, and how far the
numbers may be off. Prose follows, more examples and pictures, and three exercises with answers.
``python -m tests.documents`` runs the commands of these pages and writes outputs and pictures anew,
but not those that measure; ``python -m tests.documents NUMBER ...`` those of some pages. The prose
is yours to correct.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LEARN = ROOT / "docs" / "learn"
RIDGELINE = Path(sys.executable).parent / "ridgeline"
INDENT = "    "
MAX_WIDTH = 116  # columns of what is printed: documents are 120 wide
MAX_SECONDS = 600
_CALCULATED = 0.05  # by what share numbers may move, where a formula says how long steps take
CUT = "\n..."  # at the end of an example: the rest is left out

EXAMPLE = re.compile(
    rf"^{INDENT}\$ (?P<command>(?:ridgeline|python) (?:.*\\\n)*.*)\n"
    rf"(?P<shown>(?:(?:{INDENT}(?!\$ ).*)?\n)*)",
    re.M,
)
PAGE = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n"
    rf"{EXAMPLE.pattern}"
    r"!\[[^]]+\]\((?P<picture>[\w-]+\.svg)\)\n\n"
    r"(?P<tolerance>Tolerance: (?:none|words only|\d+ %)\.) (?P<prose>[\s\S]*)\Z",
    re.M,
)
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
PICTURE = re.compile(r"!\[[^]]+\]\(([\w-]+\.svg)\)")
EXERCISE = re.compile(r"^\*\*(\d)\.\*\* ([\s\S]*?)(?=^\*\*\d\.\*\* |\Z)", re.M)
# In prose, not of a name (H100), of a link, of an example or of what is written as code.
NO_PROSE = re.compile(
    r"`[^`]*`|!?\[[^]]*\]\([^)]*\)|^#.*$|^\d+\. |^\*\*\d\.\*\*|^    .*$|<[^>]*>", re.M
)
OWN_NUMBER = re.compile(rf"(?<![\w.-])(?:{NUMBER.pattern})")
SUM = re.compile(
    r"({0})[^\d\n=]*? ([-+x/]) ({0})[^\d\n=]*? = ({0})".format(NUMBER.pattern)  # noqa: UP032
)


@dataclass(frozen=True)
class Example:
    """A command in a document, and what the document says that it prints.

    Attributes:
        command: as one types it.
        shown: its output; with ``...`` as the last line, only its beginning.
    """

    command: str
    shown: str

    @property
    def out(self) -> str | None:
        """The picture that the command draws."""
        found = re.search(r"out (\S+)\.svg|draw\.py (\S+)", self.command)
        return f"{found[1] or found[2]}.svg" if found else None


@dataclass(frozen=True)
class Page:
    """A page of docs/learn.

    Attributes:
        examples: commands and outputs; the first is what the page is about.
        tolerance: by what share a number of the first may differ; None: by any.
        pictures: the files of its pictures.
        prose: what follows the first, with the others.
    """

    examples: tuple[Example, ...]
    tolerance: float | None
    pictures: tuple[str, ...]
    prose: str

    def tolerance_of(self, example: Example) -> float | None:
        """Return that of an example; on a page that measures, the others calculate."""
        is_first = example is self.examples[0]
        return _CALCULATED if self.tolerance is None and not is_first else self.tolerance

    @property
    def exercises(self) -> list[str]:
        """The exercises, each with its answer."""
        _, _, text = self.prose.partition("## Exercises\n")
        return [found[2] for found in EXERCISE.finditer(text)]


def pages() -> list[Path]:
    """Return the pages of docs/learn, in their order."""
    return sorted(LEARN.glob("[0-9]*.md"))


def examples(text: str) -> list[Example]:
    """Return the examples of a document."""
    return [_example(found) for found in EXAMPLE.finditer(text)]


def _example(found: re.Match[str]) -> Example:
    lines = (line.removeprefix(INDENT) for line in found["shown"].splitlines())
    command = found["command"].replace("\\\n", " ")
    return Example(" ".join(command.split()), "\n".join(lines).rstrip())


def read_page(path: Path) -> Page:
    """Read a page. Raises ValueError if it has not the form of one."""
    found = PAGE.fullmatch(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path.name}: title, example, picture, tolerance, prose: one is missing")
    share = re.search(r"(\d+) %", found["tolerance"])
    tolerance = int(share[1]) / 100 if share else None if "words" in found["tolerance"] else 0.0
    first, prose = _example(found), found["prose"]
    pictures = (found["picture"], *PICTURE.findall(prose))
    return Page((first, *examples(prose)), tolerance, pictures, prose)


def run_example(example: Example, folder: Path) -> str:
    """Run a command in a ``folder`` with the files of docs/learn; return what it prints.

    Raises ValueError with what it says if it fails.
    """
    for path in LEARN.iterdir():
        if path.is_file() and path.suffix not in (".md", ".svg"):
            shutil.copy(path, folder)
    if example.command.startswith("python "):
        return _run_program(shlex.split(example.command)[1:], folder)
    done = subprocess.run(
        [str(RIDGELINE), *shlex.split(example.command)[1:]], cwd=folder, capture_output=True,
        text=True, encoding="utf-8", env=os.environ | {"COLUMNS": str(MAX_WIDTH)},
        timeout=MAX_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"{example.command}: {done.stderr[-1000:]}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def _run_program(arguments: list[str], folder: Path) -> str:
    """Run a program of docs/learn here, where what it imports is there already."""
    printed, argv, before = io.StringIO(), sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = arguments, [str(LEARN)]
    try:
        with chdir(folder), redirect_stdout(printed):
            runpy.run_path(str(LEARN / arguments[0]), run_name="__main__")
    except SystemExit as error:
        raise ValueError(f"{' '.join(arguments)}: {error}") from error
    finally:
        sys.argv, sys.path[:] = argv, before
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def as_shown(printed: str, shown: str) -> str:
    """Return what is printed, cut where ``shown`` is."""
    if not shown.endswith(CUT):
        return printed
    return "\n".join(printed.splitlines()[: shown.count("\n")]) + CUT


def differences(shown: str, printed: str, tolerance: float | None) -> list[str]:
    """Say where two texts differ in more than numbers within the tolerance, a line each."""
    shown, printed = shown.removesuffix(CUT), as_shown(printed, shown).removesuffix(CUT)
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    if tolerance is None:  # cells may be wrapped elsewhere, and a spread be too small to be shown
        words = [sorted(filter(re.compile("[A-Za-z]").search, each)) for each in words]
    if words[0] != words[1]:
        return [f"other words:\n{shown}\nare now\n{printed}"]
    if tolerance is None:
        return []
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return [
        f"{one} is now {other}"
        for one, other in pairs
        if abs(_value(one) - _value(other)) > tolerance * _value(one)
    ]


def words_of(svg: str) -> str:
    """Return the texts of a picture, a line each."""
    texts = (one for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("}text"))
    return "\n".join(one.text or "" for one in texts)


def unsupported(prose: str, sources: str) -> list[str]:
    """Return what prose says in digits that no source says, and sums that are wrong.

    ``A + B = C`` (or ``-``, ``x``, ``/``; units may stand between) counts as said if A and
    B are, and C is right to 1 %.
    """
    plain = NO_PROSE.sub(" ", prose)
    known = {_value(one) for one in NUMBER.findall(sources)}
    wrong = []
    for left, sign, right, result in SUM.findall(plain):
        one, other = _value(left), _value(right)
        results = {"+": one + other, "-": one - other, "x": one * other, "/": one / (other or 1)}
        value = results[sign]
        if abs(value - _value(result)) > 0.01 * abs(value):
            wrong.append(f"{left} {sign} {right} = {result}")
        known.add(_value(result))
    return wrong + [one for one in OWN_NUMBER.findall(plain) if _value(one) not in known]


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def write_anew(path: Path, *, is_measured: bool) -> None:
    """Run a page's commands; write their outputs into the page, and the pictures beside it.

    Those of the first are left as they are unless ``is_measured``, if the page measures.
    """
    page, text = read_page(path), path.read_text(encoding="utf-8")
    begins_at = 0 if is_measured or page.tolerance is not None else 1
    for number in range(begins_at, len(page.examples)):
        found = list(EXAMPLE.finditer(text))[number]
        example = _example(found)
        with tempfile.TemporaryDirectory() as folder:
            printed = as_shown(run_example(example, Path(folder)), example.shown)
            if example.out is not None:
                shutil.copy(Path(folder) / example.out, LEARN)
        lines = (f"{INDENT}{line}".rstrip() for line in printed.splitlines())
        begin, end = found.span("shown")
        text = text[:begin] + "\n".join(lines) + "\n\n" + text[end:]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in pages():
        is_named = str(int(each.name[:2])) in sys.argv[1:]
        if is_named or not sys.argv[1:]:
            print(each.name, flush=True)
            write_anew(each, is_measured=is_named)
