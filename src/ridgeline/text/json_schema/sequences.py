"""Rules of members in an order of their own, with commas between them."""

from __future__ import annotations

from ridgeline.text.json_schema.errors import SchemaError

_MOST_STATES = 4_000  # places in the order, each with how many came before
_LONG, _SHORT = 500, 200  # characters of expressions


class SequenceNode:
    """Members in their order, some of which may be left out, then any number of others."""

    def __init__(
        self,
        members: list[tuple[str, bool]],
        others: str,
        least: int,
        most: int | None,
        rules: list[str],
    ) -> None:
        """Take the members, each with whether it must be there; rules go to ``rules``."""
        self._members, self._others, self._rules = members, others, rules
        num_required = sum(is_required for _, is_required in members)
        self._least = least if least > num_required else 0
        is_bounded = most is not None and (others or most < len(members))
        self._most = most if is_bounded else None
        self._cap = max(1, self._least, 0 if self._most is None else self._most + 1)
        self._known: dict[tuple[int, int], str | None] = {}
        if len(members) * self._cap > _MOST_STATES:
            raise SchemaError("", "the schema is too large: it counts too many members")

    def expression(self) -> str | None:
        """Return the expression, None if too few or too many would have to be there."""
        for i in range(len(self._members), -1, -1):
            for count in range(min(i, self._cap) + 1):
                self._known[i, count] = self._short(self._from(i, count))
        return self._known[0, 0]

    def _short(self, text: str | None) -> str | None:
        """Return an expression, or where it is long the name of its rule: it is used twice."""
        return text if text is None or len(text) < _LONG else self._rule(text)

    def _from(self, i: int, count: int) -> str | None:
        """Return what may follow from a member on, behind ``count`` members, or more at the cap."""
        if i == len(self._members):
            return self._end(count)
        member, is_required = self._members[i]
        here = f'"," {member}' if count else member
        next_place = i + 1, min(count + 1, self._cap)
        behind = self._known.get(next_place)
        if behind and not is_required and not (self._cap == 1 and count):
            behind = self._known[next_place] = self._shared(behind)
        is_full = self._most is not None and count >= self._most
        having = None if behind is None or is_full else f"{here} {behind}".strip()
        if is_required:
            return having
        without = self._known[i + 1, count]
        if having is None or without is None:
            return having if without is None else without
        if self._cap == 1 and count and behind == without:
            return f"({here})? {without}".strip()
        return self._rule(f"{having} | {without or chr(34) * 2}")

    def _end(self, count: int) -> str | None:
        missing = max(0, self._least - count)
        room = None if self._most is None else self._most - count
        if missing > 1:
            return None  # others may have the same name, so only one of them counts
        if not self._others or room == 0:
            return None if missing else ""
        if room is not None and room < 0:
            return None
        high = "" if room is None else room
        if count:
            return f'("," ({self._others})){{{missing},{high}}}'
        if room == 1:  # a grammar has no {0,0}
            whole = f"({self._others})"
        else:
            high = "" if room is None else room - 1
            whole = f'({self._others}) ("," ({self._others})){{0,{high}}}'
        return whole if missing else f"({whole})?"

    def _shared(self, text: str) -> str:
        """Return the name of the rule of an expression that is used twice, if it is not short."""
        return text if len(text) < _SHORT else self._rule(text)

    def _rule(self, text: str) -> str:
        name = f"o{len(self._rules)}"
        self._rules.append(f"{name}: {text}")
        return name
