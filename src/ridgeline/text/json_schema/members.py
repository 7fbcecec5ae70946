"""Lists and objects of a branch: which goals their parts have, and what may follow what.

Objects are closed unless the schema opens them in words: a model invents names otherwise, and what
is closed fits what is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, product
from typing import Any, NamedTuple

from ridgeline.text.json_schema import automata, patterns
from ridgeline.text.json_schema.charsets import is_written
from ridgeline.text.json_schema.nodes import Alternative, Node, SchemaReader, SchemaRef, Subschemas
from ridgeline.text.json_schema.patterns import PatternError
from ridgeline.text.json_schema.shapes import (
    ValueConstraints,
    can_have_text,
    shape_of,
    string_terminal,
)

_MOST_PATTERNS = 4
_MOST_ORDERED = 64  # values of a list that has each once


class Member(NamedTuple):
    """A member of an object whose name is known."""

    name: str
    goal: Subschemas
    is_required: bool


class ExtraMembers(NamedTuple):
    """Members whose names are not known: the terminal of their names."""

    terminal: str
    goal: Subschemas


class ObjectMembers(NamedTuple):
    """The members of an object: those with known names, in their order, then others."""

    members: tuple[Member, ...]
    extras: tuple[ExtraMembers, ...]
    least: int
    most: int | None


class ListItems(NamedTuple):
    """The items of a list: the first ones, then ``rest``, None for no more.

    ``values`` are those of a list that has each at most once, in their order; then it has no goals.
    """

    first: tuple[Subschemas, ...]
    rest: Subschemas | None
    least: int
    most: int | None
    values: tuple[Any, ...] = ()


class MemberResolver:
    """Says what the parts of lists and objects are."""

    def __init__(self, reader: SchemaReader) -> None:
        """Take what reads the schema; it learns here which branches nothing can fit."""
        self._reader = reader
        self._dead: dict[Alternative, bool] = {}
        self._depth = 0
        reader.is_dead = self.is_dead

    def is_dead(self, branch: Alternative) -> bool:
        """Return whether surely nothing fits a branch; its parts are looked at two levels deep."""
        if branch in self._dead:
            return self._dead[branch]
        shape = shape_of(self._reader, branch)
        is_dead = not shape.has_scalars and not self._has_parts(branch, shape)
        if self._depth == 0:
            self._dead[branch] = is_dead
        return is_dead

    def _has_parts(self, branch: Alternative, shape: ValueConstraints) -> bool:
        if shape.listed is not None:
            return False
        if "array" in shape.types:
            return True
        if "object" not in shape.types or self._depth >= 2:
            return "object" in shape.types
        self._depth += 1
        try:
            return not any(self._is_impossible(branch, name) for name in self._required(branch))
        finally:
            self._depth -= 1

    def _is_impossible(self, branch: Alternative, name: str) -> bool:
        goal = self._member(branch, name)
        return goal is None or not any(True for one in self._reader.branches(goal)
                                       if not self.is_dead(one))  # fmt: skip

    # --- objects -------------------------------------------------------------------------------

    def of_object(self, branch: Alternative) -> ObjectMembers | None:
        """Return the members of an object that fits a branch, None if there is none."""
        reader = self._reader
        required = self._required(branch)
        counts = [reader.count(leaf.node, "minProperties") or 0 for leaf in branch]
        highest = (reader.count(leaf.node, "maxProperties") for leaf in branch)
        least = max(counts, default=0)
        most = min((x for x in highest if x is not None), default=None)
        listed = self._listed_names(branch)
        names = dict.fromkeys(chain(self._said(branch), required, listed or ()))
        members = []
        for name in names:
            goal = self._member(branch, name)
            if goal is None or not is_written(name) or not self._may_be_named(branch, name):
                if name in required:
                    return None
                continue
            members.append(Member(name, goal, name in required))
        is_open = self._is_open(branch) or len(members) < least
        extras = () if listed is not None else tuple(self._extras(branch, names, is_open))
        if extras and least > len(members) + 1:
            self._leave_out_least(branch, len(members) + 1)
            least = len(members) + 1
        return ObjectMembers(tuple(members), extras, least, most)

    def _leave_out_least(self, branch: Alternative, least: int) -> None:
        """Note that a name may come twice, and count twice."""
        for leaf in branch:
            if (self._reader.count(leaf.node, "minProperties") or 0) > least:
                why = "no grammar can count names that the schema does not list"
                self._reader.leave_out(leaf.node, "minProperties", why)

    def _required(self, branch: Alternative) -> list[str]:
        texts = (self._reader.texts(leaf.node, "required") for leaf in branch)
        return list(dict.fromkeys(chain.from_iterable(texts)))

    def _said(self, branch: Alternative) -> Iterator[str]:
        for leaf in branch:
            yield from self._reader.names(leaf.node, "properties")

    def _is_open(self, branch: Alternative) -> bool:
        """Return whether the schema says that there may be names that it does not list."""
        is_closed = False
        for leaf in branch:
            keywords = leaf.node.keywords
            for keyword in ("additionalProperties", "unevaluatedProperties"):
                if keyword in keywords and keywords[keyword] is not False:
                    return True
            said = ("properties", "required", "patternProperties")
            is_closed |= leaf.node.is_said and any(keyword in keywords for keyword in said)
        return not is_closed

    def _member(self, branch: Alternative, name: str) -> Subschemas | None:
        """Return what the value under a name has to fit, None if nothing can."""
        nodes = list[Node]()
        for leaf in branch:
            nodes += self._of_name(leaf, name)
        return None if any(node.schema is False for node in nodes) else _goal(nodes)

    def _of_name(self, leaf: SchemaRef, name: str) -> Iterator[Node]:
        reader, node = self._reader, leaf.node
        properties = reader.names(node, "properties")
        is_known = name in properties
        if is_known:
            yield reader.inner(node, "properties", name, schema=properties[name])
        for source, schema in reader.names(node, "patternProperties").items():
            is_in, is_out = self._matches(node, source, name)
            if not is_out:
                yield reader.inner(node, "patternProperties", source, schema=schema)
            is_known |= is_in
        if is_known:
            return
        if "additionalProperties" in node.keywords:
            schema = node.keywords["additionalProperties"]
            yield reader.inner(node, "additionalProperties", schema=schema)
        elif "unevaluatedProperties" in node.keywords:
            others = (SchemaRef(one) for one in leaf.scope if one is not node)
            if not any(self._evaluates(one.node, name) for one in others):
                schema = node.keywords["unevaluatedProperties"]
                yield reader.inner(node, "unevaluatedProperties", schema=schema)

    def _evaluates(self, node: Node, name: str) -> bool:
        """Return whether a place surely says something of a name."""
        keywords = node.keywords
        if "additionalProperties" in keywords or name in self._reader.names(node, "properties"):
            return True
        sources = self._reader.names(node, "patternProperties")
        return any(self._matches(node, source, name)[0] for source in sources)

    def _matches(self, node: Node, source: str, name: str) -> tuple[bool, bool]:
        """Return whether a name surely matches a pattern, and whether it surely does not."""
        try:
            pattern = patterns.pattern(source)
            is_in = ValueConstraints(
                must=list(pattern.must), must_not=list(pattern.must_not)
            ).has_text(name)
            if pattern.must_not:
                return is_in, False
            away = patterns.negated(source)
            return is_in, not any(automata.matches(one, name) for one in away.must_not)
        except PatternError as error:
            self._leave_out_pattern(node, source, error)
            return False, True

    def _leave_out_pattern(self, node: Node, source: str, error: PatternError) -> None:
        path = self._reader.inner(node, "patternProperties", schema=None)
        self._reader.leave_out(path, source, f"it cannot be held to: {error}")

    def _name_shapes(self, branch: Alternative) -> list[list[ValueConstraints]]:
        """Return for each ``propertyNames`` what a name may be."""
        constraints = []
        for leaf in branch:
            if "propertyNames" in leaf.node.keywords:
                schema = leaf.node.keywords["propertyNames"]
                goal = (self._reader.inner(leaf.node, "propertyNames", schema=schema),)
                shapes = [shape_of(self._reader, one) for one in self._reader.branches(goal)]
                constraints.append([one for one in shapes if "string" in one.types])
        return constraints

    def _may_be_named(self, branch: Alternative, name: str) -> bool:
        return all(
            any(one.has(name) and (one.listed is None or name in one.listed) for one in shapes)
            for shapes in self._name_shapes(branch)
        )

    def _listed_names(self, branch: Alternative) -> list[str] | None:
        """Return all names that ``propertyNames`` lists, None if it does not."""
        for shapes in self._name_shapes(branch):
            if all(one.listed is not None for one in shapes):
                listed = chain.from_iterable(one.listed or () for one in shapes)
                return [name for name in listed if isinstance(name, str)]
        return None

    def _extras(
        self, branch: Alternative, taken: Iterable[str], is_open: bool
    ) -> Iterator[ExtraMembers]:
        """Yield the other members, by the patterns that their names match."""
        reader = self._reader
        candidates = dict.fromkeys(
            source for leaf in branch for source in reader.names(leaf.node, "patternProperties")
        )
        sources = [source for source in candidates if self._is_known(branch, source)]
        for matched in product((True, False), repeat=len(sources)):
            inside = {source for source, is_in in zip(sources, matched, strict=True) if is_in}
            if not inside and not is_open:
                continue
            goal = self._of_others(branch, inside)
            if goal is None:
                continue
            for shape in self._other_names(branch, inside, sources):
                terminal = string_terminal(shape, taken) if self._is_left(shape, taken) else ""
                if terminal:
                    yield ExtraMembers(terminal, goal)

    def _is_known(self, branch: Alternative, source: str) -> bool:
        for leaf in branch:
            keywords = self._reader.names(leaf.node, "patternProperties")
            if source in keywords:
                if list(keywords).index(source) >= _MOST_PATTERNS:
                    why = PatternError("there are too many patterns")
                    self._leave_out_pattern(leaf.node, source, why)
                    return False
                try:
                    patterns.pattern(source)
                except PatternError as error:
                    self._leave_out_pattern(leaf.node, source, error)
                    return False
        return True

    @staticmethod
    def _is_left(shape: ValueConstraints, taken: Iterable[str]) -> bool:
        """Return whether there is a name that is not taken."""
        names = patterns.literals(one for one in taken if is_written(one))
        barred = [*shape.must_not, names] if names != patterns.Alt(()) else shape.must_not
        return can_have_text(
            ValueConstraints(least=shape.least, most=shape.most, must=shape.must, must_not=barred)
        )

    def _other_names(
        self, branch: Alternative, inside: set[str], sources: Iterable[str]
    ) -> Iterator[ValueConstraints]:
        """Yield what names may be that match the patterns ``inside`` and no others."""
        for choice in product(*self._name_shapes(branch)):
            shape = ValueConstraints()
            try:
                conditions = [
                    patterns.pattern(one) if one in inside else patterns.negated(one)
                    for one in sources
                ]
            except PatternError:
                return  # what does not match cannot be told: there is no such name
            for one in conditions:
                shape.must += one.must
                shape.must_not += one.must_not
            for of_name in choice:
                shape.must += of_name.must
                shape.must_not += of_name.must_not
                shape.least = max(shape.least, of_name.least)
                shape.most = min(
                    (x for x in (shape.most, of_name.most) if x is not None), default=None
                )
                shape.not_listed += of_name.not_listed
                if of_name.listed is not None:
                    texts = [one for one in of_name.listed if isinstance(one, str)]
                    shape.must.append(patterns.literals(texts))
            yield shape

    def _of_others(self, branch: Alternative, inside: set[str]) -> Subschemas | None:
        """Return the goal of members whose names match ``inside``, None if nothing fits."""
        reader, nodes = self._reader, list[Node]()
        for leaf in branch:
            node = leaf.node
            of_patterns = reader.names(node, "patternProperties")
            mine = [source for source in of_patterns if source in inside]
            nodes += [
                reader.inner(node, "patternProperties", source, schema=of_patterns[source])
                for source in mine
            ]
            if mine:
                continue
            if "additionalProperties" in node.keywords:
                schema = node.keywords["additionalProperties"]
                nodes.append(reader.inner(node, "additionalProperties", schema=schema))
            elif "unevaluatedProperties" in node.keywords:
                others = [one.keywords for one in leaf.scope if one is not node]
                if not any(
                    "additionalProperties" in one or inside & set(one.get("patternProperties", ()))
                    for one in others
                ):
                    schema = node.keywords["unevaluatedProperties"]
                    nodes.append(reader.inner(node, "unevaluatedProperties", schema=schema))
        return None if any(node.schema is False for node in nodes) else _goal(nodes)

    # --- lists ---------------------------------------------------------------------------------

    def of_list(self, branch: Alternative) -> ListItems:
        """Return the items of a list that fits a branch."""
        reader = self._reader
        least = max((reader.count(leaf.node, "minItems") or 0 for leaf in branch), default=0)
        highest = (reader.count(leaf.node, "maxItems") for leaf in branch)
        most = min((x for x in highest if x is not None), default=None)
        num_first = max((len(self._first(leaf.node)) for leaf in branch), default=0)
        first = [self._item(branch, i) for i in range(num_first)]
        rest = self._item(branch, None)
        least = max(least, self._add_contained(branch, first, rest))
        if most is not None:
            first = first[:most]
        for i, goal in enumerate(first):
            if goal is None:
                return ListItems(tuple(g for g in first[:i] if g is not None), None, least, most)
        goals = tuple(goal for goal in first if goal is not None)
        plan = ListItems(goals, rest, least, most)
        unique = [leaf.node for leaf in branch if leaf.node.keywords.get("uniqueItems") is True]
        if not unique or (most is not None and most <= 1):
            return plan
        values = () if goals or rest is None else self._all_values(rest)
        if values:
            return ListItems((), None, least, most, values)
        if goals or rest is not None:
            why = "no grammar can tell that no item comes twice"
            for node in unique:
                reader.leave_out(node, "uniqueItems", why)
        return plan

    def _first(self, node: Node) -> list[Any]:
        """Return the schemas of a list's first items, by the words of any draft."""
        for keyword in ("prefixItems", "items"):
            schemas = node.keywords.get(keyword)
            if isinstance(schemas, list):
                return schemas
            if keyword == "prefixItems" and schemas is not None:
                raise self._reader.wrong(node, keyword, "it must be a list of schemas")
        return []

    def _item(self, branch: Alternative, place: int | None) -> Subschemas | None:
        """Return the goal of an item, None for nothing; of those behind all first ones at None."""
        nodes = list[Node]()
        for leaf in branch:
            one = self._of_place(leaf.node, place)
            others = [node for node in leaf.scope if node is not leaf.node]
            if one is None and "unevaluatedItems" in leaf.node.keywords:
                if any(self._of_place(node, place) for node in others):
                    continue
                schema = leaf.node.keywords["unevaluatedItems"]
                one = self._reader.inner(leaf.node, "unevaluatedItems", schema=schema)
            if one is not None:
                nodes.append(one)
        return None if any(node.schema is False for node in nodes) else _goal(nodes)

    def _of_place(self, node: Node, place: int | None) -> Node | None:
        """Return the schema that a place's own words have for an item."""
        first = self._first(node)
        keyword = "items" if first is not node.keywords.get("items") else "additionalItems"
        if place is not None and place < len(first):
            name = "prefixItems" if keyword == "items" else "items"
            return self._reader.inner(node, name, place, schema=first[place])
        if keyword not in node.keywords:
            return None
        return self._reader.inner(node, keyword, schema=node.keywords[keyword])

    def _add_contained(
        self, branch: Alternative, first: list[Subschemas | None], rest: Subschemas | None
    ) -> int:
        """Let the first items be what a list must contain; return how many it must have."""
        needed = 0
        for leaf in branch:
            node = leaf.node
            if "contains" not in node.keywords:
                continue
            count = self._reader.count(node, "minContains")
            count = 1 if count is None else count
            if "maxContains" in node.keywords:
                self._reader.leave_out(node, "maxContains", "no grammar can count such items")
            one = self._reader.inner(node, "contains", schema=node.keywords["contains"])
            first += [rest] * (count - len(first))
            for i in range(count):
                goal = first[i]
                first[i] = None if goal is None else _goal((*goal, one))
            needed = max(needed, count)
            if needed > 1_000:
                raise self._reader.wrong(node, "minContains", "it is too many")
        return needed

    def _all_values(self, goal: Subschemas) -> tuple[Any, ...]:
        """Return all values that fit a goal, if they are few and have no parts."""
        values = list[Any]()
        for branch in self._reader.branches(goal):
            shape = shape_of(self._reader, branch)
            if shape.listed is None:
                return ()
            values += shape.values()
        unique = dict.fromkeys(values)
        return tuple(unique) if len(unique) <= _MOST_ORDERED else ()


def _goal(nodes: Iterable[Node]) -> Subschemas:
    """Return a goal without what always fits."""
    return tuple(dict.fromkeys(node for node in nodes if node.schema not in (True, {})))
