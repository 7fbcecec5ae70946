"""Where the texts of an answer stand in the object of each API: what a receipt is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.trust.receipts.answers.shown import ShownRun

STYLES = (
    *("chat", "text", "response", "message", "Ollama's chat", "Ollama's text", "llama.cpp's"),
    "llama.cpp's list",
)


def places_of(style: str, answers: Mapping[int, Sequence[ShownRun]]) -> dict[str, str]:
    """Return the texts of answers by their places in the object of an API."""
    found: dict[str, str] = {}
    for index, runs in answers.items():
        found |= _places(style, index, runs)
    return found


def _places(style: str, index: int, runs: Sequence[ShownRun]) -> dict[str, str]:
    """Return the texts of one answer."""
    joined = {kind: "".join(one.text for one in runs if one.kind == kind) for kind in _TEXTS}
    calls = [one for one in runs if one.kind == "call"]
    if style == "response":
        return {
            f"output[{i}].{name}": text
            for i, run in enumerate(runs)
            for name, text in (
                (("name", run.text), ("arguments", run.arguments))
                if run.kind == "call"
                else (("content[0].text", run.text),)
            )
        }
    if style == "message":
        names = {"call": "name", "reasoning": "thinking"}
        return {
            f"content[{i}].{names.get(run.kind, 'text')}": run.text for i, run in enumerate(runs)
        }
    whole = "".join(joined.values())
    if style == "text":
        return {f"choices[{index}].text": whole}
    if style.startswith("llama.cpp's"):
        return {"content" if style == "llama.cpp's" else f"[{index}].content": whole}
    texts = {"content": joined["content"]}
    texts |= {"reasoning_content": joined["reasoning"]} if joined["reasoning"] else {}
    texts |= {"refusal": joined["refusal"]} if joined["refusal"] else {}
    for i, call in enumerate(calls):
        texts[f"tool_calls[{i}].function.name"] = call.text
        texts[f"tool_calls[{i}].function.arguments"] = call.arguments
    if style == "chat":
        return {f"choices[{index}].message.{name}": text for name, text in texts.items()}
    texts = {name: text for name, text in texts.items() if not name.endswith("arguments")}
    refusal, thoughts = texts.pop("refusal", ""), texts.pop("reasoning_content", "")
    texts["content"] += refusal
    texts |= {"thinking": thoughts} if thoughts else {}
    if style == "Ollama's chat":
        return {f"message.{name}": text for name, text in texts.items()}
    return {"response" if name == "content" else name: text for name, text in texts.items()}


_TEXTS = ("reasoning", "content", "refusal")
