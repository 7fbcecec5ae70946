"""The base of all bodies: nothing is coerced, nothing unknown passes, nothing is read twice.

It names no field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, LiteralString, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ridgeline.server.http.errors import ApiError

_MAY_CALL = {"tools": "tool_choice", "functions": "function_call"}  # "none": it calls nothing


def document(schema: dict[str, Any], model: type[Strict]) -> None:
    """Add to a model's JSON schema what the model accepts besides its fields."""
    schema["additionalProperties"] = {"type": "null"}
    dropped = {name: {"description": "Taken, and dropped."} for name in model.droppable}
    schema["properties"] = schema["properties"] | dropped


class Strict(BaseModel):
    """No coercion, no unknown field, no NaN; the first field at fault, in the body's order.

    A null is absence, whatever its name: client libraries send the empty fields of their types.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=document
    )
    droppable: ClassVar[tuple[str, ...]] = ()  # cannot change an answer
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    instead: ClassVar[Mapping[str, LiteralString]] = {}  # what to do, for some of those
    _dropped: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _take(cls, data: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return make(data)
        values = {name: value for name, value in data.items() if value is not None}
        others = [name for name in values if name not in cls.model_fields]
        dropped = tuple(name for name in others if cls._drops(name, values))
        model = make({name: values[name] for name in values if name in cls.model_fields})
        model._dropped = dropped
        return model

    @classmethod
    def _drops(cls, name: str, values: Mapping[str, Any]) -> bool:
        """Return whether dropping a field loses something.

        Raises the error that refuses the request if that could change the answer.
        """
        if name in cls.droppable:
            return True
        if name not in cls.not_yet:
            raise wrong("unknown_parameter", name, "is not a parameter here")
        if any(_same(values[name], void) for void in cls.not_yet[name]):
            return False
        if values.get(_MAY_CALL.get(name, "")) == "none":
            return True
        why = cls.instead.get(name, "is not supported yet: leave it out")
        raise wrong("unsupported_parameter", name, why)

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        return list(self._dropped)


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 0 is not False here


def wrong(code: LiteralString, field: str, problem: LiteralString) -> PydanticCustomError:
    """Return an error about a field of the model, or the pair of the map, that is validated."""
    return PydanticCustomError(code, problem, {"field": field})


def contradiction(param: str, why: str) -> ApiError:
    """Return an error about a field that another one excludes."""
    return ApiError(400, f"{param} contradicts the rest: {why}", param=param, code="invalid_value")


def typed(kinds: tuple[str, ...], why: LiteralString, default: str | None = None) -> Any:
    """Return a validator that refuses objects of other types, before their fields are read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            kind = value.get("type") or default
            if kind is None:
                raise wrong("invalid_value", "type", "is missing")
            if kind not in kinds:
                raise wrong("unsupported_parameter", "type", why)
        return value

    return BeforeValidator(check)


def kind_of(default: str) -> Callable[[Any], str]:
    """Return what names the member of a union: an object's type, or the default."""

    def kind(value: Any) -> str:
        type_name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"[{type_name or default}]"

    return kind
