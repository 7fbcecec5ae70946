"""The grammar of a message that may have reasoning, calls of tools, or a form: in Lark's notation.

As llguidance reads it: ``[lazy]`` ends a piece of text at the first marker, ``<[id]>`` is a control
token, ``&`` and ``~`` intersect and negate regular expressions, and ``@body`` and ``@s0``, ``@s1``
and so on are other grammars, which go with this one: those of schemas. So a call always parses and
fits its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ridgeline.text.messages.message import MessageForm, ReasoningMarkers
from ridgeline.text.messages.tool_calls import is_text
from ridgeline.text.messages.tools import (
    BARE,
    FENCE,
    JSON_SPACE,
    Tool,
    ToolFormat,
    ToolUse,
    unmarked_parts,
    without_markers,
)

_ANY = r"(.|\n)*"


class Framed(NamedTuple):
    """A grammar that calls others.

    Attributes:
        text: of the grammar.
        schemas: those of ``@s0``, ``@s1`` and so on: each a document, where inside of it the schema
            is, what stands before paths, and whether it is strict.
        ignored: paths of what schemas say and the grammar does not hold to.
    """

    text: str
    schemas: tuple[dict[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()


def message_grammar(form: MessageForm, special_ids: Mapping[str, int]) -> Framed:
    """Return the grammar of a message that may have what ``form`` says.

    ``special_ids`` are markers that are control tokens, by their spelling. Raises ValueError if
    the format of calls cannot say what the schema of a strict tool does.
    """
    schemas = _Schemas()
    markers = _Markers(special_ids)
    rules = [f"ws: /{_WHITE}/"]
    main, main_at_start = _main(form, markers, rules, schemas)
    if form.reasoning is None:
        start = main
    elif form.is_reasoning:
        rules += markers.ending_at("think", form.reasoning.end)
        start = f"think ({main})"
    else:
        rules += _whole_reasoning(form.reasoning, markers)
        start = f"think ({main}) | {main_at_start}"
    text = "\n".join([f"start: {start}", *rules])
    return Framed(text, tuple(schemas.tool_schemas), tuple(schemas.ignored))


class _Schemas:
    """Collects the schemas that the rules call, and what of them is lost."""

    def __init__(self) -> None:
        self.tool_schemas: list[dict[str, Any]] = []
        self.ignored: list[str] = []

    def add(self, i: int, tool: Tool, schema: Any, inside: tuple[str, ...] = ()) -> str:
        """Return how a rule calls what fits a schema, or a part of it, of the i-th tool."""
        at = f"tools[{i}].function.parameters"
        tool_schema = {"schema": schema, "inside": inside, "at": at, "is_strict": tool.is_strict}
        self.tool_schemas.append(tool_schema)
        return f"@s{len(self.tool_schemas) - 1}"

    def lose(self, i: int, tool: Tool, keyword: str, why: str) -> None:
        """Note a keyword that is left out. Raises ValueError if the tool is strict."""
        path = f"tools[{i}].function.parameters.{keyword}"
        if tool.is_strict:
            raise ValueError(f"{path}: {why}")
        self.ignored.append(path)


_SPACE = f"[{JSON_SPACE}]".encode("unicode_escape").decode()
_WHITE = _SPACE + "{0,4}"
_GAP = _SPACE + "{0,20}"  # in calls that are indented


class _Markers:
    """How markers are written: as a control token where they are one, as text elsewhere."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids

    def is_special(self, marker: str) -> bool:
        return marker in self._special_ids

    def one(self, marker: str) -> str:
        """Return the marker itself."""
        special = self._special_ids.get(marker)
        return json.dumps(marker) if special is None else f"<[{special}]>"

    def ending_at(self, rule: str, marker: str, start: str = _ANY, without: str = "") -> list[str]:
        """Return rules for text from ``start`` on until the marker, which belongs to it."""
        if self.is_special(marker):  # and the text must not spell what readers take for it
            spelled = f" & ~/{_ANY}{_regex(marker)}{_ANY}/"
            return [f"{rule}: {rule}_text {self.one(marker)}",
                    f"{rule}_text: {rule.upper()}_TEXT",
                    f"{rule.upper()}_TEXT: /{start}/{spelled}{without}"]  # fmt: skip
        if not without:
            return [f"{rule}[lazy]: /{start}{_regex(marker)}/"]
        return [f"{rule}[lazy]: {rule.upper()}_TEXT",
                f"{rule.upper()}_TEXT: /{start}{_regex(marker)}/{without}"]  # fmt: skip


