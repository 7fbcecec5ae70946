"""A schema's places, and what several of them together ask of a value.

A value has to fit a *goal*, which is a set of places. ``SchemaReader.branches`` resolves what joins
and chooses schemas (``$ref``, ``allOf``, ``anyOf``, ``oneOf``, ``not``, ``if`` ...): a value fits a
goal if it fits all leaves of one of its branches. So nothing has to be merged as text.

What does not fit a schema is a schema too: for ``not``, ``if`` and ``oneOf``. What has no such
schema may be left out where others remain: then less is allowed, never more. What cannot be held to
is an error that says where in the schema it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip
_LOST = (  # keywords whose opposite no schema says
    "multipleOf", "format", "items", "prefixItems", "additionalItems", "contains", "uniqueItems",
    "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties",
    "unevaluatedItems", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_MOST_NESTED = 20
Resolve = Callable[[object], Any]
_MOST_BRANCHES = 200
_MOST_SHOWN = 80  # characters of a name
_MOST_SPENT = 20_000  # places visited, and leaves of branches combined
Path = tuple[object, ...]  # names and indices; a tuple of one marks what is made of what is there


class SchemaError(ValueError):
    """A schema that no grammar can be made of.

    Attributes:
        path: where in the schema: names and indices, with points between them; empty for the whole.
    """

    def __init__(self, path: str, why: str) -> None:
        """Say what is wrong with what stands at ``path``."""
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path


class Unenforceable(SchemaError):
    """A keyword at ``path`` that is understood, or may be, and that no grammar can hold to."""


class Mark(Enum):
    """Keywords of schemas that are made here, and that no document can have."""

    NOT_ENUM = auto()
    NOT_PATTERN = auto()
    UNSAID = auto()  # such a schema does not say which names an object has


def negated(schema: Any, resolve: Resolve, path: str, depth: int = 0) -> Any:
    """Return a schema of values that do not fit ``schema``: of all such, or of some.

    ``resolve`` returns what a reference stands for. Raises Unenforceable if there is none.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        raise Unenforceable(path, "a schema must be an object, true or false")
    if depth > _MOST_NESTED:
        raise Unenforceable(path, "it is nested too deeply")
    options, lost = list[Any](), ""
    for keyword, value in schema.items():
        try:
            options += _opposites(keyword, value, resolve, f"{path}.{keyword}", depth + 1)
        except Unenforceable as error:
            lost = error.path
    if lost and not options:
        raise Unenforceable(lost, "no schema says what does not fit it")
    return {Mark.UNSAID: True, "anyOf": options} if options else False


def _opposites(
    keyword: Any, value: Any, resolve: Resolve, path: str, depth: int
) -> Iterator[dict[Any, Any]]:
    """Yield schemas of what does not fit one keyword."""
    if keyword in _OPPOSITES and type(value) in (int, float):
        kind, opposite, change = _OPPOSITES[keyword]
        if value + change >= 0 or not change:
            yield {"type": kind, opposite: value + change}
    elif keyword == "type":
        types = [value] if isinstance(value, str) else value
        others = [one for one in _TYPES if one not in types]
        if "integer" in types and "number" in others:
            others.remove("number")
        if others:
            yield {"type": others}
    elif keyword in ("enum", "const"):
        yield _others(value if keyword == "enum" else [value])
    elif keyword == Mark.NOT_ENUM:
        yield {"enum": value}
    elif keyword == "pattern":
        yield {"type": "string", Mark.NOT_PATTERN: value}
    elif keyword == Mark.NOT_PATTERN:
        yield {"type": "string", "pattern": value}
    elif keyword == "required":
        for name in value:
            yield {Mark.UNSAID: True, "type": "object", "properties": {name: False}}
    elif keyword == "not":
        yield {Mark.UNSAID: True, "allOf": [value]}
    elif keyword in ("properties", "allOf", "anyOf", "$ref"):
        yield from _of_parts(keyword, value, resolve, path, depth)
    elif keyword in _LOST or keyword in _OPPOSITES:
        raise Unenforceable(path, "no schema says what does not fit it")


