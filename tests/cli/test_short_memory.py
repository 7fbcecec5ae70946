"""Where memory is short it answers, or one line says before it loads what is missing."""

from __future__ import annotations

import re
import resource
import subprocess

import pytest

from tests.cli.test_main import RIDGELINE
from tests.real_models import real_model
from tests.waiting import PATIENCE_S

TOO_LITTLE = re.compile(
    r"ridgeline: not enough memory: \S+ (Ki|Mi|)B is available, and the smallest start needs .* "
    r"for weights, .* for a step, .*; free some memory, .*, or take a smaller model\n"
)


@pytest.mark.parametrize("limit_kb", [550_000, 700_000, 800_000, 850_000, 900_000, 1_000_000])
def test_a_limit_on_addresses_is_foreseen(limit_kb: int) -> None:
    real_model("smollm2")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_kb << 10, limit_kb << 10))

    asked = "run", "smollm2", "Hello", "--max-tokens", "4", "--threads", "2"
    done = subprocess.run(
        [str(RIDGELINE), *asked], preexec_fn=limit, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if done.returncode:
        assert TOO_LITTLE.fullmatch(done.stderr), done.stderr
    else:
        assert done.stdout.strip()
        assert limit_kb > 550_000, "the weights and a step alone take more"
