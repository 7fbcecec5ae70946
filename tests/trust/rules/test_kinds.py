"""What each kind finds, in the forms that are published for it, and what only looks like it."""

from __future__ import annotations

from itertools import product

import pytest

from ridgeline.trust.rules.kinds import KINDS
from ridgeline.trust.text_rules.answer import TextRule, TextRules, screened
from tests.trust.rules.forms import FORMS, NEAR, pem

AROUND = [("", ""), ("see ", " there"), ("(", ")"), ("key_", ""), ('"', '"'), ("is: ", ", ok")]
RULES = {kind: TextRules([TextRule(kind, KINDS[kind], "redact", "[X]")]) for kind in KINDS}


def shown(kind: str, text: str) -> str:
    return screened(text, RULES[kind], lambda rule: None)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_finds_all_of_each_of_its_forms(kind: str) -> None:
    found = [
        (text, shown(kind, before + text + after))
        for text, (before, after) in product(FORMS[kind], AROUND)
        if (kind, before) not in {("email", "key_"), ("ip", "key_")}  # the mark is a part of it
    ]
    assert not [
        (text, left)
        for text, left in found
        if left not in {before + "[X]" + after for before, after in AROUND}
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_leaves_what_only_looks_like_it(kind: str) -> None:
    for text, (before, after) in product(NEAR[kind], AROUND[:3]):
        assert shown(kind, before + text + after) == before + text + after


def test_a_kind_is_found_with_emphasis_and_letters_that_look_alike() -> None:
    assert shown("card", "**4111** `1111` 1111 *1111*") == "**[X]*"
    assert shown("phone", "call _+1 **415** 555 0132_") == "call _[X]_"
    assert shown("ip", "at 2001:**db8**::1 or 10.**1**.2.3") == "at [X] or [X]"
    assert shown("iban", "D\u041589 3704 0044 0532 0130 00") == "[X]"
    assert shown("aws_key", "`wJalrXUtnFEMI/K7MDENG/`**bPxRfiCYEXAMPLEKEY**") == "`[X]**"


def test_text_behind_a_key_without_its_last_line_stays() -> None:
    key = pem("PRIVATE KEY", 3).rpartition("\n")[0]
    assert shown("private_key", f"{key}\n\nKeep it safe.") == "[X]\n\nKeep it safe."


def test_two_keys_are_two_matches() -> None:
    text = f"{pem('PRIVATE KEY')}\nand then\n{pem('EC PRIVATE KEY')}"
    assert shown("private_key", text) == "[X]\nand then\n[X]"
