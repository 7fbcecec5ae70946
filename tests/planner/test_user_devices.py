"""Devices that a user describes, by flags or in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.planner import PlanFlags, plan
from ridgeline.planner.catalogue import devices
from tests.cli.test_main import ridgeline
from tests.model.cost.published_configs import PUBLISHED

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
LOAD = {"prompt_tokens": "512", "new_tokens": "128", "max_concurrency": 4}
HEAD = "id,label_gb,usable_mib,read_gb_per_s,bf16_tflops\n"


def test_a_device_by_flags_is_planned_as_the_same_one_of_the_catalogue() -> None:
    known = devices()["rtx3090"]
    mine = {
        "on": "mine", "memory": f"{known.usable_bytes}",
        "bandwidth": known.read_bytes_per_s / 1e9, "tflops": known.peak_ops_per_s["bf16"] / 1e12,
    }  # fmt: skip
    given = plan(LLAMA, **mine, dtype="q4_k_m", **LOAD)
    same = plan(LLAMA, on="rtx3090", dtype="q4_k_m", **LOAD)
    assert given.best.max_concurrency == same.best.max_concurrency
    assert given.best.ledger.total_bytes == same.best.ledger.total_bytes
    # Only constants differ: there is no generation to look them up by.
    assert given.choices[0].time()["tpot_ms"] is not None
    assert given.choices[0].placement.device.id == "mine"


def test_memory_alone_is_enough_for_what_fits_and_a_load_names_what_is_missing() -> None:
    assert plan(LLAMA, on="mine", memory="24GiB").best.ledger.capacity_bytes == 24 << 30
    with pytest.raises(
        ValueError, match="mine: how long steps take depends on its speed: give --b"
    ):
        plan(LLAMA, on="mine", memory="24GiB", bandwidth=936.0, **LOAD)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"on": "mine"}, "--memory, such as 24GiB"),
        ({"memory": "24GiB"}, "give --on mine"),
        ({"bandwidth": 900.0, "on": "l4"}, "--bandwidth describes your own device"),
        ({"on": "mine", "memory": "much"}, "--memory: 'much' is not a size"),
        ({"on": "mine", "memory": "8GiB", "tflops": -1.0}, "--tflops is -1.0"),
    ],
)
def test_figures_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanFlags(**flags)


def test_a_file_of_devices_stands_beside_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEAD + "Box,24,,936,71\nL4,,30000,500,100\n")
    both = plan(LLAMA, devices=str(path))
    assert [p.device.id for p in both.placements] == ["Box", "L4"]
    assert both.placements[0].device.usable_bytes == 24_000_000_000
    named = plan(LLAMA, devices=str(path), on="box,l4,h100")
    assert [p.device.id for p in named.placements] == ["Box", "L4", "h100-sxm"]
    assert named.placements[1].device.usable_bytes == 30_000 << 20  # one's own goes first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (HEAD, "no device stands in it"),
        ("id,speed\nx,3\n", "no column 'speed': give some of id,name"),
        (HEAD + "box,24,,fast,71\n", "line 2: read_gb_per_s is 'fast'; expected a number above 0"),
        (HEAD + "box,24,,-5,71\n", "line 2: read_gb_per_s is '-5'"),
        (HEAD + "box,,,936,71\n", "line 2: box needs read_gb_per_s, and label_gb or usable_mib"),
        (HEAD + ",24,,936,71\n", "line 2: id is ''"),
        (HEAD + "box,24,,936\n", "line 2: wanted 5 columns"),
    ],
)
def test_a_damaged_file_is_refused_by_line_and_column(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        plan(LLAMA, devices=str(path))


def test_the_command_takes_both(tmp_path: Path) -> None:
    config = tmp_path / "llama.json"
    config.write_text(json.dumps(LLAMA))
    mine = ("--on", "mine", "--memory", "24GiB", "--bandwidth", "936", "--tflops", "71")
    done = ridgeline("plan", str(config), *mine, "--dtype", "q4_k_m", "--format", "json")
    assert json.loads(done.stdout)["memory"]["device"] == "mine"
    gone = ridgeline("plan", str(config), "--devices", str(tmp_path / "none.csv"))
    assert gone.returncode == 1
    assert "none.csv" in gone.stderr


def test_the_sequences_of_a_step_are_the_engines_or_as_asked() -> None:
    load: dict[str, Any] = {"prompt_tokens": "64", "new_tokens": "64", "max_concurrency": 600}
    counts = [
        plan(LLAMA, on="h200", engine="trtllm", kv_cache_dtype="fp8", **load, **asked)
        .choices[0].time()["tpot_ms"]
        for asked in ({"max_num_seqs": 64}, {"max_num_seqs": 256}, {})
    ]  # fmt: skip
    assert counts == sorted(counts)  # TensorRT-LLM's own default is the most
    assert len(set(map(str, counts))) == 3
