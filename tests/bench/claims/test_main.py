"""``ridgeline bench claims``: each technique off and on, under a virtual clock and for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ridgeline.bench.claims import bench_claims
from ridgeline.bench.claims.harness import LoadSizes
from ridgeline.bench.claims.techniques import CLAIMS
from ridgeline.planner import PlanFlags
from tests.cli.test_main import ridgeline
from tests.engine import test_llm

SVG = "{http://www.w3.org/2000/svg}"
OF_A_GPU = LoadSizes(
    num_requests=64, prompts=(200, 600), mean_new=60, most_new=1536, one=(512, 40),
    cache_tokens=None, shared=(960, 40), batches=(1, 16, 64), long_prompt=2048,
    long_load=(20, 2600, 30), weights=("bf16", "int8", "int4"), caches=("bf16", "int8"),
)  # fmt: skip
TINY = LoadSizes(
    num_requests=6, prompts=(4, 12), mean_new=4, most_new=24, one=(12, 6),
    cache_tokens=96, shared=(32, 4), batches=(1, 3), long_prompt=24,
    long_load=(4, 20, 4), weights=("bf16", "int8", "int4"), caches=("f16", "int8"),
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model of which every token can be computed."""
    monkeypatch.setattr(test_llm, "POISON", slice(0))
    return test_llm.write_model(tmp_path / "sound")


def compared(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"model": None, "plan_flags": PlanFlags(), "seconds": 600, "out": None}
    bench_claims(**usual | arguments, as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_on_a_device_each_technique_is_compared_with_its_claim(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "claims.svg"
    found = compared(capsys, plan_flags=PlanFlags(on="a100-40-sxm"), sizes=OF_A_GPU, out=out)
    assert (found["machine"], found["model"]) == ("a100-40-sxm", "Llama 2 13B")
    assert found["left_out"] == []
    rows = {row["technique"]: row for row in found["techniques"]}
    assert len(rows) == 12
    assert {row["paper"] for row in rows.values()} - {None} == {
        claim.paper for name, claim in CLAIMS.items() if name != "lookahead"
    }
    assert all(row["factor"] == pytest.approx(row["on_value"] / row["off_value"], rel=0.01)
               for row in rows.values())  # fmt: skip
    for name in ("KV cache", "iteration-level batching", "paged KV cache", "prefix cache"):
        assert rows[name]["factor"] > 1.2, name
    assert rows["continuous batching"]["factor"] > rows["iteration-level batching"]["factor"]
    assert rows["weights in 4 bits"]["factor"] > rows["weights in 8 bits"]["factor"] > 1.5
    assert rows["prompts in pieces: tail"]["factor"] > 1
    assert rows["prompts in pieces: rate"]["factor"] > 1
    assert "times fewer" in rows["prefix cache"]["why"]
    # Answers end before what their clients allow; `ridgeline simulate` has the flags for it.
    assert rows["paged KV cache"]["on_flags"].endswith("--max-tokens 1536 --answer-tokens 60:1")
    speeds, token_s, cost = (
        [one[name] for one in found["batch_sizes"]]
        for name in ("tokens_per_s", "token_s", "usd_per_million")
    )
    assert speeds == sorted(speeds)
    assert token_s == sorted(token_s)
    assert cost == sorted(cost, reverse=True)
    drawn = ElementTree.parse(out).getroot()
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert all(name in texts for name in rows)
    num_bars = len(list(drawn.iter(f"{SVG}title")))
    assert num_bars == len(rows)


def test_under_a_virtual_clock_it_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    few = OF_A_GPU._replace(num_requests=12, long_load=(6, 900, 8), batches=(1, 4))
    one, two = (compared(capsys, plan_flags=PlanFlags(on="l40s"), sizes=few) for _ in range(2))
    assert one | {"seconds": 0} == two | {"seconds": 0}


def test_only_the_techniques_that_are_named_are_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"plan_flags": PlanFlags(on="l40s"), "sizes": OF_A_GPU, "only": ["drafts", "KV cache"]}
    found = compared(capsys, **asked, seconds=1e-6)  # however slow the machine is
    assert [row["technique"] for row in found["techniques"]] == ["KV cache", "drafts"]
    assert (found["batch_sizes"], found["left_out"]) == ([], [])
    done = ridgeline("bench", "claims", "--on", "l40s", "--only", "paging")
    assert done.returncode == 1
    assert (
        "--only 'paging' is not a technique: use one of KV cache, iteration-level batching"
        in done.stderr
    )


def test_the_real_engine_does_what_each_technique_says(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "claims.json"
    options = {"kv_cache_memory": "2MiB", "threads": 1}
    found = compared(capsys, model=str(model), sizes=TINY, options=options, out=out)
    assert json.loads(out.read_text()) == found
    rows = {row["technique"]: row for row in found["techniques"]}
    assert found["machine"] == "this machine"
    assert {"lookahead", "drafts", "attention in tiles"} <= rows.keys()
    num_rows = sum(range(12, 12 + 6)), 12 + 5  # each prompt again, or once
    assert f"{num_rows[0]:,} -> {num_rows[1]:,}" in rows["KV cache"]["why"]
    shared = 6 * 36, 36 + 5 * 4  # 32 of 36 tokens are there already
    assert f"{shared[0] + 6 * 7:,} -> {shared[1] + 6 * 7:,}" in rows["prefix cache"]["why"]
    assert all(row["least"] <= row["factor"] <= row["most"] for row in rows.values())
    assert [one["num_streams"] for one in found["batch_sizes"]] == [1, 3]


def test_the_table_has_a_line_for_each_technique(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    few = OF_A_GPU._replace(num_requests=8, long_load=(6, 900, 8), batches=(1, 4))
    bench_claims(None, PlanFlags(on="h100-sxm"), 600, None, as_json=False, sizes=few)
    shown = capsys.readouterr().out
    assert "What techniques bring: Llama 2 13B on h100-sxm" in shown
    assert "Kwon et al., vLLM, 2023" in shown
    assert "per million" in shown


def test_what_cannot_be_compared_is_one_line() -> None:
    with pytest.raises(ValueError, match="--seconds 1e-06 is too little"):
        bench_claims(None, PlanFlags(on="h100-sxm"), 1e-6, None, as_json=True, sizes=OF_A_GPU)
    small = PlanFlags(on="mine", memory="8GiB", bandwidth=936, tflops=71, tensor_parallel_size="1")
    with pytest.raises(ValueError, match="Llama 2 13B does not fit on one device of yours: "):
        bench_claims(None, small, 60, None, as_json=True, sizes=OF_A_GPU)
    assert "name one with --on" in ridgeline("bench", "claims", "--engine", "vllm").stderr
    with pytest.raises(ValueError, match="names 2 devices"):
        bench_claims(None, PlanFlags(on="l4,l40s"), 60, None, as_json=True, sizes=OF_A_GPU)
    result = ridgeline("bench", "claims", "--on", "h100-sxm", "--out", "claims.png")
    assert result.returncode == 1
    assert "claims.png: its ending says what to write" in result.stderr
    assert "no device" in ridgeline("bench", "claims", "--on", "abacus").stderr
