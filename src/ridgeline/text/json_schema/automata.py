"""Comparing patterns: whether a string matches, and whether any string does."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ridgeline.text.json_schema import charsets
from ridgeline.text.json_schema.charsets import Ranges
from ridgeline.text.json_schema.patterns import Alt, Chars, Pattern, PatternError, Regex, Rep, Seq

_MOST_STATES = 4_000
_MOST_MOVES = 20_000  # of a search for a string


class _Automaton:
    """States of what matches a whole string: Thompson's construction."""

    def __init__(self, regex: Regex) -> None:
        """Build the automaton. Raises PatternError if it would be too large."""
        self.free: list[list[int]] = []  # moves that need no character
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.start, self.end = self._new(), self._new()
        self._add(regex, self.start, self.end)

    def _new(self) -> int:
        if len(self.free) >= _MOST_STATES:
            raise PatternError("it is too large")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def _add(self, regex: Regex, begin: int, end: int) -> None:
        if isinstance(regex, Chars):
            self.moves[begin].append((regex.chars, end))
        elif isinstance(regex, Seq):
            for part in regex.parts:
                behind = self._new()
                self._add(part, begin, behind)
                begin = behind
            self.free[begin].append(end)
        elif isinstance(regex, Alt):
            for option in regex.options:
                self._add(option, begin, end)
        else:
            assert isinstance(regex, Rep)
            for _ in range(regex.least):
                behind = self._new()
                self._add(regex.part, begin, behind)
                begin = behind
            if regex.most is None:
                loop = self._new()
                self.free[begin].append(loop)
                self._add(regex.part, loop, loop)
                begin = loop
            for _ in range((regex.most or 0) - regex.least):
                behind = self._new()
                self.free[begin].append(end)
                self._add(regex.part, begin, behind)
                begin = behind
            self.free[begin].append(end)

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """Return all states that need no character."""
        visited, todo = set(states), list(states)
        while todo:
            for state in self.free[todo.pop()]:
                if state not in visited:
                    visited.add(state)
                    todo.append(state)
        return frozenset(visited)

    def after(self, states: frozenset[int], point: int) -> frozenset[int]:
        """Return the states behind one character."""
        return self.closure(
            [
                to
                for state in states
                for chars, to in self.moves[state]
                if charsets.has(chars, point)
            ]
        )


@lru_cache(maxsize=256)
def _automaton(regex: Regex) -> _Automaton:
    return _Automaton(regex)


def matches(regex: Regex, text: str) -> bool:
    """Return whether the whole text matches. Raises PatternError if that takes too long."""
    automaton = _automaton(regex)
    states = automaton.closure([automaton.start])
    for num_moves, char in enumerate(text):
        if num_moves * len(automaton.free) > 50 * _MOST_MOVES:
            raise PatternError("it is too large")
        states = automaton.after(states, ord(char))
    return automaton.end in states


@lru_cache(maxsize=256)
def can_be(pattern: Pattern, least: int = 0, most: int | None = None) -> bool:
    """Return whether a string of ``least`` to ``most`` characters fits; yes if that takes long."""
    try:
        automata = [_automaton(one) for one in (*pattern.must, *pattern.must_not)]
    except PatternError:
        return True
    sets = [chars for one in automata for moves in one.moves for chars, _ in moves]
    points = list(charsets.samples(sets))
    cap = least if most is None else most + 1
    first = tuple(one.closure([one.start]) for one in automata)
    visited, todo, num_moves = {(first, 0)}, [(first, 0)], 0
    while todo:
        states, length = todo.pop()
        if length >= least and (most is None or length <= most):
            ends = [one.end in at for one, at in zip(automata, states, strict=True)]
            if all(ends[: len(pattern.must)]) and not any(ends[len(pattern.must) :]):
                return True
        for point in points:
            num_moves += len(automata) + sum(map(len, states)) // 8
            if num_moves > _MOST_MOVES:
                return True
            pairs = zip(automata, states, strict=True)
            behind = tuple(one.after(at, point) for one, at in pairs), min(length + 1, cap)
            is_short = most is None or behind[1] <= most
            if is_short and all(behind[0][: len(pattern.must)]) and behind not in visited:
                visited.add(behind)
                todo.append(behind)
    return False
