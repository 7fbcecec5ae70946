"""Items of an answer: one is closed before the next begins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ridgeline.serve.answer.items import Items


def call(name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {"tool_calls": [{"id": f"call_{name}", "function": function} if name else
                           {"function": function}]}  # fmt: skip


def test_an_item_is_closed_before_the_next_begins() -> None:
    deltas: list[dict[str, Any]] = [
        *({"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}, {"content": "Yes"}),
        *({"content": "!"}, call("add", ""), call(None, '{"a"'), call(None, ": 1}")),
        *(call("now", "{}"), {}, {"content": "Done"}),
    ]
    items = Items()
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": "stop"})
    changes = [change for choice in choices for change in items.take(choice)]
    said = [(item.kind, item.name, item.text) for item in items.all]
    assert said == [
        *(("reasoning", "", "Hm"), ("text", "", "Yes!"), ("call", "add", '{"a": 1}')),
        *(("call", "now", "{}"), ("text", "", "Done")),
    ]
    assert items.open is None
    for (what, item, _), (then, other, _) in pairwise(changes):
        if what == "ends":
            assert then == "begins", "nothing grows between two items"
            assert other is not item
        else:
            assert then != "begins"
            assert other is item
    for item in items.all:
        grown = [text for what, one, text in changes if one is item and what == "grows"]
        assert "".join(grown) == item.text


def test_the_text_of_a_completion_is_an_item_too() -> None:
    items = Items()
    changes = [*items.take({"text": "Hello", "finish_reason": None})]
    changes += items.take({"text": "", "finish_reason": "length"})
    assert [what for what, _, _ in changes] == ["begins", "grows", "ends"]
    assert items.all[0].text == "Hello"
