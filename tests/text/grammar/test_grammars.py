"""Grammars over a vocabulary of bytes: what may follow, and what the library's failures become."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.text.grammar import grammars, process
from ridgeline.text.grammar.grammars import Grammars, GrammarState, Source

EOS = 256


class Bytes:
    """A tokenizer with a token for each byte, and one that ends a text."""

    vocab_size = 257

    def is_special(self, token: int) -> bool:
        return token == EOS

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b""

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def of_bytes() -> Iterator[Grammars]:
    found = Grammars(Bytes(), [EOS])  # type: ignore[arg-type]
    yield found
    found.close()


def after(state: GrammarState, text: bytes) -> GrammarState:
    for byte in text:
        state.accept(byte)
    return state


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(EOS + 1) if i // 8 < len(mask) and mask[i // 8] >> i % 8 & 1}


DEAD_END = Source("grammar", 'start: "a" ("b" C | "d")\nC: /x/ & /y/')


def test_where_nothing_can_follow_nothing_may(of_bytes: Grammars) -> None:
    """Also no end of the text, which the library then allows."""
    state = after(of_bytes.constraint(DEAD_END)(), b"ab")
    assert not allowed(state.masks(())[0])
    assert not state.is_over


def test_a_draft_into_a_dead_end_is_not_the_answers_fault(of_bytes: Grammars) -> None:
    state = after(of_bytes.constraint(DEAD_END)(), b"a")
    first, second, third = state.masks((ord("b"), ord("x")))
    assert ord("d") in allowed(first)
    assert not allowed(second)
    assert not allowed(third)
    assert state.masks((ord("b"),))[0] == first
    assert after(state, b"d").is_over


@pytest.mark.parametrize(
    ("limit", "value"),
    [("step_lexer_fuel", 10), ("max_lexer_states", 12), ("step_max_items", 5)],
)
def test_whatever_runs_out_allows_nothing(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """The process that compiles first has more, so only the answer fails."""
    text = 'start: "{" item* "}"\nitem: "a" | A\nA: /[b-e]{1,30}x/ & ~/.*bcb.*/'
    ends = set[str]()
    limits = process.LIMITS
    for given in (limits, limits | {limit: value}):
        monkeypatch.setattr(grammars, "LIMITS", given)
        tried = Grammars(Bytes(), [EOS])  # type: ignore[arg-type]
        state = tried.constraint(Source("grammar", text))()
        for byte in b"{aabddcebecdxabedcebbcddeccbecccxa}":
            [mask] = state.masks(())
            if byte not in allowed(mask):
                ends.add("nothing" if not allowed(mask) else "something else")
                assert not state.is_over
                break
            state.accept(byte)
        else:
            ends.add("all")
        tried.close()
    assert ends == {"all", "nothing"}
