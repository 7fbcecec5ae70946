"""Messages to one prompt, as the model's own chat template (jinja2) writes it.

A template is code from a model file and runs in processes of its own, with limits on its time and
memory (``system.process``): JSON values go in, text comes out. Text from users is shielded before
the template sees it, so only the template can produce control tokens. This module names no model
and guesses no template for a model that has none.

Models whose chat template knows no tools are told in words how to call. The form is that of the
``hermes`` format, which most such models have seen. Calls and results of earlier turns become plain
text, since these templates would drop them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from ridgeline.system.process import BUSY_TIMES, Children, Overdue
from ridgeline.text.template.messages import plain_message, plain_tool
from ridgeline.text.tokenizers.tokenizer import Tokenizer

_PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
_ANY_TIME = datetime(2026, 1, 1, tzinfo=UTC)  # for prompts that are only compared
_WORD = "probe"  # in a message that is only looked for
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")  # names in templates
_NINE = re.compile(r"length\s*!=\s*9\b")  # Mistral's ids of calls have as many characters
_CUT = "\ufdd1"  # marks where an unfinished message ends: a noncharacter, so it is in no content
_PROGRAM = Path(__file__).with_name("process.py")
_MAX_CPU_S = 2.0
Message = dict[str, Any]
_HOW = """\
You can call these functions, one JSON object each:
{functions}

To call one, write its name and its arguments in this form, and wait for the result:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


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
        self._thoughts = next((one for one in _THOUGHTS if _reads(self.source, one)), None)
        self.knows_thoughts = self._thoughts is not None
        self._wants_short_ids = bool(_NINE.search(self.source))
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
            plain, other = (self._filled(chat, tools, True, _ANY_TIME) for tools in ({}, with_tool))
            return plain != other
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

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the arguments of a call must be JSON: as an object they are an error."""
        function = {"name": "probe", "arguments": {"a": _WORD}}
        call = {"id": "probe1234", "type": "function", "function": function}
        question: dict[str, Any] = {"role": "user", "content": "?"}
        said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        for form, is_text in ((said, False), (_with_text_arguments(said), True)):
            try:
                self._filled([question, form], {"tools": [_PROBE]}, False, _ANY_TIME)
            except ValueError:
                continue
            return is_text
        return False

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
        if isinstance(tools := variables.get("tools"), list | tuple):
            variables = {**variables, "tools": [plain_tool(one) for one in tools]}
        given = {name: value for name, value in variables.items() if value is not None}
        shown = {name: self._shield(value, name) for name, value in given.items()}
        if _has_tools(shielded, variables) and not self.knows_tools:
            shielded = taught(shielded, shown.pop("tools", None))
        elif any(one.get("tool_calls") for one in shielded) and self._takes_text_arguments:
            shielded = [_with_text_arguments(one) for one in shielded]
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
        said = self._as_read(plain_message(message, where))
        content, own_words = said["content"], said["role"] == "assistant"
        shielded = self._tokenizer.shield(content, special_only=own_words)
        return {
            name: shielded
            if name == "content"
            else value
            if name == "role"
            else self._shield(value, f"{where}.{name}")
            for name, value in said.items()
        }

    def _as_read(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return a message with what this template calls its fields."""
        if said["role"] == "developer" and not self._knows_developer:
            said["role"] = "system"  # OpenAI's newer name for it
        calls = said.get("tool_calls")
        if self._thoughts not in (None, "reasoning_content") and "reasoning_content" in said:
            thoughts = said.pop("reasoning_content")
            if not (self._thoughts == "thinking" and calls and said["content"]):
                said[self._thoughts] = thoughts  # both before calls is an error in gpt-oss's
        if self._wants_short_ids:
            said |= {"tool_calls": [_with_short(call, "id") for call in calls]} if calls else {}
            said = _with_short(said, "tool_call_id")
        return said

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


def _reads(source: str, name: str) -> bool:
    """Whether a template may read a field of this name; a variable has no point before it."""
    return bool(re.search(rf"""\.{name}\b|["']{name}["']""", source))


def _with_short(value: Any, name: str) -> Any:
    """Return an object whose id has nine characters, always the same ones for the same id."""
    own_id = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(own_id, str) or (len(own_id) == 9 and own_id.isalnum()):
        return value
    return {**value, name: sha256(own_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if isinstance(call, Mapping)
        and isinstance(function := call.get("function"), Mapping)
        and isinstance(arguments := function.get("arguments"), Mapping)
        else call
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


class Renderer:
    """Renders one template; any thread may call."""

    def __init__(self, source: str) -> None:
        """Prepare to render ``source``, in jinja2 as Hugging Face's templates are written."""
        self._children = Children(_PROGRAM, lambda: source)

    def start(self) -> None:
        """Start the process now, so that the first rendering need not wait for it."""
        self._children.start()

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """Return the text that the template makes of ``variables``, which are JSON values.

        Its ``strftime_now`` writes ``now``, in the time zone of that.

        Raises:
            ValueError: the template is broken, refuses, or takes more time or memory than it may.
            ChildProcessError: no process can be started any more, or the machine is too busy.
        """
        question = {"now": now.isoformat(), "variables": variables, "limit_s": _MAX_CPU_S}
        try:
            answer: dict[str, str] | None = self._children.ask(question, BUSY_TIMES * _MAX_CPU_S)
        except ChildProcessError as error:
            if self._children.has_started or isinstance(error, Overdue):
                raise ChildProcessError(f"chats cannot be written now: {error}") from None
            raise ValueError(f"the chat template fails: {error}") from None
        if answer is None:
            raise ValueError(
                f"the chat template fails: it takes more than {_MAX_CPU_S:g} s of computing, "
                "or more memory than any template needs"
            )
        if "error" in answer:
            raise ValueError(f"the chat template fails: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the processes, if there are such."""
        self._children.close()


def taught(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """Return messages that any template can write, with ``tools`` explained at the beginning."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _HOW.format(functions=lines)
    if plain[0]["role"] != "system":
        return [{"role": "system", "content": text}, *plain]
    return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]


def _plain(message: Message) -> Message:
    """Return a message without calls or results, which are in its content instead."""
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls") or []
    written = [f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *written]))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def _object(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    values = {"name": function.get("name"), "arguments": function.get("arguments")}
    return json.dumps(values, ensure_ascii=False)
