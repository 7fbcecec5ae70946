"""Bodies of requests: JSON to checked models, at a bounded cost and without the loss of a field.

Nothing is coerced, and nothing is dropped without its name. The values in a body are counted before
it is parsed: a few MB of JSON can become a GB of objects, and seconds of complaints about each. It
names no field; ``answer.protocol`` says what is valid. Long bodies are read off the event loop.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, LiteralString, NamedTuple, Self

from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.http.errors import ApiError, validation_error
from ridgeline.serve.http.fair_pool import WorkPools

_MAY_CALL = {"tools": "tool_choice", "functions": "function_call"}  # "none": it calls nothing
STRICT = {"is_strict": True}  # pydantic's context of a body that is held to the letter
MAX_VALUES = 1 << 18  # values in one body, such as token ids
MAX_PARTS = 1 << 16  # strings, lists and objects among them
IGNORED = "x-ridgeline-ignored"  # names what was dropped
CAPPED = "x-ridgeline-capped"  # says which limit was above what the context leaves, and what it is
ENDED = "x-ridgeline-ended"  # says which bound ended a whole answer
MOST_NAMED, _MOST_SHOWN = 20, 200  # names; characters of one
_WINDOW_BYTES = 1 << 16
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 1000  # to read it takes as long as that number of values
_LONG_BYTES = 1 << 13  # from here on, parsing may take milliseconds: a thousand small messages do
UPLOADS = "/v1/files"  # the one path whose bodies are read by its route, and are no JSON


class DroppedField(NamedTuple):
    """What becomes of a field that a body has no use for.

    Attributes:
        fate: "hint": the answer does not depend on it, so it is dropped by name. "lost": something
            was asked for that is not done, but the answer is still one to the question; dropped by
            name, and refused under ``--strict``. "refused": the answer would not be what was asked.
        why: why, and what to do instead; it goes on after "is not supported: ".
        of: whose field it is.
        off: values that ask for nothing, or for what is done anyway: they pass without a word.
        most_off: numbers up to here do as well.
    """

    fate: Literal["hint", "lost", "refused"]
    why: str
    of: str
    off: tuple[Any, ...] = ()
    most_off: float | None = None

    def asks_nothing(self, value: Any) -> bool:
        """Whether this value asks for nothing that is not done anyway."""
        if self.most_off is not None and type(value) in (int, float) and value <= self.most_off:
            return True
        return any(type(value) is type(one) and value == one for one in self.off)  # 0 is not False


def document(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Add to a model's JSON schema what the model accepts besides its fields."""
    others = {"type": "null"} if model.extras is None else {"description": "Dropped by name."}
    schema["additionalProperties"] = others
    own = {k: v for k, v in schema["properties"].items() if k not in model.absent}
    schema["properties"] = own | {
        name: _documented(extra) for name, extra in (model.extras or {}).items() if name not in own
    }


def _documented(extra: DroppedField) -> dict[str, Any]:
    if extra.fate != "refused":
        return {"description": "Taken, and dropped by name."}
    schema: dict[str, Any] = {"enum": [None, *extra.off]}
    if extra.most_off is not None:
        schema = {"anyOf": [schema, {"type": "number", "maximum": extra.most_off}]}
    return schema


