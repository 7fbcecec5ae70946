"""What the leaves of a branch together say of a value's type, and of values without parts.

Formats of strings that an answer keeps to are patterns: all of JSON Schema's but ``regex``. Others
are named as not enforced: JSON Schema takes a format for an annotation by default. Fractions of
seconds and other numbers have a bound: a small model writes digits for ever otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from ridgeline.text.json_schema import automata, numbers, patterns
from ridgeline.text.json_schema.charsets import is_written
from ridgeline.text.json_schema.nodes import (
    Alternative,
    Mark,
    Node,
    SchemaReader,
    is_scalar,
    values_of,
)
from ridgeline.text.json_schema.numbers import ANY_NUMBER, Range
from ridgeline.text.json_schema.patterns import Pattern, PatternError

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_CLOCK = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
)
_N = "[0-9]{1,9}"
_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DATE = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H}:){{7}}{_H}"]
    + [
        f"{f'{_H}(?::{_H}){{0,{before - 1}}}' if before else ''}::"
        f"(?:{_H}(?::{_H}){{0,{6 - before}}})?"
        for before in range(7)
    ]
    + [f"(?:{_H}:){{7}}:"]
)
_WORD = r"[a-zA-Z0-9!#$%&'*+\/=?^_`{|}~-]+"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
# What may stand in an IRI beside a URI's characters (RFC 3987, ucschar).
_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16 | first)}-{chr(plane << 16 | 0xFFFD)}"
    for plane in range(1, 15)
    for first in [0x1000 if plane == 14 else 0]
)
# Letters of which a host's label may consist, in any order: lower case, written from left to right,
# and none that joins another. A label of them has at most 63 bytes as ASCII, whichever they are.
_IDN_LETTERS = "a-z0-9ß-öø-ÿα-ρς-ωа-яぁ-ゖァ-ヺ一-龥가-힣"
_PLAIN_PART = "[a-zA-Z0-9]{1,20}"
_IDN_LABEL = rf"(?:{_PLAIN_PART}(?:-{_PLAIN_PART}){{0,2}}|[{_IDN_LETTERS}]{{1,10}})"
_IDN_HOST = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}}"
_IDN_WORD = rf"[a-zA-Z0-9!#$%&'*+\/=?^_`{{|}}~{_UCS}-]+"
_POINTER = r"(?:\/(?:[^~\/]|~[01])*)*"
_NAME_PART = "(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})"
_VARIABLE = rf"{_NAME_PART}(?:\.?{_NAME_PART})*(?::[1-9][0-9]{{0,3}}|\*)?"
_LITERAL = rf"[!#-$&(-;=?-\[\]_a-z~{_UCS}]|%[0-9a-fA-F]{{2}}"  # RFC 6570
TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))


def _uri_and_reference(more: str) -> tuple[str, str]:
    """Return patterns of a URI, and of a reference to one, that may also have characters ``more``.

    After RFC 3986; a port has at most five digits.
    """
    plain, encoded = rf"a-zA-Z0-9._~!$&'()*+,;=\-{more}", "%[0-9a-fA-F]{2}"
    char = f"(?:[{plain}:@]|{encoded})"
    user, host = f"(?:[{plain}:]|{encoded})*", f"(?:[{plain}]|{encoded})*"
    authority = rf"(?:{user}@)?(?:\[(?:{_IPV6})\]|{host})(?::[0-9]{{0,5}})?"
    path = rf"(?:\/{char}*)*"
    rooted = rf"\/\/{authority}{path}|\/(?:{char}+{path})?"
    first = f"(?:[{plain}@]|{encoded})+"  # of a relative path: a colon would end a scheme
    end = rf"(?:\?(?:{char}|[\/?])*)?(?:#(?:{char}|[\/?])*)?"
    uri = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{rooted}|(?:{char}+{path})?)"
    return f"^(?:{uri}){end}$", f"^(?:{uri}|{rooted}|(?:{first}{path})?){end}$"


_URI, _URI_REFERENCE = _uri_and_reference("")
_IRI, _IRI_REFERENCE = _uri_and_reference(_UCS)

FORMATS = {
    "date-time": f"^(?!0000){_DAY}[tT]{_CLOCK}$",
    "time": f"^{_CLOCK}$",
    "date": f"^(?!0000){_DAY}$",
    "duration": f"^P(?:{_DATE}(?:{_TIME})?|{_TIME}|{_N}W)$",
    "email": rf"^{_WORD}(?:\.{_WORD})*@(?:{_HOST}|\[{_IPV4}\])$",
    "idn-email": rf"^{_IDN_WORD}(?:\.{_IDN_WORD})*@{_IDN_HOST}$",
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_IDN_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": rf"^(?:{_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})$",
}


@dataclass
class ValueConstraints:
    """What a value may be.

    Attributes:
        types: of JSON, integers among numbers.
        numbers: which ones.
        least: characters of a string.
        most: the same, None for any number of them.
        must: what strings match, whole.
        must_not: what they do not match.
        listed: all values without parts, None if they are not listed.
        not_listed: values that it cannot be.
    """

    types: frozenset[str] = TYPES
    numbers: Range = ANY_NUMBER
    least: int = 0
    most: int | None = None
    must: list[patterns.Regex] = field(default_factory=list)
    must_not: list[patterns.Regex] = field(default_factory=list)
    listed: list[Any] | None = None
    not_listed: list[Any] = field(default_factory=list)

    @property
    def pattern(self) -> Pattern:
        """What strings must match and must not."""
        return Pattern(tuple(self.must), tuple(self.must_not))

    @property
    def has_scalars(self) -> bool:
        """Whether there may be a value without parts."""
        if self.listed is not None:
            return any(True for _ in self.values())
        lowest = [x for x in (self.numbers.low, self.numbers.above) if x is not None]
        highest = [x for x in (self.numbers.high, self.numbers.below) if x is not None]
        has_numbers = not lowest or not highest or max(lowest) <= min(highest)
        return (
            ("null" in self.types and None not in self.not_listed)
            or ("boolean" in self.types)
            or ("number" in self.types and has_numbers)
            or ("string" in self.types and (self.most is None or self.least <= self.most))
        )

    def values(self) -> Iterator[Any]:
        """Yield the values that are listed and fit, each once."""
        keys = set[object]()
        for value in self.listed or ():
            key = key_of(value)
            if key not in keys and self.has(value):
                keys.add(key)
                yield value

    def has(self, value: Any) -> bool:
        """Return whether a value without parts fits, but for what is listed."""
        if key_of(value) in map(key_of, self.not_listed):
            return False
        if value is None:
            return "null" in self.types
        if isinstance(value, bool):
            return "boolean" in self.types
        if isinstance(value, int | float):
            return "number" in self.types and self.numbers.has(value)
        return "string" in self.types and self.has_text(value)

    def has_text(self, text: str) -> bool:
        """Return whether a string fits, but for what is listed."""
        try:
            return (
                is_written(text)
                and self.least <= len(text)
                and (self.most is None or len(text) <= self.most)
                and all(automata.matches(one, text) for one in self.must)
                and not any(automata.matches(one, text) for one in self.must_not)
            )
        except PatternError:
            return False  # it takes too long to know


def key_of(value: Any) -> object:
    """Return what is equal for equal values of JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return numbers.decimal(value)


