"""The form that a client wants an answer to have, under each of the names that clients use.

OpenAI's ``response_format``, vLLM's ``structured_outputs`` and the ``guided_`` fields before it,
llama.cpp's ``grammar`` and ``json_schema``, SGLang's ``regex`` and ``ebnf``, Ollama's ``format``.
One kind of constraint for a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from ridgeline.core.structured import KINDS, StructuredOutputsParams
from ridgeline.serve.http.request_body import bad_value

_NAMES = {
    "guided_json": "json", "guided_json_object": "json_object", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar", "grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
FIELDS = ("response_format", "structured_outputs", "format", *_NAMES)
_WHERE = {"json_object": "schema", "json_schema": "json_schema"}  # a type's schema
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_KEYS = tuple(field.name for field in fields(StructuredOutputsParams))


class ResponseFormat(NamedTuple):
    """What was asked for, and which field says so."""

    structured_outputs: StructuredOutputsParams
    param: str


def wanted_form(form_fields: dict[str, Any]) -> ResponseFormat | None:
    """Return the form that a request's fields ask for, if any.

    Args:
        form_fields: those of ``FIELDS`` that a request sets, and ``guided_whitespace_pattern``.

    Raises ApiError, which names the field, for what is not understood and for more than one form.
    """
    forms = list(_forms_in(form_fields))
    if not forms:
        return None
    (param, values), *rest = forms
    if others := [one for one in rest if one[1] != values]:  # some send one form under two names
        why = f"{param} already asks for another form: leave one of them out"
        raise bad_value(others[0][0], why)
    try:
        return ResponseFormat(StructuredOutputsParams(**values), param)
    except ValueError as error:
        raise bad_value(param.split(".")[0], str(error)) from None


def _forms_in(form_fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each form that is asked for: the field that says so, and its values."""
    if (form := form_fields.get("response_format")) is not None:
        yield from _of_openai(form)
    if form := form_fields.get("format"):
        if isinstance(form, str) and form != "json":
            raise bad_value("format", "it must be json, or a JSON schema")
        yield "format", {"json_object": True} if form == "json" else {"json": form}
    if (form := form_fields.get("structured_outputs")) is not None:
        for key in form:
            if key not in _KEYS:
                raise bad_value(f"structured_outputs.{key}", f"it is not one of {', '.join(_KEYS)}")
        values = {key: value for key, value in form.items() if value is not None}
        kinds = [kind for kind in KINDS if kind in values]
        yield f"structured_outputs.{kinds[0]}" if kinds else "structured_outputs", values
    pattern = form_fields.get("guided_whitespace_pattern")
    for name, kind in _NAMES.items():
        if (value := form_fields.get(name)) is not None and value is not False:
            spaced = {"whitespace_pattern": pattern} if pattern is not None else {}
            yield name, {kind: value, **spaced}


def _of_openai(form: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what ``response_format`` asks for, if it is not plain text."""
    kind, schema = form.get("type"), form.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad_value("response_format.type", "it must be text, json_object or json_schema")
    for key in form:
        if key not in ("type", _WHERE.get(kind)):
            raise bad_value(f"response_format.{key}", f"it is not a field of type {kind}")
    if kind == "json_object" and (wanted := form.get("schema")) is not None:  # as llama.cpp has it
        if not isinstance(wanted, dict | bool):
            raise bad_value("response_format.schema", "it must be a JSON schema")
        yield "response_format.schema", {"json": wanted}
    elif kind == "json_object":
        yield "response_format", {"json_object": True}
    if kind != "json_schema":
        return
    where = "response_format.json_schema"
    if not isinstance(schema, dict):
        raise bad_value(where, "it must be an object with a schema")
    for key in schema:
        if key not in _SCHEMA_KEYS:
            raise bad_value(f"{where}.{key}", f"it is not one of {', '.join(_SCHEMA_KEYS)}")
    if not isinstance(schema.get("name"), str | None):  # llama.cpp's clients send none
        raise bad_value(f"{where}.name", "it must be text")
    if not isinstance(schema.get("strict"), bool | None):
        raise bad_value(f"{where}.strict", "it must be true or false")
    if not isinstance(schema.get("schema"), dict | bool):
        raise bad_value(f"{where}.schema", "it must be a JSON schema")
    yield f"{where}.schema", {"json": schema["schema"]}
