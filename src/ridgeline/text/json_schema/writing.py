"""A schema as a grammar in Lark's notation, as llguidance reads it.

Each goal is a rule, and values without parts are one terminal of it. White space may stand between
any two of the symbols of JSON, once, as ``%ignore`` says. Members have an order of their own, with
commas between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ridgeline.text.json_schema import numbers
from ridgeline.text.json_schema.charsets import quoted
from ridgeline.text.json_schema.members import ListItems, MemberResolver, ObjectMembers
from ridgeline.text.json_schema.nodes import Alternative, SchemaError, SchemaReader, Subschemas
from ridgeline.text.json_schema.shapes import ValueConstraints, shape_of, string_terminal

WHITESPACE = r"[ \n\t]{0,20}"  # without a bound, a small model writes spaces for ever
_MOST_GOALS = 2_000
_MOST_CHARS = 1 << 22
_NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_STATES = 4_000  # places in the order, each with how many came before
_LONG, _SHORT = 500, 200  # characters of expressions


class Written(NamedTuple):
    """A grammar.

    Attributes:
        text: in Lark's notation.
        ignored: paths of keywords that it does not hold to.
    """

    text: str
    ignored: tuple[str, ...] = ()


class _Branch(NamedTuple):
    """What fits one branch of a goal."""

    terminals: tuple[str, ...]
    by_library: tuple[Mapping[str, Any], ...]  # schemas of numbers that the library reads
    of_object: ObjectMembers | None
    of_list: ListItems | None


def written(
    schema: Any,
    *,
    is_strict: bool,
    at: str = "",
    inside: tuple[object, ...] = (),
    whitespace: str | None = WHITESPACE,
) -> Written:
    """Return the grammar of what fits a schema, ``start`` being its first rule.

    Args:
        schema: the document.
        is_strict: whether what no grammar can hold to is refused, and not left out.
        at: what stands before paths.
        inside: where in the document the schema is that is meant; references are the document's.
        whitespace: the regular expression of white space; none for no white space.

    Raises SchemaError.
    """
    reader = SchemaReader(schema, is_strict=is_strict, at=at)
    for key in inside:
        schema = schema[key]
    try:
        text = _Writer(reader, whitespace).grammar((reader.node(inside, schema),))
    except RecursionError:
        raise SchemaError(at, "the schema is nested too deeply") from None
    if len(text) > _MOST_CHARS:
        raise SchemaError(at, "the schema is too large: its grammar is too long")
    return Written(text, tuple(reader.ignored))


class _Writer:
    def __init__(self, reader: SchemaReader, whitespace: str | None) -> None:
        self._reader, self._planner = reader, MemberResolver(reader)
        self._whitespace = whitespace or None
        self._ways: dict[Subschemas, list[_Branch]] = {}
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}
        self._fits: set[Subschemas] = set()  # goals that some value fits

    def grammar(self, goal: Subschemas) -> str:
        """Return the grammar. Raises SchemaError if nothing fits the goal."""
        self._read_all(goal)
        self._find_fitting()
        if goal not in self._fits:
            raise SchemaError(self._reader.shown(()), "Unsatisfiable schema: no value fits it")
        numbers_of = {one: i for i, one in enumerate(self._ways)}
        self._names = {one: f"v{i}" for one, i in numbers_of.items()}
        for one in self._ways:
            if one in self._fits:
                self._rules.append(f"{self._names[one]}: {' | '.join(self._options(one))}")
        head = [f"start: {self._names[goal]}"]
        if self._whitespace is not None:
            head = ['%llguidance {"ignore_once": true}', f"%ignore /{self._slashed()}/", *head]
        terminals = [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join([*head, *self._rules, *terminals]) + "\n"

    def _slashed(self) -> str:
        """Return the pattern of white space as it can stand between two slashes."""
        text, is_escaped, pattern = self._whitespace or "", False, ""
        for char in text:
            pattern += "\\/" if char == "/" and not is_escaped else char
            is_escaped = char == "\\" and not is_escaped
        return pattern.replace("\n", r"\n").replace("\r", r"\r")

    # --- what there is -------------------------------------------------------------------------

    def _read_all(self, first: Subschemas) -> None:
        todo = [first]
        while todo:
            goal = todo.pop()
            if goal in self._ways:
                continue
            if len(self._ways) >= _MOST_GOALS:
                raise SchemaError(self._reader.shown(()), "the schema is too large")
            ways = [self._way(branch) for branch in self._reader.branches(goal)]
            self._ways[goal] = ways
            todo += reversed([part for way in ways for part in _parts(way)])

    def _way(self, branch: Alternative) -> _Branch:
        self._reader.spend(len(branch))
        shape = shape_of(self._reader, branch)
        has_parts = shape.listed is None
        of_object = of_list = None
        if has_parts and "object" in shape.types:
            of_object = self._planner.of_object(branch)
        if has_parts and "array" in shape.types:
            of_list = self._planner.of_list(branch)
        terminals, by_library = self._scalars(branch, shape)
        return _Branch(terminals, by_library, of_object, of_list)

    def _scalars(
        self, branch: Alternative, shape: ValueConstraints
    ) -> tuple[tuple[str, ...], tuple[Mapping[str, Any], ...]]:
        if shape.listed is not None:
            terminal = numbers.alternatives(map(self._spelled, shape.values()))
            return ((terminal,) if terminal else ()), ()
        words = [
            json.dumps(one)
            for one in (None, True, False)
            if ("null" if one is None else "boolean") in shape.types
            and not any(one is barred for barred in shape.not_listed)
        ]
        terminals = [numbers.alternatives(words)]
        by_library: tuple[Mapping[str, Any], ...] = ()
        if "number" in shape.types:
            of_numbers = self._numbers(branch, shape)
            terminals.append(of_numbers.terminal)
            by_library = (of_numbers.schema,) if of_numbers.schema is not None else ()
        if "string" in shape.types:
            terminals.append(string_terminal(shape))
        return tuple(filter(None, terminals)), by_library

    def _numbers(self, branch: Alternative, shape: ValueConstraints) -> numbers.WrittenNumber:
        """Return how numbers are written. What cannot be held to is left out."""
        try:
            return numbers.written(shape.numbers)
        except numbers.NoNumbers as error:
            keywords = ("multipleOf",) if shape.numbers.multiples else _NUMBER_WORDS
            for leaf in branch:
                for keyword in keywords:
                    if keyword in leaf.node.keywords:
                        self._reader.leave_out(leaf.node, keyword, str(error))
        if shape.numbers.multiples:
            shape.numbers = shape.numbers._replace(multiples=())
            return self._numbers(branch, shape)
        is_integer = shape.numbers.is_integer
        return numbers.written(numbers.Range(is_integer, not_in=shape.numbers.not_in))

    def _spelled(self, value: Any) -> str:
        if isinstance(value, str):
            return quoted(value)
        try:
            return json.dumps(value, allow_nan=False)
        except ValueError:
            raise SchemaError(self._reader.shown(()), "a number in it cannot be written") from None

    def _find_fitting(self) -> None:
        """Find the goals that some value fits: one whose parts, as far as needed, have such."""
        needing: dict[Subschemas, list[tuple[Subschemas, int]]] = {}
        lacking: dict[tuple[Subschemas, int], int] = {}
        todo = list[Subschemas]()
        for goal, ways in self._ways.items():
            for i, needed in enumerate(need for way in ways for need in self._needs(way)):
                parts = set(needed)
                lacking[goal, i] = len(parts)
                if not parts:
                    todo.append(goal)
                for part in parts:
                    needing.setdefault(part, []).append((goal, i))
        while todo:
            goal = todo.pop()
            if goal in self._fits:
                continue
            self._fits.add(goal)
            for other, i in needing.get(goal, ()):
                lacking[other, i] -= 1
                if not lacking[other, i]:
                    todo.append(other)

    @staticmethod
    def _needs(way: _Branch) -> Iterator[list[Subschemas]]:
        """Yield, for each kind of value that fits a way, which goals its parts need at least."""
        if way.terminals or way.by_library:
            yield []
        if (plan := way.of_list) is not None and (plan.most is None or plan.least <= plan.most):
            if plan.values:
                if plan.least <= len(plan.values):
                    yield []
            elif plan.least <= len(plan.first):
                yield list(plan.first[: plan.least])
            elif plan.rest is not None:
                yield [*plan.first, plan.rest]
        if (of_object := way.of_object) is not None:
            required = [one.goal for one in of_object.members if one.is_required]
            optional = [one.goal for one in of_object.members if not one.is_required]
            missing = of_object.least - len(required)
            if of_object.most is not None and max(of_object.least, len(required)) > of_object.most:
                return
            extras = [one.goal for one in of_object.extras]
            if missing <= 0:
                yield required
            elif missing == 1:
                yield from ([*required, goal] for goal in (*optional, *extras))
            elif missing <= len(optional):
                yield [*required, *optional]  # some of them would do; all is surely enough
            else:
                yield from ([*required, *optional, goal] for goal in extras)

    # --- rules ---------------------------------------------------------------------------------

    def _options(self, goal: Subschemas) -> Iterator[str]:
        """Yield what a value may be, as expressions."""
        ways = self._ways[goal]
        terminals = dict.fromkeys(one for way in ways for one in way.terminals)
        if terminals:
            yield self._terminal(" | ".join(f"({one})" for one in terminals))
        expressions = dict[str, None]()
        for way in ways:
            for schema in way.by_library:
                expressions[
                    f"%json {json.dumps({**schema, 'x-guidance': self._library_options()})}"
                ] = None
            if way.of_object is not None:
                expressions.update(dict.fromkeys(self._object(way.of_object)))
            if way.of_list is not None:
                expressions.update(dict.fromkeys(self._list(way.of_list)))
        yield from expressions

    def _library_options(self) -> dict[str, Any]:
        if self._whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self._whitespace}

    def _terminal(self, text: str) -> str:
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def _literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def _object(self, plan: ObjectMembers) -> Iterator[str]:
        members = [
            (f'{self._literal(quoted(one.name))} ":" {self._names[one.goal]}', one.is_required)
            for one in plan.members
            if one.goal in self._fits
        ]
        num_required = sum(one.is_required for one in plan.members)
        if sum(is_required for _, is_required in members) < num_required:
            return
        extras = " | ".join(
            f'{self._terminal(one.terminal)} ":" {self._names[one.goal]}'
            for one in plan.extras
            if one.goal in self._fits
        )
        inner = SequenceNode(members, extras, plan.least, plan.most, self._rules).expression()
        if inner is not None:
            yield f'"{{" {inner} "}}"'

    def _list(self, plan: ListItems) -> Iterator[str]:
        if plan.values:
            texts = [
                self._terminal(numbers.alternatives([self._spelled(one)])) for one in plan.values
            ]
            members = [(text, False) for text in texts]
            inner = SequenceNode(members, "", plan.least, plan.most, self._rules).expression()
            if inner is not None:
                yield f'"[" {inner} "]"'
            return
        first, rest = list[str](), plan.rest
        for goal in plan.first:
            if goal not in self._fits:
                rest = None
                break
            first.append(self._names[goal])
        if rest is not None and rest not in self._fits:
            rest = None
        most = plan.most
        if rest is None:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and plan.least > most:
            return
        items = self._items(first, None if rest is None else self._names[rest], plan.least, most)
        yield f'"[" {items} "]"'

    @staticmethod
    def _items(first: list[str], rest: str | None, least: int, most: int | None) -> str:
        """Return the items of a list, with the commas between them."""
        if most == 0:
            return ""
        if not first:
            first, num_rest = [rest or ""], 1
        else:
            num_rest = len(first)
        tail = ""
        if rest is not None and (most is None or most > num_rest):
            low, high = max(least - num_rest, 0), "" if most is None else most - num_rest
            tail = f'("," {rest}){{{low},{high}}}'
        for i in range(len(first) - 1, 0, -1):
            tail = f'"," {first[i]} {tail}'
            tail = tail if i < least else f"({tail})?"
        whole = f"{first[0]} {tail}"
        return whole if least else f"({whole})?"


def _parts(way: _Branch) -> Iterator[Subschemas]:
    if way.of_object is not None:
        yield from (one.goal for one in way.of_object.members)
        yield from (one.goal for one in way.of_object.extras)
    if way.of_list is not None and not way.of_list.values:
        yield from way.of_list.first
        if way.of_list.rest is not None:
            yield way.of_list.rest


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
        self._suffixes: dict[tuple[int, int], str | None] = {}
        if len(members) * self._cap > _MOST_STATES:
            raise SchemaError("", "the schema is too large: it counts too many members")

    def expression(self) -> str | None:
        """Return the expression, None if too few or too many would have to be there."""
        for i in range(len(self._members), -1, -1):
            for count in range(min(i, self._cap) + 1):
                self._suffixes[i, count] = self._short(self._from(i, count))
        return self._suffixes[0, 0]

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
        behind = self._suffixes.get(next_place)
        if behind and not is_required and not (self._cap == 1 and count):
            behind = self._suffixes[next_place] = self._shared(behind)
        is_full = self._most is not None and count >= self._most
        having = None if behind is None or is_full else f"{here} {behind}".strip()
        if is_required:
            return having
        without = self._suffixes[i + 1, count]
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
