from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.text_rules.answer import AnswerGuard, TextRule, TextRules
from ridgeline.trust.text_rules.patterns import TextPattern

WORD = TextPattern("heron")
REDACT = TextRule("bird", WORD, "redact", "[BIRD]")
BLOCK = TextRule("bird", WORD, "block", "[BIRD]", "not that")


def read(
    rule: TextRule, pieces: list[tuple[str, str]], *, is_constrained: bool = False
) -> tuple[list[MessageDelta], AnswerGuard, list[str]]:
    hits: list[str] = []
    rules = TextRules([rule])
    guard = AnswerGuard(
        rules,
        lambda rule, where: hits.append(f"{rule.name}:{where}"),
        is_constrained=is_constrained,
    )
    shown = [one for piece in pieces for one in guard.take([MessageDelta(*piece)], is_over=False)]
    return shown + guard.take([], is_over=True), guard, hits


def text_of(pieces: list[MessageDelta], kind: str = "content") -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def cut(text: str, kind: str = "content") -> list[tuple[str, str]]:
    return [(kind, char) for char in text]


def test_a_match_is_replaced() -> None:
    shown, guard, hits = read(REDACT, cut("a grey heron flies"))
    assert text_of(shown) == "a grey [BIRD] flies"
    assert (guard.blocked, hits) == (None, ["bird:content"])


def test_a_block_ends_the_answer_before_the_match() -> None:
    shown, guard, _ = read(BLOCK, cut("a grey heron flies"))
    assert text_of(shown) == "a grey "
    assert text_of(shown, "refusal") == "not that"
    assert guard.blocked is BLOCK


def test_a_note_changes_nothing_and_hides_nothing() -> None:
    note = TextRule("all", TextPattern("grey heron flies"), "note", "")
    hits: list[str] = []
    guard = AnswerGuard(TextRules([note, REDACT]), lambda rule, where: hits.append(rule.name))
    shown = guard.take([MessageDelta("content", "a grey heron flies")], is_over=True)
    assert text_of(shown) == "a grey [BIRD] flies"
    assert sorted(hits) == ["all", "bird"]


def test_thoughts_text_and_calls_are_texts_of_their_own() -> None:
    shown, _, _ = read(REDACT, [("reasoning", "her"), ("content", "on the heron")])
    assert text_of(shown, "reasoning") == "her"
    assert text_of(shown) == "on the [BIRD]"


def test_text_around_a_call_is_searched_as_it_will_be_joined() -> None:
    pieces = [("content", "a her"), ("call", "f"), ("arguments", "{}"), ("content", "on.")]
    shown, _, hits = read(REDACT, pieces)
    assert text_of(shown) == "a her[BIRD]."
    assert text_of(shown, "arguments") == "{}"
    assert hits == ["bird:content"]


def test_text_that_has_a_form_is_blocked_and_not_replaced() -> None:
    shown, guard, _ = read(REDACT, cut('{"a":"heron"}'), is_constrained=True)
    assert text_of(shown) == '{"a":"'
    assert guard.blocked is REDACT
    call = [("call", "f"), *cut('{"a":"heron"}', "arguments")]
    shown, guard, _ = read(REDACT, call)
    assert text_of(shown, "arguments") == '{"a":"'
    assert guard.blocked is REDACT


def test_the_name_of_a_call_is_searched() -> None:
    shown, guard, _ = read(REDACT, [("call", "heron"), ("arguments", "{}")])
    assert shown == []
    assert guard.blocked is REDACT


@pytest.mark.parametrize(
    "written",
    [r"\u0068eron", r"h\u0065ron", r"her\u006F\u006e", r"\\u0068eron", r"\nheron", r"x\theron"],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_written_with_escapes_of_json_is_found(written: str, *, is_whole: bool) -> None:
    text = f'say "{written}" now'
    shown, _, hits = read(REDACT, [("content", text)] if is_whole else cut(text))
    found = text_of(shown)
    assert found.endswith('[BIRD]" now')
    assert hits == ["bird:content"]
    assert "heron" not in json.loads(f'"{found.split(chr(34))[1]}"')


@pytest.mark.parametrize(
    "written",
    [
        *["&#104;eron", "h&#x65;ron", "h&#X000065;ron", "&amp;#104;eron", "heron&nbsp;"],
        r"h&#92;u0065ron",
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_written_with_references_of_html_is_found(written: str, *, is_whole: bool) -> None:
    text = f"R&D say {written} now &c."
    shown, _, hits = read(REDACT, [("content", text)] if is_whole else cut(text))
    assert text_of(shown) == f"R&D say [BIRD]{'&nbsp;' * ('nbsp' in written)} now &c."
    assert hits == ["bird:content"]


def test_what_is_no_reference_stays() -> None:
    for text in ("a &heron; b", "a?h&e=r&on", "&#104 eron", "&#x110000;&&#; h&zwnj eron"):
        shown, _, hits = read(TextRule("x", TextPattern("h ?e ?r"), "redact", "[X]"), cut(text))
        assert text_of(shown) == text
        assert not hits


@pytest.mark.parametrize(
    "written",
    [r"\x68eron", r"\U00000068eron", r"\\\\u0068eron", r"he\/ron", "he\tron", "[he](x)ron"],
)
def test_what_becomes_text_only_elsewhere_stays(written: str) -> None:
    """As docs/compliance.md says."""
    shown, _, hits = read(REDACT, cut(f"say {written} now"))
    assert (text_of(shown), hits) == (f"say {written} now", [])


def test_a_pair_of_surrogates_is_one_character() -> None:
    rule = TextRule("cat", TextPattern("\U0001f431", apart=""), "redact", "[CAT]")
    shown, _, _ = read(rule, cut(r'a "\ud83d\udc31" and \ud83d alone'))
    assert text_of(shown) == r'a "[CAT]" and \ud83d alone'


@settings(max_examples=200, deadline=None)
@given(st.text('heron \\u0068nt"[]&#1;*', max_size=30), st.data())
def test_the_cut_changes_nothing_with_escapes(text: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7))
    whole, _, _ = read(REDACT, [("content", text)])
    parts, _, _ = read(REDACT, [("content", text[i : i + size]) for i in range(0, len(text), size)])
    assert text_of(parts) == text_of(whole)


def test_a_rule_that_fails_refuses_unless_texts_may_pass() -> None:
    def fail(text: str) -> bool:
        raise ArithmeticError(text)

    rule = TextRule("bad", TextPattern("heron", check=fail), "redact", "[X]")
    for serves in (False, True):
        hits: list[str] = []
        guard = AnswerGuard(
            TextRules([rule], serves_on_error=serves),
            lambda rule, where, hits=hits: hits.append(rule.name),  # type: ignore[misc]
        )
        shown = [
            one for p in cut("a heron b") for one in guard.take([MessageDelta(*p)], is_over=False)
        ]
        shown += guard.take([], is_over=True)
        assert text_of(shown) == ("a heron b" if serves else "a ")
        assert (guard.blocked is None) is serves
        assert hits == ["error"]