def _whole_reasoning(reasoning: ReasoningMarkers, markers: _Markers) -> list[str]:
    """Return rules for reasoning with both of its markers."""
    if markers.is_special(reasoning.begin):
        rules = markers.ending_at("thought", reasoning.end)
        return [f"think: ws {markers.one(reasoning.begin)} thought", *rules]
    return markers.ending_at("think", reasoning.end, rf"\s*{_regex(reasoning.begin)}{_ANY}")


def _main(
    form: MessageForm, markers: _Markers, rules: list[str], schemas: _Schemas
) -> tuple[str, str]:
    """Return the message without reasoning, and the same where reasoning might begin instead."""
    if form.tools is None:
        if form.has_body:
            return "ws @body", "ws @body"
        rules.append(f"text: /{_ANY}/")
        return "text", "text"
    tool_format, use = form.tools
    rules += _calls(tool_format, use, markers, schemas)
    if use.is_required or form.has_body:
        calls = "block"
        if tool_format.separator is None and use.is_parallel:
            calls += " (ws block)*"
        main = f"ws ({calls})" if use.is_required else f"ws (@body | {calls})"
        return main, main
    main = _text_or_calls(tool_format, use, markers, rules, "", "")
    if form.reasoning is None or markers.is_special(form.reasoning.begin):
        return main, main
    without = rf" & ~/\s*{_regex(form.reasoning.begin)}{_ANY}/"
    return main, _text_or_calls(tool_format, use, markers, rules, "_at_start", without)


def _text_or_calls(
    form: ToolFormat, use: ToolUse, markers: _Markers, rules: list[str], suffix: str, without: str
) -> str:
    """Return a message of text, calls, or text and then calls.

    ``without`` is what its beginning must not be, and ``suffix`` ends the names of such rules.
    """
    text, head = f"text{suffix}", f"head{suffix}"
    rules.append(f"{text}: {text.upper()}")
    bare = " | bare" if form.key else ""
    if form.key:
        unmarked = _unmarked(form, [tool.name for tool in use.tools])
        without += f" & ~/{_SPACE}*{unmarked}{_ANY}/"
    if not form.begin:
        rules.append(f"{text.upper()}: /{_ANY}/{without}")
        return f"{text}{bare}"
    spelled = f" & ~/{_ANY}{_regex(form.begin)}{_ANY}/"
    rules.append(f"{text.upper()}: /{_ANY}/{spelled}{without}")
    rules += markers.ending_at(head, form.begin, without=without)
    further_blocks = " (head rest)*" if form.separator is None and use.is_parallel else ""
    return f"{text} | {head} rest{further_blocks} text{bare}"


def _calls(form: ToolFormat, use: ToolUse, markers: _Markers, schemas: _Schemas) -> Iterator[str]:
    """Yield rules: ``block`` has all calls of one marker, ``rest`` what follows the marker."""
    calls = "call" + _further_calls(form, use)
    rest = f"ws {json.dumps(form.opening)} ws {calls}" if form.opening else f"ws {calls}"
    for closing in filter(None, (form.closing, form.end)):
        # Between the two is nothing: readers look for them together.
        ws = "" if closing == form.end and form.closing else "ws "
        rest += f" {ws}{markers.one(closing)}"
    yield f"rest: {rest}"
    yield f"block: {markers.one(form.begin)} rest" if form.begin else "block: rest"
    if form.key:
        yield from _json_calls(form, use, schemas)
        return
    yield f"call: {_any_of('call', use)}"
    for i, tool in enumerate(use.tools):
        if form.quote:
            yield from _quoted_call(i, tool, form.quote, markers, schemas)
        else:
            yield from _xml_call(i, tool, schemas)


def _any_of(rule: str, use: ToolUse) -> str:
    return "(" + " | ".join(f"{rule}_{i}" for i in range(len(use.tools))) + ")"


def _further_calls(form: ToolFormat, use: ToolUse) -> str:
    """Return the calls that may follow one behind the same marker."""
    if form.separator is None or not use.is_parallel:
        return ""
    separator = f"{json.dumps(form.separator)} ws " if form.separator else ""
    return f" (ws {separator}call)*"


