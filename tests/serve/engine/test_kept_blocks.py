"""Blocks that a server before has kept: the same answer, from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.serving import Served, serving
from tests.waiting import eventually

ASKED = {"prompt": [5 + i % 90 for i in range(90)], "max_tokens": 4, "seed": 3, "logprobs": 2}


def asked(served: Served, **headers: str) -> tuple[Any, int]:
    """The answer, and how many tokens of its prompt were cached."""
    status, found, _ = served.call("/v1/completions", ASKED, **headers)
    assert status == 200
    return found["choices"], (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def settled(served: Served) -> None:
    assert served.llm.kv_disk is not None
    served.llm.kv_disk.settle()


def test_a_new_server_answers_from_what_the_old_one_kept(model: Path, tmp_path: Path) -> None:  # noqa: F811
    kept = {"kv_disk": f"{tmp_path}:64MiB", "kv_disk_min": 32}
    with serving(model, kept) as served:
        first, cached = asked(served)
        assert cached == 0
        settled(served)
    with serving(model, kept) as served:
        assert asked(served) == (first, 80)
        name = "ridgeline:kv_disk_blocks_total"
        counts = {one: value for one, value in served.metrics().items() if one.startswith(name)}
        assert counts == {
            f'{name}{{what="{what}"}}': value
            for what, value in (("written", 0), ("read", 5), ("dropped", 0), ("damaged", 0))
        }
        assert served.call("/v1/sleep", {"level": 2})[0] == 200
        assert asked(served) == (first, 80)


def test_keys_do_not_read_each_others_blocks(model: Path, tmp_path: Path) -> None:  # noqa: F811
    kept = {"kv_disk": f"{tmp_path}:64MiB", "kv_disk_min": 32}
    keys = {"api_key": ["a", "b"]}
    a, b = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    with serving(model, kept, **keys) as served:
        first, _ = asked(served, **a)
        settled(served)
    with serving(model, kept, **keys) as served:
        assert asked(served, **b) == (first, 0)
        assert asked(served, **a) == (first, 80)
        eventually(lambda: not served.running.async_engine.num_streams)
