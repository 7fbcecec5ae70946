"""Tools: what a request allows to be called, and how families of models write a call.

A format is data. What writes a grammar from it (``messages.tool_grammar``) and what reads an answer
in it (``messages.message``) are the same for all formats but two, whose arguments are not JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: letters, digits, ``_`` and ``-``.
        parameters: JSON schema of its arguments, an object.
        is_strict: whether a schema with something unknown is an error, and not any object.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


class ToolUse(NamedTuple):
    """What one request allows.

    Attributes:
        tools: what may be called.
        is_required: whether at least one call must come, and no text.
        is_parallel: whether several may come.
    """

    tools: tuple[Tool, ...]
    is_required: bool = False
    is_parallel: bool = True


class ToolFormat(NamedTuple):
    """How a family of models writes calls: ``begin opening call (separator call)* closing end``.

    Between these may be white space.

    Attributes:
        name: as ``--tool-call-parser`` and vLLM call it.
        begin: the marker before a call; empty if these models write none.
        opening: behind that marker.
        key: of the arguments in a call's object; empty if a call is no JSON.
        separator: between calls behind one marker; None if each call has markers of its own.
        closing: before the last marker.
        end: the marker behind the calls; empty if there is none.
        sign: stands in the chat templates of these models, and in no other before it here.
        quote: the marker around texts in arguments that are neither JSON nor XML (Gemma 4).
    """

    name: str
    begin: str = ""
    opening: str = ""
    key: str = ""
    separator: str | None = None
    closing: str = ""
    end: str = ""
    sign: str = ""
    quote: str = ""


BARE = '{"name": "'  # what begins a message that is a call, where there are no markers
FENCE = "```"  # which models that forget the marker put around a call
JSON_SPACE = " \n\r\t"
MAX_UNMARKED_TOOLS = 64  # with more, only BARE begins such a call: the grammar would be too large
HERMES = ToolFormat(
    "hermes", begin="<tool_call>", key="arguments", end="</tool_call>", sign="<tool_call>"
)
FORMATS = (  # looked for in this order
    ToolFormat(
        "gemma4", begin="<|tool_call>", end="<tool_call|>", sign="<|tool_call>", quote='<|"|>'
    ),
    ToolFormat(
        "phi4_mini_json", begin="<|tool_call|>", opening="[", key="arguments", separator=",",
        closing="]", end="<|/tool_call|>", sign="<|tool_call|>",
    ),
    ToolFormat(
        "mistral", begin="[TOOL_CALLS]", opening="[", key="arguments", separator=",", closing="]",
        sign="[TOOL_CALLS]",
    ),
    ToolFormat("qwen3_xml", begin="<tool_call>", end="</tool_call>", sign="<function="),
    HERMES,
    ToolFormat("llama3_json", key="parameters", separator=";", sign='"parameters":'),
)  # fmt: skip


def without_markers(form: ToolFormat) -> ToolFormat:
    """Return the format of calls that have no marker and begin where the message does."""
    separator = "" if form.begin else form.separator
    return form._replace(begin="", opening="", separator=separator, closing="", end="")


def unmarked_parts(form: ToolFormat, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return what a call without marker begins with: parts with white space before each.

    Each part is one of several texts; ``names`` are those of the tools. So JSON that has a name but
    calls nothing, such as a package's, is none. More ways to write it, such as white space at each
    place where JSON allows some, would be more states than the grammar's library has.
    """
    if not form.begin or len(names) > MAX_UNMARKED_TOOLS:
        return ((BARE,),)
    named = tuple(f'"name": "{name}",' for name in names)
    return ((f"{FENCE}json\n{{", "{"), named, (f'"{form.key}":',))


def is_unmarked_call(text: str, form: ToolFormat, use: ToolUse) -> bool | None:
    """Return whether a message that begins so is a call without marker; None if it may become one.

    White space before it is not part of ``text``.
    """
    for options in unmarked_parts(form, [tool.name for tool in use.tools]):
        text = text.lstrip(JSON_SPACE)
        if any(len(text) < len(one) and one.startswith(text) for one in options):
            return None
        longest = max((one for one in options if text.startswith(one)), key=len, default=None)
        if longest is None:
            return False
        text = text[len(longest) :]
    return True


def format_named(name: str, template: str) -> ToolFormat:
    """Return a format by its name; ``auto`` takes the first whose sign is in the template.

    A template without any sign teaches no format, so its models are taught ``hermes``. Raises
    ValueError for a name that is not known.
    """
    if name == "auto":
        return next((form for form in FORMATS if form.sign in template), HERMES)
    for form in FORMATS:
        if form.name == name:
            return form
    raise ValueError(
        f"there is no tool-call parser {name!r}: use auto or one of "
        f"{', '.join(form.name for form in FORMATS)}"
    )
