"""Messages as they are typed."""

from __future__ import annotations

import pytest

from ridgeline.cli.commands import repl


def test_a_message_of_several_lines_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(['"""def f():', "    return 1", 'what is it?"""'])
    monkeypatch.setattr("builtins.input", lambda _: next(texts))
    assert repl._message() == "def f():\n    return 1\nwhat is it?"
    one = iter(['"""all in one"""'])
    monkeypatch.setattr("builtins.input", lambda _: next(one))
    assert repl._message() == "all in one"
