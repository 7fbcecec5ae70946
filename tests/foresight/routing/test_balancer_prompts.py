"""Prompts as a router sees them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.foresight.routing.balancer import PIECE_BYTES, prompt_of

ENTRIES = st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=400)), max_size=8)


@given(ENTRIES, ENTRIES, st.sampled_from(["messages", "input", "prompt", "documents"]))
def test_what_goes_on_begins_with_the_same_keys(
    first: list[Any], more: list[Any], name: str
) -> None:
    before, after = (prompt_of({name: entries}) for entries in (first, first + more))
    assert after.keys[: len(before.keys)] == before.keys
    assert len(after.keys) == after.size // PIECE_BYTES


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_keys_part_where_texts_part(length: int, place: int) -> None:
    text = "x" * length
    other = text[:place] + "y" + text[place + 1 :]
    one, two = (prompt_of({"prompt": prompt}).keys for prompt in (text, other))
    equal = place // PIECE_BYTES if place < length else len(one)
    assert one[:equal] == two[:equal]
    assert not set(one[equal:]) & set(two[equal:])


def test_tenants_and_what_stands_before_part_all_keys() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    bare = prompt_of(body)
    for other in (prompt_of(body, "anna"), prompt_of(body | {"tools": [{}]})):
        assert len(other.keys) >= 3
        assert not set(bare.keys) & set(other.keys)


def test_any_body_has_a_size() -> None:
    for fields in ({}, {"prompt": None}, {"prompt": 5}, {"prompt": "\ud800"}, {"messages": [[1]]}):
        assert prompt_of(fields).size >= 0
    assert prompt_of({"temperature": 1}) == (0, ())
    assert prompt_of({"prompt": "x" * (PIECE_BYTES * 5000)}).keys.__len__() == 4096
