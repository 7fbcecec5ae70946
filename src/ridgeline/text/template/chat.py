"""Messages to one prompt, as the model's own chat template (jinja2) writes it.

A template is code from a model file and runs elsewhere (``template.renderer``). Text from users is
shielded before the template sees it, so only the template can produce control tokens. This module
names no model and guesses no template for a model that has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from ridgeline.text.template.renderer import Renderer
from ridgeline.text.template.tool_prompt import taught
from ridgeline.text.tokenizers.tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
_ANY_TIME = datetime(2026, 1, 1, tzinfo=UTC)  # for prompts that are only compared
_WORD = "probe"  # in a message that is only looked for
_THINKING = re.compile(r"""\.thinking\b|["']thinking["']""")  # gpt-oss's name of thoughts
_CUT = "\ufdd1"  # marks where an unfinished message ends: a noncharacter, so it is in no content


class ChatTemplate:
    """A model's chat template with its tokenizer.

    Nothing is compiled before the first rendering: a model with a broken template still completes
    plain text.

    Args:
        source: jinja2 source, None where the model has none.
        tokenizer: of the same model.
        bos_token: spelling of the BOS token, for the template.
        eos_token: spelling of the EOS token, for the template.
        tool_source: another source that writes conversations with tools, if the model has one.

    Attributes:
        source: what writes conversations, those with tools if it has no other; "" for none.
        tool_source: what writes those with tools.
        sources: all there is.
        knows_effort: whether it reads how much is to be thought.
        knows_thoughts: whether it reads what was thought in earlier messages, under any name.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        bos_token: str = "",
        eos_token: str = "",
        *,
        tool_source: str | None = None,
    ):
        self.source = source if source is not None else tool_source or ""
        self.tool_source = self.source if tool_source is None else tool_source
        self.sources = "\n".join(dict.fromkeys((self.source, self.tool_source)))
        self._renderer = None if source is None else Renderer(source)
        self._with_tools = (
            None
            if tool_source is None
            else ChatTemplate(tool_source, tokenizer, bos_token, eos_token)
        )
        self._knows_developer = "developer" in self.source
        self.knows_effort = "reasoning_effort" in self.source
        knows_usual = "reasoning_content" in self.source
        self._calls_it_thinking = not knows_usual and bool(_THINKING.search(self.source))
        self.knows_thoughts = knows_usual or self._calls_it_thinking
        self._tokenizer = tokenizer
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}

    def rewritten(self, source: str) -> ChatTemplate:
        """Return a template for the same model from another jinja2 source."""
        return ChatTemplate(source, self._tokenizer, **self._variables)

    @contextmanager
    def written_as(self, source: str | None) -> Iterator[ChatTemplate]:
        """Yield a template for the same model from another jinja2 source, None for this one.

        It runs as bounded as the model's own, in a process that ends with the block.
        """
        if source is None:
            yield self
            return
        other = self.rewritten(source)
        try:
            yield other
        finally:
            other.close()

    @cached_property
    def knows_tools(self) -> bool:
        """Whether a prompt is another where there are tools, as far as can be seen."""
        chat, with_tool = [{"role": "user", "content": "?"}], {"tools": [_PROBE]}
        try:
            plain, told = (self._filled(chat, tools, True, _ANY_TIME) for tools in ({}, with_tool))
            return plain != told
        except ValueError:  # it wants more than this, and its own error is the better one
            return True

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content must be a list of parts: as a text it would silently be left out."""
        if not re.search(r"""['"]text['"]""", self.source):
            return False
        ways: tuple[Any, ...] = (_WORD, _parts(_WORD))
        try:
            as_text, as_parts = (
                _WORD in self._filled([{"role": "user", "content": way}], {}, True, _ANY_TIME)
                for way in ways
            )
        except ValueError:
            return False
        return as_parts and not as_text

    def start(self) -> None:
        """Get ready, so that the first conversation need not wait; nothing without a template."""
        if self._renderer:
            self._renderer.start()

    def close(self) -> None:
        """End the processes that ``start`` or a rendering began."""
        for one in (self._renderer, self._with_tools):
            if one:
                one.close()

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        strftime_now: datetime | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Control tokens come from the template only; text in ``messages`` that spells one stays
        text. The one exception is tokens that ``decode`` shows, such as ``</think>``, in an
        assistant's message: the model wrote them, and templates look for them.

        Args:
            messages: each with ``role`` and ``content``: a string, or parts of type text, which
                are joined by line ends.
            add_generation_prompt: end with the opening of the assistant's next message.
            continue_final_message: leave the last message open instead, to be continued.
            strftime_now: the time that the template writes where it asks for today's date, in the
                time zone of that; None is now, in the zone of this machine.
            **variables: JSON values that the template may use (enable_thinking, ...), and
                ``tools``, as OpenAI's API has them: a template that knows none has them in the
                first message.

        Raises:
            ValueError: the model has no template, the messages are malformed, or the template
                fails or refuses them.
        """
        now = strftime_now or datetime.now().astimezone()
        text = self._render(messages, add_generation_prompt, continue_final_message, now, variables)
        return self._tokenizer.encode_shielded(text)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        strftime_now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt that ``render_ids`` tokenises, without the BOS that it may add."""
        now = strftime_now or datetime.now().astimezone()
        text = self._render(messages, add_generation_prompt, continue_final_message, now, variables)
        return self._tokenizer.unshield(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        now: datetime,
        variables: dict[str, Any],
    ) -> str:
        if self._with_tools and variables.get("tools"):
            return self._with_tools._render(
                messages, add_generation_prompt, continue_final_message, now, variables
            )
        shielded = self._checked(messages)
        if self._with_tools and self._renderer is None:
            raise ValueError(
                "this model's chat template is for conversations with tools alone: send tools, or "
                "start with --chat-template"
            )
        if self._renderer is None:
            raise ValueError(
                "this model has no chat template; use a plain completion, or an "
                "instruction-tuned model"
            )
        if taken := {"messages", *self._variables} & variables.keys():
            raise ValueError(f"the template variable {min(taken)!r} cannot be set")
        if not isinstance(now, datetime):
            raise ValueError(f"strftime_now is {now!r}: give a datetime")
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt exclude each other: set "
                    "add_generation_prompt to false"
                )
            shielded[-1]["content"] += _CUT
        shown = {name: self._shield(value, name) for name, value in variables.items()}
        if _has_tools(shielded, variables) and not self.knows_tools:
            shielded = taught(shielded, shown.pop("tools", None))
        if self._takes_parts:
            shielded = [{**one, "content": _parts(one["content"])} for one in shielded]
        text = self._filled(shielded, shown, add_generation_prompt, now)
        if not continue_final_message:
            return text
        text, separator, _ = text.rpartition(_CUT)
        if not separator:
            raise ValueError(
                "the chat template leaves out the last message; it has no continuation"
            )
        return text

    def _filled(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        opens: bool,
        now: datetime,
    ) -> str:
        """Return what the template makes of messages and variables."""
        assert self._renderer is not None
        context = {
            "tools": None,
            "documents": None,
            **variables,
            **self._variables,
            "messages": messages,
            "add_generation_prompt": opens,
        }
        return self._renderer.render(context, now)

    def _checked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages, their content one shielded string each."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError("messages must be a list of at least one message")
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Any, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise ValueError(f"{where}.role is {role!r}; use one of {', '.join(_ROLES)}")
        if content is None and message.get("tool_calls"):
            content = ""
        if isinstance(content, list):
            content = "\n".join(_part(p, f"{where}.content[{i}]") for i, p in enumerate(content))
        if not isinstance(content, str):
            raise ValueError(f"{where}.content must be a string or a list of text parts")
        if role == "developer" and not self._knows_developer:
            role = "system"  # OpenAI's newer name for it
        own_words = role == "assistant"
        others = {name: value for name, value in message.items() if name != "role"}
        if calls := message.get("tool_calls"):
            others["tool_calls"] = [_read_arguments(call) for call in calls]
        if self._calls_it_thinking and not (
            calls and content
        ):  # both before calls is an error there
            others["thinking"] = others.get("reasoning_content")
        shielded = self._tokenizer.shield(content, special_only=own_words)
        has_text = isinstance(others.get("content"), str)  # parts are shielded to be checked
        return {
            **{
                name: shielded
                if name == "content" and has_text
                else self._shield(value, f"{where}.{name}")
                for name, value in others.items()
            },
            "role": role,
            "content": shielded,
        }

    def _shield(self, value: Any, where: str) -> Any:
        """Return a JSON value with all its strings shielded."""
        if isinstance(value, str):
            return self._tokenizer.shield(value)
        if isinstance(value, Mapping):
            return {self._shield(k, where): self._shield(v, where) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item, where) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(f"{where} holds {type(value).__name__}, which is not a JSON value")


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _has_tools(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> bool:
    return bool(variables.get("tools")) or any(one.get("tool_calls") for one in messages)


def _read_arguments(call: Any) -> Any:
    """Return a call whose arguments are an object, as templates expect, and not its text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):  # an object already, or cut in the middle
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise ValueError(f"{where} is not of type 'text'; this engine reads text only")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text must be a string")
    return str(part["text"])