class RequestModel(BaseModel):
    """No coercion, no NaN; the first field at fault, in the body's order.

    A null is absence, whatever its name: client libraries send the empty fields of their types.
    What a body has no field for is dropped by name, or refused, as its ``extras`` say (one table
    for all APIs, ``answer.fields``). A body of our own has no such table, and refuses it.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=document
    )
    extras: ClassVar[Mapping[str, DroppedField] | None] = None
    runs: ClassVar[tuple[str, ...]] = ()  # the kinds of ``tools`` that clients run
    absent: ClassVar[tuple[str, ...]] = ()  # inherited fields that mean nothing here
    _dropped: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _take(cls, data: Any, make: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(data, dict):
            return make(data)
        values = {name: value for name, value in cls._flat(data).items() if value is not None}
        is_strict = info.context == STRICT
        skipped = cls._read_history(values, may_lose=not is_strict)
        skipped += [] if is_strict else cls._skip_tools(values)
        fields = _names_of(cls)
        others = [name for name in values if name not in fields]
        dropped = [name for name in others if cls._drops(name, values, is_strict=is_strict)]
        model = make({name: value for name, value in values.items() if name in fields})
        if dropped or skipped:  # most of thousands of messages have nothing of the kind
            model._dropped += (*dropped, *skipped)  # a validator may have dropped others
        return model

    @classmethod
    def _flat(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a body, those that stand deeper in it among them."""
        return data

    @classmethod
    def _read_history(cls, values: dict[str, Any], *, may_lose: bool) -> list[str]:
        """Put what began with another model into the words of this body.

        Returns the names of what is left out; unless that ``may_lose`` anything, it stays, and is
        refused.
        """
        return []

    @classmethod
    def _drops(cls, name: str, values: Mapping[str, Any], *, is_strict: bool) -> bool:
        """Return whether a field is dropped by name; it may ask for nothing.

        Raises the error that refuses the request.
        """
        extra = cls.extras.get(name) if cls.extras is not None else None
        if extra is None:
            if is_strict or cls.extras is None:
                raise wrong("unknown_parameter", name, "is not a parameter here")
            return True
        if extra.asks_nothing(values[name]):
            return False
        if extra.fate == "hint" or values.get(_MAY_CALL.get(name, "")) == "none":
            return True
        if extra.fate == "refused" or is_strict:
            raise wrong("unsupported_parameter", name, f"is not supported: {extra.why}")
        return True

    @classmethod
    def _skip_tools(cls, values: dict[str, Any]) -> list[str]:
        """Take out the tools that only a provider can run, and return their names.

        The model is not told of them, so it cannot call them. Where there are no others they stay,
        and are refused.
        """
        tools = values.get("tools")
        if not cls.runs or not isinstance(tools, list):
            return []
        kinds = [one.get("type", cls.runs[0]) if isinstance(one, dict) else None for one in tools]
        skipped = [i for i, k in enumerate(kinds) if isinstance(k, str) and k not in cls.runs]
        if len(skipped) in (0, len(tools)):
            return []
        values["tools"] = [one for i, one in enumerate(tools) if i not in skipped]
        return [f"tools[{i}] ({kinds[i]})" for i in skipped]

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, here and in all that it holds, each once."""
        return list(dict.fromkeys(self._ignored()))

    def _ignored(self) -> Iterator[str]:
        private = self.__pydantic_private__  # pydantic takes 4 us for self._dropped
        yield from private["_dropped"] if private else ()
        yield from self._inside()

    def _inside(self) -> Iterator[str]:
        for name, value in self.__dict__.items():
            is_many = isinstance(value, list) and value and not isinstance(value[0], int)
            for one in value if is_many else (value,):
                if isinstance(one, RequestModel):
                    yield from (f"{name}.{inner}" for inner in one._ignored())


@cache
def _names_of(kind: type[RequestModel]) -> Set[str]:
    fields = kind.model_fields.items()
    return {field.alias or name for name, field in fields if name not in kind.absent}


def wrong(code: LiteralString, field: str, problem: str) -> PydanticCustomError:
    """Return an error about a field of the model, or the pair of the map, that is validated."""
    return PydanticCustomError(code, "{problem}", {"field": field, "problem": problem})


def bad_value(param: str, why: str) -> ApiError:
    """Return an error about a field whose value cannot be used."""
    return ApiError(400, f"{param} is wrong: {why}", param=param, code="invalid_value")


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


class BodyRoute(APIRoute):
    """A route whose body is read here, so that FastAPI gets a validated model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; if the route has a body, the handler reads that first."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        info = self.body_field.field_info
        kind: Any = Annotated[info.annotation, info]
        adapter = TypeAdapter[Any](kind)

        async def read_first(request: Request) -> Response:
            data = await self.json_of(request)
            state = request.app.state
            is_strict = getattr(state, "is_strict", False)
            model = await in_turn(state.work, adapter, data, is_strict=is_strict)
            response = await handle(_Read(request, data, model))
            note_ignored(response, model.ignored())
            return response

        return read_first

    async def json_of(self, request: Request) -> bytes:
        """Return the JSON of a request's body."""
        return await request.body()