def _json_calls(form: ToolFormat, use: ToolUse, schemas: _Schemas) -> Iterator[str]:
    """Yield rules: ``call`` is one in the format, ``bare`` are calls without its markers.

    What all tools have in common stands once, as far as it can: else many would be too large.
    """
    yield f'call: {json.dumps(BARE)} {_any_of("named", use)} "}}"'
    between = f', "{form.key}": '
    yield f"between: {json.dumps(between)}"
    yield f"gap: /{_GAP}/"
    for i, tool in enumerate(use.tools):
        quoted = json.dumps(f'{tool.name}"')
        yield f"named_{i}: {quoted} between args_{i}"
        yield f"args_{i}: {schemas.add(i, tool, _as_object(tool.parameters))}"
    # White space belongs to the name, or a lexer would take both for the beginning of text.
    first = f"bare_begin {_any_of('named', use)}"
    if unmarked_parts(form, [tool.name for tool in use.tools]) == ((BARE,),):
        yield rf"bare_begin: /{_WHITE}{_regex(BARE)}/"
    else:
        first = _any_of("unmarked", use)
        for i, tool in enumerate(use.tools):
            yield f"unmarked_{i}: unmarked_name_{i} gap args_{i}"
            yield f"unmarked_name_{i}: /{_SPACE}*{_unmarked(form, [tool.name])}/"
    further_calls = _further_calls(without_markers(form), use)
    yield f'bare: {first} gap "}}"{further_calls} (gap {json.dumps(FENCE)})?'


def _unmarked(form: ToolFormat, names: Sequence[str]) -> str:
    """Return a regular expression of what a call without marker begins with.

    White space has no bound in it: a count would take the library's states, of each tool.
    """
    parts = unmarked_parts(form, names)
    return f"{_SPACE}*".join(f"({'|'.join(map(_regex, options))})" for options in parts)


def _quoted_call(
    i: int, tool: Tool, spelling: str, markers: _Markers, schemas: _Schemas
) -> Iterator[str]:
    yield f"call_{i}: {json.dumps(f'call:{tool.name}')} args_{i}"
    if can_be_quoted(tool.parameters, spelling):
        ending = partial(markers.ending_at, marker=spelling)
        quote = Quote(spelling, markers.one(spelling), ending, partial(schemas.add, i, tool))
        yield from quoted_object(f"args_{i}", tool.parameters, quote)
    else:
        yield f"args_{i}: {schemas.add(i, tool, _as_object(tool.parameters))}"


# What an object's schema may say that arguments in XML cannot be held to: they have the names of
# ``properties``, in their order.
_NOT_IN_XML = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "dependentRequired",
    "dependentSchemas", "dependencies", "minProperties", "maxProperties", "propertyNames",
)  # fmt: skip


def _xml_call(i: int, tool: Tool, schemas: _Schemas) -> Iterator[str]:
    """Yield the rules of a call whose arguments stand in the order of the schema."""
    schema = tool.parameters
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    why = "arguments that are not JSON cannot be held to it"
    for keyword in _NOT_IN_XML:
        if keyword in schema:
            schemas.lose(i, tool, keyword, why)
    if not isinstance(properties, Mapping):
        schemas.lose(i, tool, "properties", "it must be an object")
        properties = {}
    if "object" not in (schema.get("type", "object"), *_listed(schema.get("type"))):
        schemas.lose(i, tool, "type", "arguments are an object")
    if not isinstance(required, list | tuple) or any(not isinstance(x, str) for x in required):
        schemas.lose(i, tool, "required", "it must be a list of names")
        required = []
    if any(name not in properties for name in required):
        schemas.lose(i, tool, "required", why)
    parts = []
    for j, (name, value) in enumerate(properties.items()):
        if value is False:
            continue
        parts.append(f"arg_{i}_{j}" + ("" if name in required else "?"))
        opening = json.dumps(f"<parameter={name}>\n")
        yield f'arg_{i}_{j}: {opening} value_{i}_{j} "\\n"'
        yield from _xml_value(f"value_{i}_{j}", value, i, tool, name, schemas)
    head = json.dumps(f"<function={tool.name}>\n")
    yield f'call_{i}: {head} {" ".join(parts)} "</function>"'


