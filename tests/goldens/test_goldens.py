"""Each golden is computed again: a version that changes bits must say so, and write them anew."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ridgeline.trust.receipts.reading import read
from ridgeline.trust.receipts.verify import differences, opened, other_files
from tests.goldens.__main__ import FAMILIES, FORMATS, HERE, REQUESTS
from tests.trust.receipts.requests import SMALL


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_earlier_versions(family: str, form: str) -> None:
    files = [HERE / family / f"{form}-{name}.json" for name in REQUESTS]
    receipts = [read(file.read_bytes()).receipt for file in files]
    with opened(receipts[0], HERE / family / "model", **SMALL) as llm:
        for receipt in receipts:
            assert list(other_files(receipt, llm.digest, llm.file_digests)) == []
            prompts = [one.tokens.ids or () for one in receipt.prompts]
            told = "bits have changed: if they must, python -m tests.goldens, and CHANGELOG.md"
            assert list(differences(receipt, llm, prompts)) == [], told


def test_a_golden_of_another_bit_is_noticed(tmp_path: Path) -> None:
    """Each token of a golden counts, the last one too."""
    file = HERE / FAMILIES[0] / "default-greedy.json"
    golden = json.loads(file.read_bytes())
    statement = json.loads(base64.b64decode(golden["payload"]))
    ids = statement["predicate"]["prompts"][0]["answers"][0]["tokens"]["ids"]
    ids[-1] += 1
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    receipt = read(json.dumps(golden | {"payload": payload}).encode()).receipt
    with opened(receipt, HERE / FAMILIES[0] / "model", **SMALL) as llm:
        (wrong,) = differences(receipt, llm, [receipt.prompts[0].tokens.ids or ()])
    assert wrong.startswith("answer 0 to prompt 0 differs from token 19 of 20 on")
