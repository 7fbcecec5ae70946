"""All patterns of a set of rules in one automaton, and the matches in a text that comes in pieces.

Matches are the leftmost, and of these the longest, as if the whole text were there: how it is cut
into pieces changes nothing. What may still become a match is held back. Nothing here knows what a
rule does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.trust.text_rules.expressions import ExpressionError, Nfa
from ridgeline.trust.text_rules.folding import folded, kind_of, units

_MOST_MOVES = 200_000  # of a cache, which then begins anew
_MOST_STATES = 5_000  # that texts may make of matches that have begun together
_MOST_MATCH = 16_384  # characters that a match may have at most
_LONG = 48  # characters: what holds back more is not read by pieces
_DEAD = 0
_EMPHASIS = "*~`"  # of Markdown: bold, struck out, code
_NO_EMPHASIS = str.maketrans("", "", _EMPHASIS)

States = tuple[int, ...]
WORD = "a1m"  # what stands beside no whole word (``folding.kind_of``)


class TextPattern(NamedTuple):
    """What is looked for.

    Attributes:
        expression: in the language of ``expressions``.
        apart: the kinds of characters (``folding.kind_of``) that may not stand beside a match.
        most: characters that a match may have, without invisible ones.
        check: what a match must pass too, such as a check digit.
    """

    expression: str
    apart: str = WORD
    most: int = 256
    check: Callable[[str], bool] | None = None


class Hit(NamedTuple):
    """A match: of which pattern, and its text."""

    pattern: int
    text: str


class Move(NamedTuple):
    """What a piece of text does to matches that have begun.

    Attributes:
        survivors: the indices of those that go on.
        begun: where in ``units`` others begin.
        states: of all, those that go on first.
        units: of the text (``folding.units``).
    """

    survivors: list[int]
    begun: list[int]
    states: States
    units: list[str]


class Patterns:
    """Patterns as one deterministic automaton, whose states are made when a text needs them.

    Invisible characters and Markdown's emphasis are passed over inside a match; others are read as
    symbols (``folding``), so full-width digits are digits.

    Attributes:
        all: the patterns; the first of several that match the same text counts.
    """

    def __init__(self, patterns: Sequence[TextPattern]) -> None:
        """Compile the patterns. Raises ExpressionError."""
        if not patterns:
            raise ExpressionError("there is no pattern")
        self.all = tuple(patterns)
        for one in patterns:
            if not 1 <= one.most <= _MOST_MATCH:
                raise ExpressionError(
                    f"most is {one.most}: a match has 1 to {_MOST_MATCH} characters"
                )
        self._nfa = nfa = Nfa()
        begins = [nfa.add(one.expression, i) for i, one in enumerate(patterns)]
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []
        self.accepts: list[tuple[int, ...]] = []  # by state: the patterns that are complete
        self.longest: list[int] = []  # characters that a match may have which is in this state
        self._number(frozenset())
        # What matches begin with behind a character of each kind.
        self.begins = {
            kind: self._number(
                nfa.reached(
                    node
                    for node, one in zip(begins, patterns, strict=True)
                    if not kind or kind not in one.apart
                )
            )
            for kind in ("", *WORD)
        }
        self.next: dict[tuple[int, str], int] = {}
        self.moves: dict[tuple[States, str, str], Move | None] = {}
        self.least = min(one.most for one in patterns)
        self.most = max(one.most for one in patterns)
        self._passes: dict[tuple[tuple[int, str], str], tuple[int, str] | None] = {}

    def _number(self, nodes: frozenset[int]) -> int:
        """Return the state of a set of nodes."""
        number = self._numbers.get(nodes)
        if number is None:
            number = self._numbers[nodes] = len(self._sets)
            self._sets.append(nodes)
            ends = self._nfa.ends
            self.accepts.append(tuple(sorted({ends[node] for node in nodes if node in ends})))
            owners = {self._nfa.owner[node] for node in nodes if self._nfa.reading[node]}
            self.longest.append(max((self.all[i].most for i in owners), default=0))
        return number

    def step(self, state: int, char: str) -> int:
        """Return the state behind a character."""
        key = state, char
        to = self.next.get(key)
        if to is None:
            if len(self.next) > _MOST_MOVES:
                self.next.clear()
            to = state
            for one in folded(char):
                arcs = (arc for node in self._sets[to] for arc in self._nfa.reading[node])
                having = self._nfa.having(one)
                reached = {node for number, node in arcs if number in having}
                reached_all = self._nfa.reached(reached)
                if one in _EMPHASIS and to not in self.begins.values():
                    reached_all |= self._sets[to] - self._nfa.ends.keys()
                to = self._number(reached_all)
            self.next[key] = to
        return to

    def may_match(self, text: str) -> bool:
        """Whether a whole text may have a match: one pass, and no closer look; False is certain."""
        at: tuple[int, str] | None = (_DEAD, "")
        for char in text:
            assert at is not None
            key = at, char
            at = self._passes[key] if key in self._passes else self._passed(*key)
            if at is None:
                return True
        return False

    def _passed(self, at: tuple[int, str], char: str) -> tuple[int, str] | None:
        """Return where a pass is behind a character; None if a match may be complete.

        That is the state of all matches that have begun, and the kind of the character.
        """
        state, kind = at
        if folded(char):  # none begins with an invisible character
            begun = self._sets[self.step(self.begins[kind], char)]
            nodes = self._sets[self.step(state, char)] | begun
            if nodes not in self._numbers and len(self._sets) > _MOST_STATES:
                return None
            state = self._number(nodes)
        if len(self._passes) > _MOST_MOVES:
            self._passes.clear()
        behind = None if self.accepts[state] else (state, kind_of(char))
        self._passes[at, char] = behind
        return behind

    def move(self, states: States, kind: str, text: str) -> Move | None:
        """Return what a piece of text does to matches that have begun, where none is complete.

        ``kind`` is that of the character before. None is where a match is complete on the way,
        which needs a closer look.
        """
        key = states, kind, text
        if key in self.moves:
            return self.moves[key]
        if len(self.moves) > _MOST_MOVES:
            self.moves.clear()
        move = self.moves[key] = self._moved(states, kind, units(text))
        return move

    def _moved(self, states: States, kind: str, read: list[str]) -> Move | None:
        ends: list[int] = []
        survivors, begun = list[int](), list[int]()
        for i, state in enumerate(states):
            end = self._run(state, read)
            if end is None:
                return None
            if end != _DEAD:
                survivors.append(i)
                ends.append(end)
        for i, unit in enumerate(read):
            if folded(unit[0]):
                end = self._run(self.begins[kind], read[i:])
                if end is None:
                    return None
                if end != _DEAD:
                    begun.append(i)
                    ends.append(end)
            kind = kind_of(unit[-1])
        return Move(survivors, begun, tuple(ends), read)

    def _run(self, state: int, read: list[str]) -> int | None:
        """Return the state behind units, None if a match is complete on the way."""
        for unit in read:
            state = self.step(state, unit[0])
            if state == _DEAD or self.accepts[state]:
                return None if state else _DEAD
        return state


@dataclass(slots=True)
class _Match:
    """A match that has begun: where, how far it was read, and where it could end.

    Attributes:
        path: the states before each unit that was read.
    """

    start: int
    at: int
    state: int
    ends: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    path: list[int] = field(default_factory=list)

    def move(self, by: int) -> None:
        """Count places from where the text begins now."""
        self.ends = [(end - by, complete) for end, complete in self.ends]
        self.start, self.at = self.start - by, self.at - by

    def joins(self, other: _Match) -> bool:
        """Go on as another one, if that was in the same state here; return whether it was."""
        place = self.at - other.start
        if self.at >= other.at or other.path[place] != self.state:
            return False
        self.path += other.path[place:]
        self.ends += [one for one in other.ends if one[0] > self.at]
        self.at, self.state = other.at, other.state
        return True


class Scanner:
    """Finds the matches in one text that grows.

    Attributes:
        before: the character before what is pending, if any.
    """

    def __init__(self, patterns: Patterns, pending: str = "", before: str = "") -> None:
        """Begin before the first character, or where another scanner stands."""
        self._patterns = patterns
        self._units, self.before = units(pending), before
        self._starts: list[int] = []  # where in ``_units`` matches have begun
        self._states: States | None = None if pending else ()  # of these; None if not known
        self._from = 0  # then: where to look on
        self._open: _Match | None = None  # and what begins there
        self._last: _Match | None = None  # what began before it, and is none

    @property
    def pending(self) -> str:
        """The end of the text, of which nothing is known yet."""
        return "".join(self._units)

    def feed(self, text: str, *, is_end: bool = False) -> list[str | Hit]:
        """Take more text; return what became known, in order: text without matches, and matches.

        With ``is_end`` no text follows, so nothing is held back.
        """
        states, units = self._states, self._units
        if states is None or is_end or len(units) + len(text) >= self._patterns.least:
            return self._look(text, is_end=is_end)
        move = self._patterns.move(states, self._kind_before(len(units)), text)
        if move is None:
            return self._look(text, is_end=is_end)
        starts = [self._starts[i] for i in move.survivors]
        if move.begun:
            size = len(units)
            starts += [size + i for i in move.begun]
        self._starts, self._states = starts, move.states
        self._append(move.units)
        cut = self._starts[0] if self._starts else len(units)
        return [self._cut(cut)] if cut else []

    def may_complete(self, text: str) -> bool:
        """Whether a text, if it came now, may complete a match; False is certain."""
        if self._states is None:
            return True
        kind = self._kind_before(len(self._units))
        return self._patterns.move(self._states, kind, text) is None

    def _kind_before(self, place: int) -> str:
        """Return the kind of the character before a place in what is pending."""
        last = self._units[place - 1][-1] if place else self.before
        return kind_of(last) if last else ""

    def _append(self, read: list[str]) -> None:
        """Hold more units; invisible characters alone belong to what is pending before them."""
        if self._units and read and not folded(read[0][0]):
            self._units[-1] += read[0]
            self._starts = [max(0, start - (start >= len(self._units))) for start in self._starts]
            read = read[1:]
        self._units += read

    def _cut(self, size: int) -> str:
        """Return the first of what is pending, this many units, which are known now."""
        text = "".join(self._units[:size])
        del self._units[:size]
        self.before = text[-1]
        if self._starts:
            self._starts = [start - size for start in self._starts]
        if self._open:
            self._open.move(size)
        if self._last:
            self._last.move(size)
        self._from = max(0, self._from - size)
        return text

    def _look(self, text: str, *, is_end: bool) -> list[str | Hit]:
        """Do what ``feed`` does, unit by unit."""
        if self._states is not None:
            self._from, self._open = (self._starts or [len(self._units)])[0], None
            self._last = None
        self._states, self._starts = None, []
        self._append(units(text))
        news: list[str | Hit] = []
        while match := self._search(is_end):
            start, end, pattern = match
            if start:
                news.append(self._cut(start))
            news.append(Hit(pattern, self._cut(end - start)))
            self._from, self._open, self._last = 0, None, None
        if self._from:
            news.append(self._cut(self._from))
        self._remember()
        return news

    def _remember(self) -> None:
        """Find all places where a match may have begun, so that the next piece goes by ``move``."""
        pending = self.pending
        if len(pending) > _LONG:
            return
        move = self._patterns.move((), self._kind_before(0), pending)
        if move is not None:
            _, self._starts, self._states, _ = move
            self._open = None

    def _search(self, is_end: bool) -> tuple[int, int, int] | None:
        """Return the next match that is certain: start, end and pattern.

        Without one, ``_from`` is where the first begins that may become one.
        """
        units, patterns = self._units, self._patterns
        while self._from < len(units):
            start = self._from
            run = self._open
            if run is None and folded(units[start][0]):
                run = _Match(start, start, patterns.begins[self._kind_before(start)])
            if run is not None:
                self._read(run)
                if not is_end and self._may_grow(run):
                    self._open = run
                    return None
                if match := self._ended(run, is_end):
                    return match if match[1] else None
                self._last = run
            self._from, self._open = start + 1, None
        return None

    def _read(self, run: _Match) -> None:
        """Read on; what is as far as an earlier one was need not be read again."""
        patterns, units, last = self._patterns, self._units, self._last
        while run.at < len(units) and run.at - run.start < patterns.longest[run.state]:
            if last and run.joins(last):
                last = None
                continue
            run.path.append(run.state)
            run.state = patterns.step(run.state, units[run.at][0])
            run.at += 1
            if complete := patterns.accepts[run.state]:
                run.ends.append((run.at, complete))

    def _may_grow(self, run: _Match) -> bool:
        return run.at == len(self._units) and run.at - run.start < self._patterns.longest[run.state]

    def _ended(self, run: _Match, is_end: bool) -> tuple[int, int, int] | None:
        """Return the longest match of a run that can grow no more; its end is 0 if not known yet.

        That is so where the next character could be a part of the match's last one, or of a word.
        """
        units, start = self._units, run.start
        for end, complete in reversed(run.ends):
            for i in complete:
                pattern = self._patterns.all[i]
                if end - start > pattern.most:
                    continue
                if end == len(units) and not is_end:
                    self._open = run
                    return start, 0, i
                # Behind an invisible character nothing stands beside the match.
                beside = (
                    kind_of(units[end][0]) if end < len(units) and len(units[end - 1]) == 1 else ""
                )
                if beside and (beside == "m" or beside in pattern.apart):
                    continue
                match = "".join(units[start:end])
                if pattern.check is None or pattern.check(match.translate(_NO_EMPHASIS)):
                    return start, end, i
        return None
