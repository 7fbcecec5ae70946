"""Print docs/fields.md: what becomes of each field that clients send.

Run as ``python tools/fields.py > docs/fields.md``. It reads the bodies of the server and their
table, ``ridgeline.server.dialects.fields``; a test compares.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from ridgeline.server.batches import routes as batches
from ridgeline.server.dialects.anthropic import protocol as anthropic
from ridgeline.server.dialects.llamacpp import infill
from ridgeline.server.dialects.ollama import protocol as ollama
from ridgeline.server.dialects.openai import conversation, embeddings, protocol
from ridgeline.server.dialects.responses import protocol as responses
from ridgeline.server.http.request_model import Extra, Strict

HEAD = """\
# What becomes of each field

*Made by `python tools/fields.py`, of the table that the server itself reads.*

A field is **honoured**, **dropped by name** or **refused** with status 400, by one rule: what
cannot change an answer for the worse is taken. What was dropped stands in the header
`x-ridgeline-ignored`. That is also what becomes of a field that stands nowhere here. A field that
is null is absent.

With `--strict`, what was asked for and is not done is refused: rows that say so, any unknown field,
tools that only a provider runs, and a limit of tokens above what the context leaves
([ADR 32](adr/0032-what-is-dropped.md)).

Tools that no client runs (`web_search`, `custom`, `namespace`, dated ones) are skipped by name
where there are others, and refused where they stand alone.
"""
BODIES: dict[str, tuple[type[Strict], ...]] = {
    "`/v1/chat/completions`": (
        *(protocol.ChatRequest, conversation.Message, conversation.TextPart),
        *(conversation.ToolDefinition, conversation.FunctionDefinition, protocol.StreamOptions),
        *(conversation.Reasoning, conversation.ThinkingSwitch),
    ),
    "`/v1/completions`": (protocol.CompletionRequest,),
    "`/v1/responses`": (
        *(responses.ResponsesRequest, responses.ReasoningOptions, responses.TextOptions),
        *(responses.FunctionTool, responses.MessageItem, responses.ResponsesText),
        *(responses.CallItem, responses.CallOutputItem, responses.ReasoningItem),
    ),
    "`/v1/messages`": (
        *(anthropic.MessagesRequest, anthropic.Thinking, anthropic.OutputConfig),
        *(anthropic.ToolParam, anthropic.TextBlock, anthropic.ToolUseBlock),
        *(anthropic.ToolResultBlock, anthropic.ThinkingBlock),
    ),
    "`/api/chat`, `/api/generate`": (
        *(ollama.ChatAsked, ollama.GenerateAsked),
        *(ollama.OllamaOptions, ollama.OllamaMessage, ollama.Call),
    ),
    "`/api/show`, `/api/embed`": (ollama.ShowAsked, ollama.EmbedAsked),
    "`/infill`, `/completion`": (
        *(infill.InfillRequest, infill.ExtraFile, infill.LlamaCppRequest),
    ),
    "`/v1/embeddings`, `/v1/rerank`, `/v1/score`": (
        *(embeddings.EmbeddingsRequest, embeddings.RerankRequest, embeddings.ScoreRequest),
    ),
    "`/v1/batches`": (batches.BatchRequest,),
    "`/tokenize`": (protocol.TokenizeRequest, protocol.TokenizeChatRequest),
}
_FATES = {
    "hint": "dropped",
    "lost": "dropped (refused with `--strict`)",
    "refused": "refused",
}


def document() -> str:
    """Return the whole document."""
    return (
        "\n".join([HEAD, *(line for title in BODIES for line in _section(title))]).rstrip() + "\n"
    )


def _section(title: str) -> Iterator[str]:
    yield f"## {title}\n"
    for body in BODIES[title]:
        what = (body.__doc__ or "").partition("\n")[0].rstrip(".")
        honoured = sorted(body.model_fields.keys() - set(body.absent))
        yield f"### {what}\n"
        yield textwrap.fill("Honoured: " + ", ".join(f"`{name}`" for name in honoured) + ".", 120)
        yield ""
        if not body.extras:
            continue
        yield "| field | of | what becomes of it |"
        yield "|---|---|---|"
        for name, extra in sorted(body.extras.items()):
            yield f"| `{name}` | {extra.of} | {_fate(extra)} |"
        yield ""


def _fate(extra: Extra) -> str:
    off = [f"`{json.dumps(value)}`" for value in extra.off if type(value) is not float]
    if extra.most_off is not None:
        off.append("at most 0" if extra.most_off == 0 else f"at most {extra.most_off:g}")
    passes = f", unless {' or '.join(off)}" if off else ""
    return f"{_FATES[extra.fate]}{passes}: {extra.why}"


if __name__ == "__main__":
    print(document(), end="")