def _of_parts(
    keyword: str, value: Any, resolve: Resolve, path: str, depth: int
) -> Iterator[dict[Any, Any]]:
    if keyword == "$ref":
        yield {Mark.UNSAID: True, "allOf": [negated(resolve(value), resolve, path, depth)]}
    elif keyword == "anyOf":
        yield {Mark.UNSAID: True, "allOf": [negated(one, resolve, path, depth) for one in value]}
    else:
        pairs = value.items() if keyword == "properties" else [(None, one) for one in value]
        schemas, lost = list[dict[Any, Any]](), ""
        for name, one in pairs:
            try:
                away = negated(one, resolve, path if name is None else f"{path}.{name}", depth)
            except Unenforceable as error:
                lost = error.path
                continue
            if name is None:
                schemas.append({Mark.UNSAID: True, "allOf": [away]})
            else:
                of_name = {"required": [name], "properties": {name: away}}
                schemas.append({Mark.UNSAID: True, "type": "object", **of_name})
        if lost and not schemas:
            raise Unenforceable(lost, "no schema says what does not fit it")
        yield from schemas


def _others(values: list[Any]) -> dict[Any, Any]:
    """Return a schema of other values than these; lists and objects have no others."""
    scalars = [one for one in values if not isinstance(one, list | Mapping)]
    lost = {"array" for one in values if isinstance(one, list)}
    lost |= {"object" for one in values if isinstance(one, Mapping)}
    return {"type": [one for one in _TYPES if one not in lost], Mark.NOT_ENUM: scalars}


class Node:
    """A place of a schema. There is one object for each, so places are compared by identity."""

    __slots__ = ("path", "schema")

    def __init__(self, path: Path, schema: Any) -> None:
        """Take the place and what is there."""
        self.path, self.schema = path, schema

    @property
    def keywords(self) -> Mapping[Any, Any]:
        """What the schema says, nothing if it is only true."""
        return self.schema if isinstance(self.schema, Mapping) else {}

    @property
    def is_said(self) -> bool:
        """Whether it stands in the schema, and is not made of its other parts."""
        return Mark.UNSAID not in self.keywords


class SchemaRef(NamedTuple):
    """A place whose own keywords count.

    Attributes:
        node: the place.
        scope: it and what it joins, for the keywords about what nothing of these has evaluated.
    """

    node: Node
    scope: tuple[Node, ...] = ()


Alternative = tuple[SchemaRef, ...]
Subschemas = tuple[Node, ...]


