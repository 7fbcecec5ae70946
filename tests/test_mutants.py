"""What the mutants break is there: one whose text has changed would break nothing."""

from __future__ import annotations

from tests.mutants import MUTANTS, ROOT


def test_each_mutant_finds_its_text_just_once() -> None:
    sources = {one.file: (ROOT / "src" / "ridgeline" / one.file).read_text() for one in MUTANTS}
    missed = [one.why for one in MUTANTS if sources[one.file].count(one.old) != 1]
    assert not missed, missed
