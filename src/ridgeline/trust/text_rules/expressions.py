"""A small language of regular expressions, as a nondeterministic automaton over symbols.

Literals, classes, ``.``, groups, ``|`` and the repetitions ``*``, ``+``, ``?`` and ``{m,n}``. What
an automaton cannot decide while it reads once is refused: looking around, references to groups,
anchors. The construction is Thompson's (1968).

A literal is read in all its spellings (``folding``), as what looks like it (``look_alikes``), and
with marks around it that do not change it; a space is read as any gap. Letters match their other
case.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from ridgeline.trust.text_rules import folding, look_alikes

_MOST_REPEATED = 1_000
_MOST_NODES = 200_000  # of all patterns together: some 50 MB
_DEEPEST = 50  # groups in groups
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class ExpressionError(ValueError):
    """A pattern that cannot be used, and why."""


class Nfa:
    """Nodes with two kinds of arcs: free ones, and ones that read a symbol of a class.

    Attributes:
        free: by node, the nodes that are reached without reading.
        reading: by node, the numbers of the classes that it reads, and the nodes behind them.
        ends: the number of the expression that is complete at a node.
        owner: by node, the number of its expression.
    """

    def __init__(self) -> None:
        """Begin without expressions."""
        self.free: list[list[int]] = []
        self.reading: list[list[tuple[int, int]]] = []
        self.ends: dict[int, int] = {}
        self.owner: list[int] = []
        self._number = 0
        self._classes: dict[re.Pattern[str], int] = {}
        self._having: dict[str, frozenset[int]] = {}

    def having(self, symbol: str) -> frozenset[int]:
        """Return the numbers of the classes that have a symbol, once all expressions are added."""
        numbers = self._having.get(symbol)
        if numbers is None:
            classes = self._classes.items()
            numbers = frozenset(number for one, number in classes if one.match(symbol))
            self._having[symbol] = numbers
        return numbers

    def add(self, expression: str, number: int) -> int:
        """Add an expression under a number; return the node that it begins at.

        Raises ExpressionError.
        """
        self._number = number
        plain = unicodedata.normalize("NFC", expression)  # a letter with its marks is one literal
        begin, end = _ExpressionParser(plain, self).parsed()
        self.ends[end] = number
        if end in self.reached([begin]):
            raise ExpressionError(f"{expression!r:.80} matches the empty text")
        return begin

    def node(self) -> int:
        """Return a new node. Raises ExpressionError if there are too many."""
        if len(self.free) >= _MOST_NODES:
            raise ExpressionError(
                f"the patterns together are too large (over {_MOST_NODES} states)"
            )
        self.free.append([])
        self.reading.append([])
        self.owner.append(self._number)
        return len(self.free) - 1

    def reads(self, begin: int, characters: str, end: int) -> None:
        """Let a class, as ``re`` writes it, lead to another node. Raises ExpressionError."""
        arc = self._classes.setdefault(_compiled(characters), len(self._classes)), end
        if arc not in self.reading[begin]:
            self.reading[begin].append(arc)

    def reads_class(self, begin: int, characters: str, end: int) -> None:
        """Do the same with a class of an expression, whose letters may have marks of their own."""
        self.reads(begin, characters, end)
        self.reads(end, folding.all_marks(), end)
        if bases := _bases_in(characters):
            base = self.node()
            self.reads(begin, bases, base)
            self.reads(base, folding.all_marks(), end)
        if others := look_alikes.like_class(characters):
            self.reads(begin, others, end)
        for char in sorted(set(characters)):
            if len(folding.folded(char)) > 1 and _compiled(characters).match(char):
                self.reads_literal(begin, char, end)

    def reads_literal(self, begin: int, char: str, end: int) -> None:
        """Let one character, however it is written, lead to another node."""
        for symbols in folding.spellings(char):
            at, letter = begin, ""
            for i, symbol in enumerate(symbols, start=1):
                to = end if i == len(symbols) else self.node()
                letter = folding.joined(letter, symbol)
                self.reads(at, look_alikes.like(symbol), to)
                self.reads(to, folding.marks_around(letter), to)
                at = to
            if not symbols:  # a mark that a text need not have
                self.free[begin].append(end)

    def reached(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return these nodes and all that are reached from them without reading."""
        closure = set(nodes)
        unread = list(closure)
        while unread:
            news = set(self.free[unread.pop()]) - closure
            closure |= news
            unread += news
        return frozenset(closure)


@lru_cache(maxsize=10_000)
def _compiled(characters: str) -> re.Pattern[str]:
    try:
        return re.compile(characters, re.DOTALL | re.IGNORECASE)
    except (re.error, OverflowError) as error:
        raise ExpressionError(f"{characters!r:.80} is no class of characters: {error}") from None


@lru_cache(maxsize=10_000)
def _bases_in(characters: str) -> str:
    """Return a class of letters that are not in one, unless with a mark; none if there are none."""
    match = _compiled(characters).match
    bases = {folding.base_of(one): None for one in folding.accented() if match(one)}
    outside = "".join(re.escape(base) for base in bases if not match(base))
    return f"[{outside}]" if outside else ""