def _xml_value(
    rule: str, value: Any, i: int, tool: Tool, name: str, schemas: _Schemas
) -> Iterator[str]:
    """Yield the rule of a value and of the marker after it."""
    end = "\n</parameter>"
    if not is_text(value):
        yield f"{rule}: {rule}_json {json.dumps(end)}"
        yield f"{rule}_json: {schemas.add(i, tool, tool.parameters, ('properties', name))}"
    elif "enum" in value:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value["enum"])
        yield f"{rule}: ({texts}) {json.dumps(end)}"
    else:
        yield rf"{rule}[lazy]: /{_ANY}{_regex(end)}/"


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with arguments that are an object, whatever else it says."""
    return {"type": "object", **schema}


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SAID = {"type", "title", "description", "default", "examples"}
_OF_TYPE = {
    "string": {"enum"},
    "array": {"items"},
    "object": {"properties", "required", "additionalProperties"},
}
_NUMBERS = ("integer", "number", "boolean", "null")


class Quote(NamedTuple):
    """The marker around texts.

    Attributes:
        spelling: of the marker.
        mark: the marker in a grammar.
        ending: returns rules for a text and the marker after it, by the name of the first.
        add: returns how a rule calls what fits a schema of numbers, true, false or null.
    """

    spelling: str
    mark: str
    ending: Callable[[str], list[str]]
    add: Callable[[Any], str]


def can_be_quoted(schema: object, spelling: str, *, is_whole: bool = True) -> bool:
    """Return whether rules here say all that a schema does; ``is_whole``: of all arguments."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type", "object" if is_whole else None)
    if is_whole and kind != "object":
        return False
    if kind in _NUMBERS:
        return True
    keywords = _SAID | _OF_TYPE[kind] if isinstance(kind, str) and kind in _OF_TYPE else set()
    if any(key not in keywords for key in schema) or not keywords:
        return False
    if kind == "string":
        options = schema.get("enum", [""])
        return bool(options) and _are_texts(options) and not any(spelling in one for one in options)
    if kind == "array":
        return can_be_quoted(schema.get("items"), spelling, is_whole=False)
    parts, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(parts, Mapping) or not _are_texts(required):
        return False
    if any(name not in parts for name in required):
        return False
    if not parts and schema.get("additionalProperties", True) is not False:
        return False  # any object
    return all(
        _KEY.fullmatch(key) and can_be_quoted(part, spelling, is_whole=False)
        for key, part in parts.items()
    )


def _are_texts(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(one, str) for one in values)


def quoted_object(rule: str, schema: Mapping[str, Any], quote: Quote) -> Iterator[str]:
    """Yield the rules of an object; its keys come in the order in which templates write them."""
    parts, required = schema.get("properties", {}), schema.get("required", [])
    names = sorted(parts, key=str.lower)
    yield f'{rule}: "{{" {rule}_first_0 "}}"'
    for j, name in enumerate(names):  # members from the j-th on, as the first of all or behind one
        here, rest, is_needed = f"{rule}_member_{j}", f"{rule}_more_{j + 1}", name in required
        yield f"{here}: {json.dumps(name + ':')} {rule}_value_{j}"
        yield from _value(f"{rule}_value_{j}", parts[name], quote)
        yield f"{rule}_first_{j}: {here} {rest}" + ("" if is_needed else f" | {rule}_first_{j + 1}")
        yield f'{rule}_more_{j}: "," {here} {rest}' + ("" if is_needed else f" | {rest}")
    yield f'{rule}_first_{len(names)}: ""'
    yield f'{rule}_more_{len(names)}: ""'


def _value(rule: str, schema: Mapping[str, Any], quote: Quote) -> Iterator[str]:
    kind = schema["type"]
    if kind == "object":
        yield from quoted_object(rule, schema, quote)
    elif kind == "array":
        yield f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"'
        yield from _value(f"{rule}_item", schema["items"], quote)
    elif kind == "string" and "enum" in schema:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in schema["enum"])
        yield f"{rule}: {quote.mark} ({texts}) {quote.mark}"
    elif kind == "string":
        yield f"{rule}: {quote.mark} {rule}_text"
        yield from quote.ending(f"{rule}_text")
    else:
        yield f"{rule}: {quote.add(dict(schema))}"