def note_ignored(response: Response, names: Sequence[str]) -> None:
    """Say in a header what the request asks for and its answer is not held to."""
    already = response.headers.get(IGNORED, "")
    shown = [_shown(name) for name in names[:MOST_NAMED]]
    shown += ["..."] * (len(names) > MOST_NAMED)
    if value := ", ".join(filter(None, [*shown, already])):
        response.headers[IGNORED] = value


def _shown(name: str) -> str:
    """Return a name as it can stand in a header: clients choose the names in schemas."""
    text = name.encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class _Read(Request):
    """A request whose body has become a model."""

    def __init__(self, request: Request, data: bytes, model: object) -> None:
        super().__init__(request.scope, request.receive)
        self._body, self._model = data, model

    async def json(self) -> Any:
        return self._model


async def in_turn(
    work: WorkPools, adapter: TypeAdapter[Any], data: bytes, *, is_strict: bool = False
) -> Any:
    """Return what ``read`` does, of a long body in a thread, when it is its turn."""
    if len(data) < _LONG_BYTES:
        return read(adapter, data, is_strict=is_strict)
    return await work.bodies.run(partial(read, adapter, data, is_strict=is_strict))


def read(adapter: TypeAdapter[Any], data: bytes, *, is_strict: bool = False) -> Any:
    """Return the model that a body describes; raises ApiError that names what is wrong.

    With ``is_strict`` nothing is dropped that was asked for (``DroppedField``).
    If a body has too much in it, only its beginning is validated: an error found there says more.
    """
    end = _affordable(data)
    gc.disable()  # it would search all of the body, many times, and find nothing
    try:
        value = from_json(data[:end], allow_partial=end is not None)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    finally:
        gc.enable()
    try:
        model = adapter.validate_python(value, context=STRICT if is_strict else None)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if end is not None:  # a missing field may come later
            problems = [problem for problem in problems if problem["type"] != "missing"]
        if problems:
            raise validation_error(problems) from None
    if end is None:
        return model
    param = next(reversed(value), "body")
    raise ApiError(
        400,
        f"{param} has too many values: a request may have at most {MAX_VALUES}, of which at most "
        f"{MAX_PARTS} are strings, lists or objects",
        param=param,
        code="invalid_value",
    )


def _affordable(data: bytes) -> int | None:
    """Return the length of the beginning that has not too much in it, None if that is all.

    Commas, brackets and so on count outside of strings, that is, in every second of the pieces
    between quotation marks. No call is long, because the whole process waits during each.
    """
    start, in_string, num_values, num_parts = 0, 0, 0, 0
    while start < len(data):
        window = data[start : start + _WINDOW_BYTES].replace(rb"\\", b"  ")
        end = start + _WINDOW_BYTES + window.endswith(b"\\")  # with what that one escapes
        pieces = window.replace(rb"\"", b"  ").split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string = (in_string + len(pieces) - 1) % 2
        num_values += outside.count(b",")
        num_values += len(_LONG_NUMBER) * outside.translate(_DIGITS).count(_LONG_NUMBER)
        num_parts += len(pieces) // 2 + outside.count(b"[") + outside.count(b"{")
        if num_values > MAX_VALUES or num_parts > MAX_PARTS:
            return start
        start = end
    return None


def too_long(max_file_bytes: int) -> ApiError:
    """Return the error about a file that is too long."""
    return ApiError(413, f"the file is longer than {max_file_bytes} bytes (--max-file)")
