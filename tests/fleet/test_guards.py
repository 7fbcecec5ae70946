"""Several models with a guard beside each: who judges, and what it judges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.test_router import routing
from tests.serve.serving import serving
from tests.trust.guards.models import write_guard

TEXTS = ["The cat", "the dog said hello"]
RULES = """
version = "1"
[keys.default]
input = ["unsafe"]
[rules]
unsafe = { model = "guard", at = 0.000001, action = "block" }
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guard(tmp_path_factory.mktemp("guards") / "guard", "ShieldGemma")


def test_each_model_has_the_guard_beside_it(folder: Path, guard: Path, tmp_path: Path) -> None:
    body = {"input": TEXTS}
    with serving(guard, {"kv_cache_memory": "4MiB"}) as alone:
        wanted = alone.call("/v1/moderations", body)[1]["results"]
    flags = ("--guard", str(guard))
    with routing(folder, tmp_path / "log", *flags) as routed:
        for model in ("guard", None):
            named = {"model": model} if model else {}
            status, answer, _ = routed.call("/v1/moderations", body | named)
            assert (status, answer["results"]) == (200, wanted)
        assert routed.call("/v1/moderations", body | {"model": "other"})[0] == 404
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    with routing(folder, tmp_path / "log", *flags, "--rules", str(rules)) as routed:
        for name in ("a", "b"):
            asked = {"model": name, "prompt": "x", "max_tokens": 1}
            status, answer, _ = routed.call("/v1/completions", asked)
            assert (status, answer["error"]["code"]) == (400, "content_filter")
