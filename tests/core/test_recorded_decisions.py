"""What the core decides for fixed workloads is what it decided when it was one file.

``tests/data/decisions.json`` holds what Static and Orca decided before deciding and folding were
two files and before admission was part of the core, and what SplitFuse decided since it lets short
prompts pass a long one: its only change. A change that means to decide differently records them
anew (``python -m tests.core.test_recorded_decisions``) and says so in the CHANGELOG.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.step import Step
from tests.core.harness import POLICIES
from tests.core.test_workloads import MAX_LEN, serve, workload

RECORDED = Path(__file__).parents[1] / "data" / "decisions.json"


def decided(step: Step) -> str:
    """Return all that a step of any version of the core says, as text."""
    work = [
        (w.seq_id, w.start, w.tokens, w.table, w.seeds, w.history, w.targets) for w in step.work
    ]
    waits = [(seq_id, str(why)) for seq_id, why in step.waits]
    return repr((work, step.copies, step.admitted, step.preempted, waits))


def decisions(policy: Policy, number: int) -> str:
    """Return the number of steps of a workload, and a digest of what they say."""
    dice = random.Random(1000 + number)
    block_size = number % 16 + 1
    _, runner = serve(
        workload(dice, dice.randint(2, 10)),
        -(-MAX_LEN // block_size) + dice.choice((0, 0, 1, 4, 10)),
        block_size,
        policy=policy,
        budget=64 if policy.whole_prompts else dice.choice((8, 16, 64)),
        seats=dice.randint(1, 8),
        caching=dice.random() < 0.8,
        arrivals=dice,
    )
    text = "\n".join(decided(step) for step in runner.steps)
    return f"{len(runner.steps)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def record() -> dict[str, list[str]]:
    """Return the decisions of 40 workloads for each policy."""
    return {type(policy).__name__: [decisions(policy, i) for i in range(40)] for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_decisions_are_the_recorded_ones(policy: Policy) -> None:
    recorded = json.loads(RECORDED.read_text())[type(policy).__name__]
    assert [decisions(policy, number) for number in range(len(recorded))] == recorded


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