class SchemaReader:
    """Reads one schema document. What cannot be held to is refused, or noted and left out.

    Attributes:
        ignored: the paths of what was left out.
    """

    def __init__(self, root: Any, *, is_strict: bool, at: str = "") -> None:
        """Take a document. ``at`` stands before paths; ``is_strict`` refuses instead of noting."""
        self.root, self._is_strict, self._at = root, is_strict, at
        self.ignored: dict[str, None] = {}
        self._nodes: dict[Path, Node] = {}
        self._expanded: dict[Node, list[Alternative]] = {}
        self._anchors: dict[str, Path] | None = None
        self._num_spent = 0
        # Set by what knows leaves.
        self.is_dead: Callable[[Alternative], bool] = lambda branch: False

    def node(self, path: Path, schema: Any) -> Node:
        """Return the place at a path."""
        if path not in self._nodes:
            self._nodes[path] = Node(path, schema)
        return self._nodes[path]

    def inner(self, node: Node, *keys: object, schema: Any) -> Node:
        """Return a place below another one."""
        return self.node((*node.path, *keys), schema)

    def shown(self, path: Path) -> str:
        """Return a path as users read it."""
        text = self._at
        for key in path:
            if isinstance(key, int):
                text += f"[{key}]"
            elif isinstance(key, str):
                name = "".join(char if char.isprintable() else repr(char)[1:-1] for char in key)
                name = name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}..."
                text += f".{name}" if text else name
        return text

    def wrong(self, node: Node, keyword: str, why: str) -> SchemaError:
        """Return the error of a schema that is none."""
        return SchemaError(self.shown((*node.path, keyword) if keyword else node.path), why)

    def leave_out(self, node: Node, keyword: str, why: str) -> None:
        """Note a keyword that no grammar holds to. Raises SchemaError where that is not allowed."""
        if self._is_strict:
            raise SchemaError(self.shown((*node.path, keyword)), why)
        self.note(node, keyword)

    def note(self, node: Node, keyword: str) -> None:
        """Note an annotation that no grammar holds to."""
        self.ignored[self.shown((*node.path, keyword))] = None

    def spend(self, amount: int = 1) -> None:
        """Count work. Raises SchemaError if it becomes too much."""
        self._num_spent += amount
        if self._num_spent > _MOST_SPENT:
            raise SchemaError(
                self._at, "the schema is too large: its parts combine in too many ways"
            )

    # --- what joins and chooses ----------------------------------------------------------------

    def branches(self, goal: Subschemas) -> list[Alternative]:
        """Return the ways in which a value may fit all places of a goal."""
        return self._joined([self._expand(node, ()) for node in goal])

    def _joined(self, parts: Sequence[list[Alternative]]) -> list[Alternative]:
        """Return each way to take one branch of every part."""
        branches: list[Alternative] = [()]
        for part in parts:
            is_choice = len(part) > 1 and len(branches) > 1
            self.spend(len(branches) * len(part))
            branches = [tuple(dict.fromkeys(one + two)) for one in branches for two in part]
            if is_choice or len(branches) > 8:
                branches = [branch for branch in branches if not self.is_dead(branch)]
            if len(branches) > _MOST_BRANCHES:
                raise SchemaError(self._at, "the schema combines too many choices")
        return branches

    def _expand(self, node: Node, trail: tuple[Node, ...]) -> list[Alternative]:
        if node in trail:
            raise self.wrong(node, "", "it refers to itself, so nothing can be known to fit it")
        if node in self._expanded:
            return self._expanded[node]
        self.spend()
        if isinstance(node.schema, bool):
            return [()] if node.schema else []
        if not isinstance(node.schema, Mapping):
            raise self.wrong(node, "", "a schema must be an object, true or false")
        within = (*trail, node)
        parts: list[list[Alternative]] = [[(SchemaRef(node),)]]
        for keyword, join in _JOINS.items():
            if keyword in node.schema:
                parts += join(self, node, within)
        branches = self._joined(parts)
        if "unevaluatedProperties" in node.schema or "unevaluatedItems" in node.schema:
            branches = [self._scoped(node, branch) for branch in branches]
        self._expanded[node] = branches
        return branches

    @staticmethod
    def _scoped(node: Node, branch: Alternative) -> Alternative:
        scope = tuple(leaf.node for leaf in branch)
        return tuple(SchemaRef(leaf.node, scope) if leaf.node is node else leaf for leaf in branch)

    def _schemas(self, node: Node, keyword: str) -> list[Node]:
        """Return the places in a keyword's list of schemas."""
        listed = node.keywords[keyword]
        if not isinstance(listed, list) or not listed:
            raise self.wrong(node, keyword, "it must be a list of schemas")
        return [self.inner(node, keyword, i, schema=one) for i, one in enumerate(listed)]

    def _derive(self, node: Node, keyword: str, number: int, schema: Any) -> Node:
        """Return a place for a schema that is made of others."""
        return self.inner(node, keyword, (number,), schema=schema)

    def _all_of(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        for one in self._schemas(node, "allOf"):
            yield self._expand(one, within)

    def _any_of(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        yield self._any(self._schemas(node, "anyOf"), within)

    def _any(self, nodes: Iterable[Node], within: tuple[Node, ...]) -> list[Alternative]:
        return list(dict.fromkeys(chain.from_iterable(self._expand(one, within) for one in nodes)))

    def _one_of(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        """Yield the branches of each schema that fit none of the others."""
        nodes = self._schemas(node, "oneOf")
        ways = [self._expand(one, within) for one in nodes]
        branches = list[Alternative]()
        try:
            for i, way in enumerate(ways):
                parts = [way]
                for j, other in enumerate(ways):
                    if i != j and not self._are_apart(way, other):
                        away = self._derive(node, "oneOf", j, self._negated(nodes[j]))
                        parts.append(self._expand(away, within))
                branches += self._joined(parts)
        except Unenforceable:
            self.leave_out(node, "oneOf", "no grammar can tell that only one of these fits")
            branches = list(chain.from_iterable(ways))
        yield list(dict.fromkeys(branches))

    def _are_apart(self, way: list[Alternative], other: list[Alternative]) -> bool:
        self.spend(len(way) * len(other))
        return all(self.is_dead(tuple(dict.fromkeys(one + two))) for one in way for two in other)

    def _negated(self, node: Node) -> Any:
        try:
            return negated(node.schema, self._resolved, self.shown(node.path))
        except (TypeError, AttributeError):
            raise self.wrong(node, "", "it is not a schema") from None

    def _resolved(self, reference: object) -> Any:
        return self._target(reference, self.node((), self.root)).schema

    def _not(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        try:
            schema = self._negated(self.inner(node, "not", schema=node.keywords["not"]))
        except Unenforceable as error:
            self.leave_out(
                node, "not", f"no grammar can hold to it: {error.path} cannot be negated"
            )
            return
        yield self._expand(self._derive(node, "not", 0, schema), within)

    def _if(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        keywords = node.keywords
        if "then" not in keywords and "else" not in keywords:
            return
        parts = {
            key: self._expand(self.inner(node, key, schema=keywords.get(key, True)), within)
            for key in ("if", "then", "else")
        }
        branches = self._joined([parts["if"], parts["then"]])
        try:
            schema = self._negated(self.inner(node, "if", schema=keywords["if"]))
            away = self._expand(self._derive(node, "if", 0, schema), within)
            branches += self._joined([away, parts["else"]])
        except Unenforceable:  # what fits both fits in any case
            branches += self._joined([parts["then"], parts["else"]])
        yield list(dict.fromkeys(branches))

    def _dependent(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        """Yield, for each name that needs others, what has it not and what has them all."""
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for i, (name, needed) in enumerate(self.names(node, keyword).items()):
                without = {Mark.UNSAID: True, "properties": {name: False}}
                names = [name, *needed] if isinstance(needed, list) else [name]
                required = {Mark.UNSAID: True, "required": names}
                having = self._derive(node, keyword, 2 * i + 1, required)
                ways = [self._expand(having, within)]
                if not isinstance(needed, list):
                    ways.append(
                        self._expand(self.inner(node, keyword, name, schema=needed), within)
                    )
                absent = self._expand(self._derive(node, keyword, 2 * i, without), within)
                yield absent + self._joined(ways)

    def _listed(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        """Yield the values of ``enum`` and ``const`` as branches, if lists or objects are there."""
        for keyword in ("enum", "const"):
            values = values_of(node, keyword)
            if keyword == "enum" and not isinstance(node.keywords.get(keyword, []), list):
                raise self.wrong(node, keyword, "it must be a list of values")
            if values is None or all(map(is_scalar, values)):
                continue
            schemas: list[Any] = [_schema_of(one) for one in values if not is_scalar(one)]
            scalars = [one for one in values if is_scalar(one)]
            schemas += [{"enum": scalars}] if scalars else []
            nodes = [self._derive(node, keyword, i, one) for i, one in enumerate(schemas)]
            yield self._any(nodes, within)

    def _ref(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        yield self._expand(self._target(node.keywords["$ref"], node), within)

    def _no_ref(self, node: Node, within: tuple[Node, ...]) -> Iterator[list[Alternative]]:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in node.keywords:
                self.leave_out(node, keyword, "such references are not followed: use $ref")
        yield from ()

    def _target(self, reference: object, node: Node) -> Node:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self.wrong(node, "$ref", f"{reference!r:.80} is not in this schema: begin with #")
        path, schema = list[object](), self.root
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchored(pointer, node)
        for part in pointer.split("/")[1:]:
            key: object = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and part.isascii() and part.isdigit():
                key = int(part)
            try:
                schema = schema[key]
            except (KeyError, IndexError, TypeError):
                raise self.wrong(node, "$ref", f"{reference!r:.80} is not in this schema") from None
            path.append(key)
        return self.node(tuple(path), schema)

    def _anchored(self, name: str, node: Node) -> Node:
        if self._anchors is None:
            self._anchors = dict(_anchors_in(self.root))
        if name not in self._anchors:
            raise self.wrong(node, "$ref", f"{'#' + name!r:.80} is not in this schema")
        schema = self.root
        for key in self._anchors[name]:
            schema = schema[key]
        return self.node(self._anchors[name], schema)

    # --- values of keywords --------------------------------------------------------------------

    def names(self, node: Node, keyword: str) -> Mapping[str, Any]:
        """Return a keyword's object, empty if it is not there."""
        value = node.keywords.get(keyword, {})
        if not isinstance(value, Mapping):
            raise self.wrong(node, keyword, "it must be an object")
        return value

    def texts(self, node: Node, keyword: str) -> list[str]:
        """Return a keyword's list of texts, empty if it is not there."""
        value = node.keywords.get(keyword, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(node, keyword, "it must be a list of texts")
        return value

    def count(self, node: Node, keyword: str) -> int | None:
        """Return a keyword's number of something, None if it is not there."""
        value = node.keywords.get(keyword)
        if value is None:
            return None
        is_whole = isinstance(value, float) and value.is_integer()
        if (type(value) is not int and not is_whole) or not 0 <= value < 1 << 31:
            raise self.wrong(node, keyword, "it must be a whole number from 0 to 2147483647")
        return int(value)

    def number(self, node: Node, keyword: str) -> int | float | None:
        """Return a keyword's number, None if it is not there."""
        value = node.keywords.get(keyword)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self.wrong(node, keyword, "it must be a number")
        if type(value) is float and not math.isfinite(value):
            raise self.wrong(node, keyword, "it must be a number that floating point holds")
        return value  # type: ignore[no-any-return]


def values_of(node: Node, keyword: str) -> list[Any] | None:
    """Return the values that a place lists, None if it lists none."""
    if keyword not in node.keywords:
        return None
    value = node.keywords[keyword]
    if keyword == "const":
        return [value]
    return list(value) if isinstance(value, list) else []


def is_scalar(value: object) -> bool:
    """Return whether a JSON value has no parts."""
    return not isinstance(value, list | Mapping)


def _schema_of(value: Any) -> dict[str, Any]:
    """Return the schema of one list or object."""
    if isinstance(value, list):
        return {
            "type": "array", "prefixItems": [{"const": one} for one in value], "items": False,
            "minItems": len(value),
        }  # fmt: skip
    return {
        "type": "object", "properties": {name: {"const": one} for name, one in value.items()},
        "required": list(value), "additionalProperties": False,
    }  # fmt: skip


def _anchors_in(schema: Any, path: Path = ()) -> Iterator[tuple[str, Path]]:
    todo: list[tuple[Any, Path]] = [(schema, path)]
    while todo:
        part, at = todo.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$anchor"), str):
                yield part["$anchor"], at
            todo += [(value, (*at, key)) for key, value in part.items()]
        elif isinstance(part, list):
            todo += [(value, (*at, i)) for i, value in enumerate(part)]


_Join = Callable[[SchemaReader, Node, tuple[Node, ...]], Iterator[list[Alternative]]]
_JOINS: dict[str, _Join] = {
    "enum": SchemaReader._listed,
    "const": SchemaReader._listed,
    "$ref": SchemaReader._ref,
    "$dynamicRef": SchemaReader._no_ref,
    "$recursiveRef": SchemaReader._no_ref,
    "allOf": SchemaReader._all_of,
    "anyOf": SchemaReader._any_of,
    "oneOf": SchemaReader._one_of,
    "not": SchemaReader._not,
    "if": SchemaReader._if,
    "dependentRequired": SchemaReader._dependent,
    "dependentSchemas": SchemaReader._dependent,
    "dependencies": SchemaReader._dependent,
}