def shape_of(reader: SchemaReader, branch: Alternative) -> ValueConstraints:
    """Return what the leaves of a branch say. What is not held to is left out."""
    shape = ValueConstraints()
    for leaf in branch:
        node = leaf.node
        shape.types &= _types(reader, node)
        _add_lists(shape, node)
        shape.numbers = _narrowed(shape.numbers, reader, node)
        _add_strings(shape, reader, node)
    barred = (x for x in shape.not_listed if isinstance(x, int | float) and not isinstance(x, bool))
    shape.numbers = shape.numbers._replace(not_in=tuple(map(numbers.decimal, barred)))
    return shape


def _types(reader: SchemaReader, node: Node) -> frozenset[str]:
    said = node.keywords.get("type")
    if said is None:
        return TYPES
    names = [said] if isinstance(said, str) else said
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise reader.wrong(node, "type", "it must be the name of a type, or a list of such")
    for one in names:
        if one not in TYPES and one != "integer":
            raise reader.wrong(node, "type", f"{one!r:.40} is not a type of JSON")
    return frozenset("number" if one == "integer" else one for one in names)


def _add_lists(shape: ValueConstraints, node: Node) -> None:
    for keyword in ("enum", "const"):
        values = values_of(node, keyword)
        if values is None or not all(map(is_scalar, values)):
            continue
        if shape.listed is not None:
            keys = set(map(key_of, values))
            values = [one for one in shape.listed if key_of(one) in keys]
        shape.listed = values
    shape.not_listed += node.keywords.get(Mark.NOT_ENUM, ())


