"""Draws that were recorded once: a seed means the same answer in every version and on any backend.

``tools/record_draws.py`` wrote them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tools.record_draws import PATH, VOCAB_SIZE, logits_of, row_of

from ridgeline.backends.cpu.layout.sampling_table import Draws
from ridgeline.backends.sampler.rule import rank_tokens, sample
from tests.backends.cpu.test_draw import Kernel

RECORDED: list[dict[str, Any]] = json.loads(PATH.read_text())


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(VOCAB_SIZE)


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_both_statements_of_the_rule_draw_what_was_recorded(number: int, kernel: Kernel) -> None:
    wanted, logits = RECORDED[number], logits_of(number)[None]
    tokens = wanted["tokens"]
    rows = [row_of(number, wanted["params"], draw) for draw in range(len(tokens))]
    assert sample(logits, np.zeros(len(rows), np.intp), rows) == tokens
    draws = Draws(VOCAB_SIZE)
    for row in rows:
        draws.add([row], 2)
    found = kernel.run(logits.repeat(len(rows), axis=0), draws)
    assert [token for token, _ in found] == tokens
    first = wanted["first"]
    for ranks in (*rank_tokens(logits, tokens[:1], 2), found[0][1]):
        assert ranks is not None
        assert ranks.logprob == pytest.approx(first["logprob"], abs=1e-12)
        assert (ranks.rank, [token for token, _ in ranks.top]) == (first["rank"], first["top"])