class _ExpressionParser:
    """Reads one expression into an automaton."""

    def __init__(self, text: str, nfa: Nfa) -> None:
        self._text, self._nfa, self._at, self._depth = text, nfa, 0, 0

    def parsed(self) -> tuple[int, int]:
        begin, end = self._either()
        if self._at < len(self._text):
            raise self._wrong("it has a ) without a (")
        return begin, end

    def _wrong(self, why: str) -> ExpressionError:
        return ExpressionError(f"the pattern {self._text!r:.80} cannot be used: {why}")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, char: str) -> bool:
        is_next = self._next() == char
        self._at += is_next
        return is_next

    def _either(self) -> tuple[int, int]:
        begin, end = self._sequence()
        while self._takes("|"):
            first, last = self._sequence()
            fork = self._nfa.node()
            self._nfa.free[fork] += [begin, first]
            self._nfa.free[last].append(end)
            begin = fork
        return begin, end

    def _sequence(self) -> tuple[int, int]:
        begin = end = self._nfa.node()
        while self._next() not in ("", "|", ")"):
            first, last = self._repeated()
            self._nfa.free[end].append(first)
            end = last
        final = self._nfa.node()  # of its own: alternatives lead to it
        self._nfa.free[end].append(final)
        return begin, final

    def _repeated(self) -> tuple[int, int]:
        start = self._at
        begin, end = self._atom()
        stop = self._at
        while (char := self._next()) and char in "*+?{":
            least, most = self._counts()
            self._takes("?")  # as few as possible: the longest match counts anyway
            after = self._at
            begin, end = self._copies((start, stop), (begin, end), least, most)
            self._at = stop = after
        return begin, end

    def _counts(self) -> tuple[int, int | None]:
        char = self._next()
        if char != "{":
            self._at += 1
            return _REPEATS[char]
        match = re.compile(r"\{(\d+)(,?)(\d*)\}").match(self._text, self._at)
        if match is None:
            raise self._wrong("write { as \\{, or a count such as {2}, {2,} or {2,5}")
        self._at = match.end()
        numbers = [match[1], match[3] or match[1]]
        if max(map(len, numbers)) > 5 or max(map(int, numbers)) > _MOST_REPEATED:
            raise self._wrong(f"it repeats more than {_MOST_REPEATED} times")
        least, most = map(int, numbers)
        if most < least:
            raise self._wrong(f"{match[0]} has its numbers in the wrong order")
        return least, None if match[2] and not match[3] else most

    def _copies(
        self, source: tuple[int, int], first: tuple[int, int], least: int, most: int | None
    ) -> tuple[int, int]:
        """Repeat what stands in a part of the text; ``first`` is the copy that there is."""
        nfa = self._nfa
        begin = end = nfa.node()
        final = nfa.node()
        copies = 1
        part = first

        def copy() -> tuple[int, int]:
            nonlocal copies, part
            if copies > 1:
                self._at, inner = source[0], _ExpressionParser(self._text[: source[1]], nfa)
                inner._at, inner._depth = source[0], self._depth
                part = inner._repeated()
            copies += 1
            return part

        for _ in range(least):
            one, last = copy()
            nfa.free[end].append(one)
            end = last
        if most is None:
            one, last = copy()
            loop = nfa.node()
            nfa.free[end].append(loop)
            nfa.free[loop] += [one, final]
            nfa.free[last].append(loop)
            return begin, final
        for _ in range(most - least):
            nfa.free[end].append(final)
            one, last = copy()
            nfa.free[end].append(one)
            end = last
        nfa.free[end].append(final)
        return begin, final

    def _atom(self) -> tuple[int, int]:
        char = self._next()
        self._at += 1
        if char == "(":
            return self._group()
        if char in "*+?{":
            raise self._wrong(f"nothing stands before {char}")
        if char in "^$":
            raise self._wrong(f"it has the anchor {char}; word = true looks at what is beside it")
        begin, end = self._nfa.node(), self._nfa.node()
        if char == "\\" and not (self._next().isalnum() or self._next() == ""):
            char, self._at = self._next(), self._at + 1
        elif char in ".[\\":
            self._nfa.reads_class(begin, self._class(char), end)
            return begin, end
        if char.isspace():
            self._nfa.reads(begin, r"\s", end)
            self._nfa.reads(end, r"\s", end)
            self._nfa.reads(end, folding.marks_around(" "), end)
        else:
            self._nfa.reads_literal(begin, char, end)
        return begin, end

    def _group(self) -> tuple[int, int]:
        if self._text.startswith("?:", self._at):
            self._at += 2
        elif self._next() == "?":
            raise self._wrong(f"({self._text[self._at : self._at + 3]} is not supported")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._wrong(f"it has more than {_DEEPEST} groups in each other")
        begin, end = self._either()
        self._depth -= 1
        if not self._takes(")"):
            raise self._wrong("it has a ( without a )")
        return begin, end

    def _class(self, char: str) -> str:
        """Return a class as ``re`` writes it, whose first character was read."""
        if char == ".":
            return "."
        if char == "\\":
            name = self._next()
            self._at += 1
            if name in "bBAZ" or name.isdigit():
                raise self._wrong(f"\\{name} is not supported")
            return f"\\{name}"
        match = re.compile(r"\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(self._text, self._at)
        if match is None:
            raise self._wrong("it has a [ without a ]")
        self._at = match.end()
        return f"[{match[0]}"