def _narrowed(bounds: Range, reader: SchemaReader, node: Node) -> Range:
    """Return the numbers that also fit what one place says."""
    said = node.keywords.get("type")
    types = said if isinstance(said, list) else [said]
    is_integer = bounds.is_integer or ("integer" in types and "number" not in types)
    low, above = _bound(reader, node, "minimum", "exclusiveMinimum", max)
    high, below = _bound(reader, node, "maximum", "exclusiveMaximum", min)
    multiples = bounds.multiples
    step = reader.number(node, "multipleOf")
    if step is not None:
        if step <= 0:
            raise reader.wrong(node, "multipleOf", "it must be more than 0")
        multiples = (*multiples, numbers.decimal(step))
    return Range(
        is_integer, _pick(max, bounds.low, low), _pick(min, bounds.high, high),
        _pick(max, bounds.above, above), _pick(min, bounds.below, below), multiples,
    )  # fmt: skip


def _bound(
    reader: SchemaReader, node: Node, plain: str, exclusive: str, stricter: Any
) -> tuple[Decimal | None, Decimal | None]:
    """Return a bound, and one that a number must be beyond; draft 4 says so with true."""
    value, beyond = reader.number(node, plain), node.keywords.get(exclusive)
    if isinstance(beyond, bool):
        beyond, value = (value, None) if beyond else (None, value)
    else:
        beyond = reader.number(node, exclusive)
    return (
        None if value is None else numbers.bound(value, stricter),
        None if beyond is None else numbers.bound(beyond, stricter),
    )


def _pick(choose: Any, one: Decimal | None, other: Decimal | None) -> Decimal | None:
    bounds = [x for x in (one, other) if x is not None]
    return choose(bounds) if bounds else None


def _add_strings(shape: ValueConstraints, reader: SchemaReader, node: Node) -> None:
    least, most = reader.count(node, "minLength"), reader.count(node, "maxLength")
    shape.least = max(shape.least, least or 0)
    shape.most = min((x for x in (shape.most, most) if x is not None), default=None)
    conditions: list[Pattern | None] = [pattern_of(reader, node)]
    if Mark.NOT_PATTERN in node.keywords:
        try:
            conditions.append(patterns.negated(node.keywords[Mark.NOT_PATTERN]))
        except (PatternError, AttributeError, TypeError) as error:  # it may be no text
            reader.leave_out(node, "pattern", f"what does not match it cannot be told: {error}")
    wanted = node.keywords.get("format")
    if isinstance(wanted, str) and wanted in FORMATS:
        conditions.append(patterns.pattern(FORMATS[wanted]))
    elif isinstance(wanted, str):
        reader.note(node, "format")
    for one in conditions:
        if one is not None:
            shape.must += one.must
            shape.must_not += one.must_not


def pattern_of(reader: SchemaReader, node: Node) -> Pattern | None:
    """Return the pattern of a place, None if it has none that can be held to."""
    source = node.keywords.get("pattern")
    if source is None:
        return None
    if not isinstance(source, str):
        raise reader.wrong(node, "pattern", "it must be text")
    try:
        return patterns.pattern(source)
    except PatternError as error:
        reader.leave_out(node, "pattern", f"{source!r:.60} cannot be held to: {error}")
        return None


def can_have_text(shape: ValueConstraints) -> bool:
    """Return whether there is a string that fits, but for what is listed."""
    if shape.most is not None and shape.least > shape.most:
        return False
    if len(shape.must) + len(shape.must_not) + (shape.least > 0 or shape.most is not None) < 2:
        return all(one != patterns.Alt(()) for one in shape.must)
    return automata.can_be(shape.pattern, shape.least, shape.most)


def string_terminal(shape: ValueConstraints, barred: Iterable[str] = ()) -> str:
    """Return the terminal of strings that fit and are none of ``barred``, empty for none."""
    if not can_have_text(shape):
        return ""
    wanted = [patterns.written(one) for one in shape.must]
    if shape.least or shape.most is not None:
        length = patterns.Rep(patterns.ANY.part, shape.least, shape.most)
        wanted.append(patterns.written(length))
    terms = [f"/{one}/" for one in wanted or [patterns.written(patterns.ANY)]]
    texts = [one for one in barred if is_written(one)]
    texts += [one for one in shape.not_listed if isinstance(one, str) and is_written(one)]
    nots = [*shape.must_not, *([patterns.literals(texts)] if texts else [])]
    return " & ".join([*terms, *(f"~/{patterns.written(one)}/" for one in nots)])
