"""JSON from a file, made into values of the types that a dataclass or a named tuple declares.

A file may say anything, however it came to. What does not fit is named by its place, so that one
line says it and nothing after it has to expect it. Named tuples are lists in JSON. The other way
round, the engine's records become plain JSON values, as traces have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord

_MOST = 1 << 53  # beyond it JSON's numbers are not exact everywhere, and nothing here counts so far
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}

Reader = Callable[[Any], Any]


class _Unfit(Exception):
    """A value that is not what is declared, and the way to it, the last step first."""

    def __init__(self, value: Any, expected: str) -> None:
        super().__init__()
        self.value, self.expected, self.way = value, expected, list[str]()


def parse(text: str | bytes) -> Any:
    """Return the value of some JSON. Raises ValueError if it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def typed(value: Any, kind: Any) -> Any:
    """Return a JSON value as ``kind``: a dataclass, a named tuple, or what their fields may be.

    Numbers are finite, and whole ones at most 2^53. Raises ValueError that names the field.
    """
    try:
        return _reader(kind)(value)
    except _Unfit as unfit:
        place = ".".join(reversed(unfit.way))
        kinds = {list: "a list", tuple: "a list", dict: "an object", NoneType: "null"}
        shown = kinds.get(type(unfit.value)) or repr(unfit.value)[:60]
        raise ValueError(f"{place or 'it'} is {shown}; expected {unfit.expected}") from None


@cache
def _reader(kind: Any) -> Reader:
    origin, args = get_origin(kind), get_args(kind)
    if kind in _WORDS:
        return lambda value: _plain(value, kind)
    if kind is Any:
        return lambda value: value
    if origin is UnionType:
        (some,) = (_reader(one) for one in args if one is not NoneType)
        return lambda value: None if value is None else some(value)
    if origin is tuple and args[1:] == (...,):
        of_item = _reader(args[0])
        return lambda value: tuple(_each(enumerate(_listed(value)), of_item))
    if origin is tuple:
        of_items = [(str(i), _reader(one)) for i, one in enumerate(args)]
        return lambda value: tuple(_zipped(value, of_items))
    if origin is Mapping:
        of_value = _reader(args[1])
        return lambda value: dict(zip(_named(value), _each(value.items(), of_value), strict=True))
    make: Callable[..., Any] = kind
    of_fields = [(name, _reader(hint)) for name, hint in get_type_hints(kind).items()]
    if not is_dataclass(kind):  # but a named tuple
        return lambda value: make(*_zipped(value, of_fields))
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    return lambda value: make(**_fields(value, dict(of_fields), needed))


def _plain(value: Any, kind: type[Any]) -> Any:
    fits = type(value) is kind
    if kind in (int, float):
        fits |= kind is float and type(value) is int
        fits = fits and (abs(value) <= _MOST if type(value) is int else math.isfinite(value))
    if not fits:
        raise _Unfit(value, _WORDS[kind])
    return value


def _each(pairs: Iterable[tuple[Any, Any]], of_item: Reader) -> Iterable[Any]:
    for place, one in pairs:
        yield _at(str(place), of_item, one)


def _zipped(value: Any, readers: list[tuple[str, Reader]]) -> Iterable[Any]:
    if len(_listed(value)) != len(readers):
        raise _Unfit(value, f"a list of {len(readers)}")
    for (place, read), one in zip(readers, value, strict=True):
        yield _at(place, read, one)


def _fields(value: Any, readers: Mapping[str, Reader], needed: set[str]) -> dict[str, Any]:
    if missing := sorted(needed - _named(value).keys()):
        raise _Unfit(value, f"an object with {missing[0]!r}")
    return {name: _at(name, read, value[name]) for name, read in readers.items() if name in value}


def _at(place: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except _Unfit as unfit:
        unfit.way.append(place)
        raise


def _listed(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _Unfit(value, "a list")
    return value


def _named(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unfit(value, "an object")
    return value


def to_json(record: Record) -> dict[str, Any]:
    """Return a record as plain JSON values, with its kind under ``type``."""
    kinds = {EngineRecord: "engine", RequestRecord: "request", StepRecord: "step"}
    return {"type": kinds[type(record)], **asdict(record)}


def params_from(recorded: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling that a record has, which are those parameters that are not as by default.

    Raises ValueError or TypeError if it has something else.
    """
    params = dict(recorded)
    if isinstance(biases := params.get("logit_bias"), Mapping):  # JSON has text for keys
        params["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    return SamplingParams(**params)


def engine_of(record: Mapping[str, Any]) -> EngineRecord:
    """Return how an engine was set up, from its line in a trace.

    Raises ValueError if the line lacks something.
    """
    named = [
        field for field in fields(EngineRecord) if field.name in record or field.default is MISSING
    ]
    try:
        values = {field.name: record[field.name] for field in named}
    except KeyError as error:
        raise ValueError(f"this is not a trace of this version: {error} is missing") from None
    lists = values.keys() & {"eos_ids", "windows"}
    return EngineRecord(**(values | {name: tuple(values[name]) for name in lists}))
