"""POST /v1/responses, OpenAI's newer API: what clients may ask, as a chat request.

Stateless: nothing is stored, so what needs a stored response is refused by name. The conversation
comes whole with each request, as items; ``server.response_shape`` writes the answer as items again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from ridgeline.server.errors import ApiError, validation_error
from ridgeline.server.protocol import ChatRequest
from ridgeline.server.strict import Strict

_INT64 = 1 << 63
_MAX_ITEMS = 1 << 13
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # there is nothing encrypted to include
# What the names of a chat request's fields are here, for errors.
_NAMES = (
    ("messages", "input"), ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"), ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
)  # fmt: skip


class Reasoning(Strict):
    """How much to think before the answer."""

    droppable = ("summary", "generate_summary")  # summaries of reasoning that is shown whole

    effort: str | None = None


class TextOptions(Strict):
    """The form of the text."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: dict[str, Any] | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }
    droppable = ("stream_options",)  # it only asks for padding

    input: str | Annotated[list[dict[str, Any]], Field(max_length=_MAX_ITEMS)]
    model: str | None = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=_INT64)
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    top_p: float | None = Field(None, ge=0, le=1)
    user: str | None = None

    def chat(self) -> ChatRequest:
        """Return the same as a chat request. Raises ApiError, which names the field at fault."""
        wants_logprobs = _LOGPROBS in self._included() or self.top_logprobs is not None
        fields = {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(one, f"tools[{i}]") for i, one in enumerate(self.tools or ())],
            "tool_choice": _chat_choice(self.tool_choice),
            "response_format": _chat_format(self.text.format if self.text else None),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "logprobs": wants_logprobs or None,
        }
        same = (
            *("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
            *("stream", "temperature", "top_logprobs", "top_p", "user"),
        )
        fields |= {name: getattr(self, name) for name in same}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise validation_error(error.errors()) from None

    def _included(self) -> list[str]:
        for name in self.include or ():
            if name not in _INCLUDED:
                raise _bad("include", f"there is no {name!r:.80}: only {' or '.join(_INCLUDED)}")
        return self.include or []

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that the items make; one of the assistant may take several."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        own: dict[str, Any] = {}  # a message of the assistant that is not complete
        for i, item in enumerate(self.input):
            where, kind = f"input[{i}]", item.get("type", "message")
            if kind == "function_call":
                own.setdefault("tool_calls", []).append(_chat_call(item, where))
            elif kind == "reasoning":
                if own:
                    yield _assistant(own)
                own = {"reasoning_content": _texts(item.get("content"), f"{where}.content")}
            elif kind == "message" and item.get("role") == "assistant":
                if "content" in own or "tool_calls" in own:
                    yield _assistant(own)
                    own = {}
                own["content"] = _texts(item.get("content"), f"{where}.content")
            else:
                if own:
                    yield _assistant(own)
                    own = {}
                yield _other(item, kind, where)
        if own:
            yield _assistant(own)


def renamed(error: ApiError) -> ApiError:
    """Return an error about a chat request with the names of this API."""
    for theirs, ours in _NAMES:
        if error.param and error.param.startswith(theirs):
            error.param = ours + error.param.removeprefix(theirs)
            error.args = (str(error).replace(theirs, ours),)
    return error


def _assistant(said: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", **({} if "tool_calls" in said else {"content": ""}), **said}


def _other(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return the message of an item that is not the assistant's."""
    if kind == "function_call_output":
        content = _texts(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind != "message":
        raise _bad(
            f"{where}.type",
            f"items of type {kind!r:.80} are not supported: nothing is "
            "stored here, and functions are the only tools",
        )
    content = _texts(item.get("content"), f"{where}.content")
    return {"role": item.get("role"), "content": content}


def _texts(content: Any, where: str) -> str:
    """Return the text of an item: it is text, or a list of parts that are."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content if isinstance(content, list) else ()):
        match part:
            case {"type": "input_text" | "output_text" | "reasoning_text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _bad(f"{where}[{i}]", "it must be text: this engine reads nothing else")
    if content is not None and not isinstance(content, list):
        raise _bad(where, "it must be text, or a list of parts of text")
    return "\n".join(texts)


def _chat_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise _bad(f"{where}.{name}", "it must be text")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _bad(
            where, f"tools of type {tool.get('type')!r:.80} are not supported: functions are"
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            some = [{"type": "function", "function": {"name": one.get("name")}}
                    if isinstance(one, dict) else one for one in tools]  # fmt: skip
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}
    return choice


def _chat_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return dict(form) if form else None
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in form.items() if name != "type"},
    }


def _bad(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} is wrong: {why}", param=param, code="invalid_value")
