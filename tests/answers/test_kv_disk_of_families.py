"""After a restart with a folder of blocks: the same answer, in every family and format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from tests.answers.test_same_answer_of_families import (
    BLOCK,
    CONTEXT,
    FORMATS,
    OFTEN,
    ON_CPU,
    REQUESTS,
    TOLERANCE,
)
from tests.answers.tiny_families import write_family
from tests.engine.kv_disk.test_cache_tier import assert_same

pytestmark = pytest.mark.engine
LEAST = 16  # tokens of a prompt that is kept
CASES = [
    pytest.param(name, one, marks=[] if (name, one) in OFTEN else pytest.mark.full)
    for name in ON_CPU
    for one in ("auto", "f32", "int8", "reference")
]


def answers(llm: LLM) -> tuple[list[Any], int]:
    """All that is drawn, and how many tokens of prompts were cached."""
    outputs = [llm.generate(*request, progress=False)[0] for request in REQUESTS]
    if llm.kv_disk:
        llm.kv_disk.settle()
    llm.engine.check()
    drawn = [[(seq.token_ids, seq.logprobs) for seq in one.outputs] for one in outputs]
    return drawn, sum(one.num_cached_tokens for one in outputs)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_restart_changes_no_bit(tmp_path: Path, name: str, form: str) -> None:
    path = write_family(tmp_path / "model", name)
    options = {"threads": 1, "max_model_len": CONTEXT, "kv_cache_memory": "4MiB"} | FORMATS[form]
    kept = {"kv_disk": f"{tmp_path / 'kept'}:256MiB", "kv_disk_min": LEAST}
    with LLM(path, **options) as llm:
        alone, cached_alone = answers(llm)
    with LLM(path, **options, **kept) as llm:
        first, cached = answers(llm)
        assert cached == cached_alone
    with LLM(path, **options, **kept) as llm:
        again, cached = answers(llm)
    for ours, theirs in zip([*first, *again], [*alone, *alone], strict=True):
        assert_same(ours, theirs, tolerance=TOLERANCE.get(form, 0.0))
    assert cached > cached_alone
    assert cached == sum(
        (len(prompt) - 1) // BLOCK * BLOCK for prompt, _ in REQUESTS if len(prompt) >= LEAST
    )
