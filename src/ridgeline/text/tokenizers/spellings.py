"""Where a text spells control tokens, however many there are: in time that grows with the text.

A pattern that lists them all would be compiled for seconds, and try each of them at each place.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from os.path import commonprefix

from ridgeline.model.files.tensors import ModelFileError

_MOST_CHARS = 256  # of one; real ones have some 30


class Spellings:
    """Some tokens' spellings, found in texts."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """Take them. Raises ModelFileError for one that is longer than any control token."""
        self._sorted = sorted(set(spellings))
        self._longest = max(map(len, self._sorted), default=0)
        if self._longest > _MOST_CHARS:
            raise ModelFileError(
                f"a control token has {self._longest:,} characters: at most {_MOST_CHARS} are taken"
            )
        firsts = "".join(sorted({spelling[0] for spelling in self._sorted}))
        self._firsts = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")

    def replaced(self, text: str, names: Mapping[str, str], unless_before: str = "") -> str:
        """Return a text with names in place of spellings, from the left, the longest that fits.

        One that stands right before ``unless_before`` does not count.
        """
        parts, done = list[str](), 0
        for place in self._places(text):
            if place >= done and (found := self._at(text, place, unless_before)):
                parts += (text[done:place], names[found])
                done = place + len(found)
        return "".join(parts) + text[done:]

    def starts(self, text: str) -> list[int]:
        """Return, in order, every place where a spelling begins, overlapping ones too.

        One may also begin at the end, and be completed by what follows the text.
        """
        places = {place for place in self._places(text) if self._at(text, place)}
        body = text.rstrip()  # a template may trim, so that its own text follows the last character
        for place in range(max(0, len(body) - self._longest), len(body)):
            end = body[place:]
            after = bisect_left(self._sorted, end)
            if after < len(self._sorted) and self._sorted[after].startswith(end):
                places.add(place)
        return sorted(places)

    def _places(self, text: str) -> Iterator[int]:
        return (match.start() for match in self._firsts.finditer(text))

    def _at(self, text: str, place: int, unless_before: str = "") -> str:
        """Return the longest spelling that begins at a place; "" if none does."""
        ahead = text[place : place + self._longest]
        while ahead:
            # Of all that are sorted before what is there, the last has most in common with it.
            found = self._sorted[bisect_right(self._sorted, ahead) - 1]
            if not ahead.startswith(found):
                ahead = commonprefix([ahead, found]) if found < ahead else ""  # noqa: RUF071
            elif unless_before and text.startswith(unless_before, place + len(found)):
                ahead = found[:-1]
            else:
                return found
        return ""
