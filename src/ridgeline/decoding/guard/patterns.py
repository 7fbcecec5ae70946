"""All patterns of a set of rules in one automaton, and the matches in a text that comes in pieces.

Matches are the leftmost, and of these the longest, as if the whole text were there: how it is cut
into pieces changes nothing. What may still become a match is held back. Nothing here knows what a
rule does.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.decoding.guard.expressions import ExpressionError, Nfa

_MOST_MOVES = 200_000  # of a cache, which then begins anew
_MOST_STATES = 5_000  # that texts may make of matches that have begun together
_MOST_MATCH = 4_096  # characters that a match may have at most
_LONG = 48  # characters: what holds back more is not read by pieces
_DEAD = 0

States = tuple[int, ...]


class TextPattern(NamedTuple):
    """What is looked for.

    Attributes:
        expression: in the language of ``expressions``.
        is_word: whether neither a letter nor a digit nor _ may stand beside a match.
        most: characters that a match may have.
        check: what a match must pass too, such as a check digit.
    """

    expression: str
    is_word: bool = True
    most: int = 256
    check: Callable[[str], bool] | None = None


class Hit(NamedTuple):
    """A match: of which pattern, and its text."""

    pattern: int
    text: str


class Patterns:
    """Patterns as one deterministic automaton, whose states are made when a text needs them.

    Characters of Unicode's category Cf, which nobody sees, are passed over inside a match; others
    count as their compatibility form (NFKC), so full-width digits are digits.

    Attributes:
        all: the patterns; the first of several that match the same text counts.
    """

    def __init__(self, patterns: Sequence[TextPattern], *, ignores_case: bool = True) -> None:
        """Compile the patterns. Raises ExpressionError."""
        if not patterns:
            raise ExpressionError("there is no pattern")
        self.all = tuple(patterns)
        for one in patterns:
            if not 1 <= one.most <= _MOST_MATCH:
                raise ExpressionError(
                    f"most is {one.most}: a match has 1 to {_MOST_MATCH} characters"
                )
        self._nfa = nfa = Nfa(ignores_case=ignores_case)
        begins = [nfa.add(one.expression, i) for i, one in enumerate(patterns)]
        inside = [node for node, one in zip(begins, patterns, strict=True) if not one.is_word]
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []
        self.accepts: list[tuple[int, ...]] = []  # by state: the patterns that are complete
        self.longest: list[int] = []  # characters that a match may have which is in this state
        self._number(frozenset())
        # Where a match may begin: anywhere, or behind a letter.
        self.begins = self._number(nfa.reached(begins)), self._number(nfa.reached(inside))
        self.next: dict[tuple[int, str], int] = {}
        self.moves: dict[tuple[States, bool, str], tuple[list[int], list[int], States] | None] = {}
        self.least = min(one.most for one in patterns)
        self.most = max(one.most for one in patterns)
        self._folded: dict[str, str] = {}
        self._passes: dict[tuple[tuple[int, bool], str], tuple[int, bool] | None] = {}

    def _number(self, nodes: frozenset[int]) -> int:
        """Return the state of a set of nodes."""
        known = self._numbers.get(nodes)
        if known is None:
            known = self._numbers[nodes] = len(self._sets)
            self._sets.append(nodes)
            ends = self._nfa.ends
            self.accepts.append(tuple(sorted({ends[node] for node in nodes if node in ends})))
            owners = {self._nfa.owner[node] for node in nodes if self._nfa.reading[node]}
            self.longest.append(max((self.all[i].most for i in owners), default=0))
        return known

    def folded(self, char: str) -> str:
        """Return the characters as which one counts, none if nobody sees it."""
        known = self._folded.get(char)
        if known is None:
            is_seen = unicodedata.category(char) != "Cf"
            known = unicodedata.normalize("NFKC", char) if is_seen else ""
            self._folded[char] = known
        return known

    def step(self, state: int, char: str) -> int:
        """Return the state behind a character."""
        key = state, char
        to = self.next.get(key)
        if to is None:
            if len(self.next) > _MOST_MOVES:
                self.next.clear()
            to = state
            for one in self.folded(char):
                arcs = (arc for node in self._sets[to] for arc in self._nfa.reading[node])
                reached = {node for characters, node in arcs if characters.match(one)}
                to = self._number(self._nfa.reached(reached))
            self.next[key] = to
        return to

    def may_match(self, text: str) -> bool:
        """Whether a whole text may have a match: one pass, and no closer look; False is certain."""
        at: tuple[int, bool] | None = (_DEAD, False)
        for char in text:
            assert at is not None
            key = at, char
            at = self._passes[key] if key in self._passes else self._passed(*key)
            if at is None:
                return True
        return False

    def _passed(self, at: tuple[int, bool], char: str) -> tuple[int, bool] | None:
        """Return where a pass is behind a character; None if a match may be complete.

        That is the state of all matches that have begun, and whether a letter was read last.
        """
        state, after_word = at
        if self.folded(char):  # none begins with an invisible character
            begun = self._sets[self.step(self.begins[after_word], char)]
            nodes = self._sets[self.step(state, char)] | begun
            if nodes not in self._numbers and len(self._sets) > _MOST_STATES:
                return None
            state = self._number(nodes)
        if len(self._passes) > _MOST_MOVES:
            self._passes.clear()
        found = None if self.accepts[state] else (state, is_word(char))
        self._passes[at, char] = found
        return found

    def move(
        self, states: States, after_word: bool, text: str
    ) -> tuple[list[int], list[int], States] | None:
        """Return what a piece of text does to matches that have begun, where none is complete.

        Returns the indices of those that go on, the places in ``text`` where others begin, and the
        states of all; None where a match is complete on the way, which needs a closer look.
        """
        key = states, after_word, text
        if key in self.moves:
            return self.moves[key]
        if len(self.moves) > _MOST_MOVES:
            self.moves.clear()
        found = self.moves[key] = self._moved(states, after_word, text)
        return found

    def _moved(
        self, states: States, after_word: bool, text: str
    ) -> tuple[list[int], list[int], States] | None:
        ends: list[int] = []
        kept, begun = list[int](), list[int]()
        for i, state in enumerate(states):
            end = self._run(state, text)
            if end is None:
                return None
            if end != _DEAD:
                kept.append(i)
                ends.append(end)
        for i, char in enumerate(text):
            is_inside = is_word(text[i - 1]) if i else after_word
            if self.folded(char):
                end = self._run(self.begins[is_inside], text[i:])
                if end is None:
                    return None
                if end != _DEAD:
                    begun.append(i)
                    ends.append(end)
        return kept, begun, tuple(ends)

    def _run(self, state: int, text: str) -> int | None:
        """Return the state behind a text, None if a match is complete on the way."""
        for char in text:
            state = self.step(state, char)
            if state == _DEAD or self.accepts[state]:
                return None if state else _DEAD
        return state


@dataclass(slots=True)
class _Match:
    """A match that has begun: where, how far it was read, and where it could end."""

    start: int
    at: int
    state: int
    ends: list[tuple[int, tuple[int, ...]]]

    def moved(self, by: int) -> _Match:
        ends = [(end - by, complete) for end, complete in self.ends]
        return _Match(self.start - by, self.at - by, self.state, ends)


class Scanner:
    """Finds the matches in one text that grows.

    Attributes:
        held: the end of the text, of which nothing is known yet.
        before: the character before that, if any.
    """

    def __init__(self, patterns: Patterns, held: str = "", before: str = "") -> None:
        """Begin before the first character, or where another scanner stands."""
        self._patterns = patterns
        self.held, self.before = held, before
        self._starts: list[int] = []  # where in ``held`` matches have begun
        self._states: States | None = None if held else ()  # of these; None if they are not known
        self._from = 0  # then: where to look on
        self._open: _Match | None = None  # and what begins there

    def feed(self, text: str, *, is_end: bool = False) -> list[str | Hit]:
        """Take more text; return what became known, in order: text without matches, and matches.

        With ``is_end`` no text follows, so nothing is held back.
        """
        patterns, states, held = self._patterns, self._states, self.held
        if states is None or is_end or len(held) + len(text) >= patterns.least:
            return self._look(text, is_end=is_end)
        last = held[-1:] or self.before
        move = patterns.move(states, is_word(last), text)
        if move is None:
            return self._look(text, is_end=is_end)
        kept, begun, self._states = move
        starts = [self._starts[i] for i in kept]
        if begun:
            size = len(held)
            starts += [size + i for i in begun]
        held += text
        cut = starts[0] if starts else len(held)
        self._starts, self.held = starts, held
        return [self._cut(cut)] if cut else []

    def _cut(self, size: int) -> str:
        """Return the first characters of what is held, which are known now."""
        known, self.held = self.held[:size], self.held[size:]
        self.before = known[-1]
        if self._starts:
            self._starts = [start - size for start in self._starts]
        if self._open:
            self._open = self._open.moved(size)
        self._from = max(0, self._from - size)
        return known

    def _look(self, text: str, *, is_end: bool) -> list[str | Hit]:
        """Do what ``feed`` does, character by character."""
        if self._states is not None:
            self._from, self._open = (self._starts or [len(self.held)])[0], None
        self._states, self._starts = None, []
        self.held += text
        news: list[str | Hit] = []
        while found := self._search(is_end):
            start, end, pattern = found
            if start:
                news.append(self._cut(start))
            news.append(Hit(pattern, self._cut(end - start)))
            self._from, self._open = 0, None
        if self._from:
            news.append(self._cut(self._from))
        self._remember()
        return news

    def _remember(self) -> None:
        """Find all places where a match may have begun, so that the next piece goes by ``move``."""
        if len(self.held) > _LONG:
            return
        move = self._patterns.move((), is_word(self.before), self.held)
        if move is not None:
            _, self._starts, self._states = move
            self._open = None

    def _search(self, is_end: bool) -> tuple[int, int, int] | None:
        """Return the next match that is certain: start, end and pattern.

        Without one, ``_from`` is where the first begins that may become one.
        """
        held, patterns = self.held, self._patterns
        while self._from < len(held):
            start = self._from
            run = self._open
            if run is None and patterns.folded(held[start]):
                is_inside = is_word(held[start - 1] if start else self.before)
                run = _Match(start, start, patterns.begins[is_inside], [])
            if run is not None:
                self._read(run)
                if not is_end and self._may_grow(run):
                    self._open = run
                    return None
                if found := self._ended(run, is_end):
                    return found if found[1] else None
            self._from, self._open = start + 1, None
        return None

    def _read(self, run: _Match) -> None:
        patterns, held = self._patterns, self.held
        while run.at < len(held) and run.at - run.start < patterns.longest[run.state]:
            char = held[run.at]
            run.state = patterns.step(run.state, char)
            run.at += 1
            if (complete := patterns.accepts[run.state]) and patterns.folded(char):
                run.ends.append((run.at, complete))

    def _may_grow(self, run: _Match) -> bool:
        return run.at == len(self.held) and run.at - run.start < self._patterns.longest[run.state]

    def _ended(self, run: _Match, is_end: bool) -> tuple[int, int, int] | None:
        """Return the longest match of a run that can grow no more; its end is 0 if not known yet.

        That is so where the next character could make it part of a word.
        """
        held, start = self.held, run.start
        for end, complete in reversed(run.ends):
            for i in complete:
                pattern = self._patterns.all[i]
                if end - start > pattern.most:
                    continue
                if pattern.is_word and end == len(held) and not is_end:
                    self._open = run
                    return start, 0, i
                if pattern.is_word and end < len(held) and is_word(held[end]):
                    continue
                if pattern.check is None or pattern.check(held[start:end]):
                    return start, end, i
        return None


def is_word(char: str) -> bool:
    """Whether a character is a part of words; none is not."""
    return char.isalnum() or char == "_"
