"""``ridgeline simulate --on DEVICE``, and answers whose length nobody knows before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.simulate.engines import EngineOnDevice
from ridgeline.engine.setup.options import Options
from ridgeline.planner import PlanFlags, plan
from tests.bench.simulate.test_main import document, home, run  # noqa: F401  (a fixture)
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.model.cost.published_configs import PUBLISHED

LOAD = ("--prompt-tokens", "400:0.3", "--max-tokens", "40", "--num-prompts", "8")
AT_ONCE = ("--max-concurrency", "8", *LOAD)
MINE = ("--on", "mine", "--memory", "24GiB", "--bandwidth", "936", "--tflops", "71")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "llama-3.1-8b.json"
    path.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]), encoding="utf-8")
    return str(path)


def tpot_ms(found: dict[str, Any]) -> float:
    middle: float = found["tpot_excl_first"]["p50_ms"]
    return middle


def test_a_config_runs_on_a_device_and_a_faster_one_is_faster(config: str) -> None:
    slow, fast = (document(run(config, "--on", name, *AT_ONCE)) for name in ("a100-80-sxm", "h100"))
    assert slow["num_successful"] == fast["num_successful"] == 8
    assert slow["total_output_tokens"] == 8 * 40
    # A step of few tokens reads all weights: 2.04 TB/s against 3.35, and what a layer costs.
    assert 1.2 < tpot_ms(slow) / tpot_ms(fast) < 1.7
    prediction = slow["prediction"]
    assert prediction["source"] == "published"
    assert prediction["device"] == {
        "name": "a100-80-sxm", "tp": 1, "pp": 1, "engine": "vllm", "dtype": "bf16",
        "kv_tokens": prediction["device"]["kv_tokens"],
    }  # fmt: skip
    assert 300_000 < prediction["device"]["kv_tokens"] < 500_000
    low, high = prediction["output_tokens_per_s_interval"]
    assert low < slow["output_tokens_per_s"] < high
    assert any("come from a formula fitted to" in line for line in slow["warnings"])
    assert any("--on h100: taken for h100-sxm" in line for line in fast["warnings"])


def test_it_is_divided_and_stored_as_plans_divide_and_store_it(config: str) -> None:
    flags = ("--on", "l4", "--engine", "sglang", "--tensor-parallel-size", "2", "--dtype", "fp8")
    result = run(config, *flags, *AT_ONCE)
    found = document(result)
    assert "2 x l4, rules of sglang" in result.stdout
    assert (found["flags"]["on"], found["flags"]["dtype"]) == ("l4", "fp8")
    device = found["prediction"]["device"]
    assert (device["tp"], device["engine"]) == (2, "sglang")
    assert device["dtype"].startswith("fp8")
    # In bf16 one L4 does not hold weights and cache, so there are as many as do.
    alone = document(run(config, "--on", "l4", "--engine", "sglang", *AT_ONCE))
    assert alone["prediction"]["device"]["name"] in ("l4", "2 x l4")


@pytest.mark.parametrize(
    ("name", "on", "engine", "looks_ahead"),
    [
        ("llama-3.1-8b", "h100-sxm", "ridgeline", True),
        ("llama-3.1-8b", "h100-sxm", "vllm", False),
        ("falcon-h1-0.5b", "h100-sxm", "ridgeline", False),
        ("llama-3.1-8b", "cpu-epyc-9654", "ridgeline", False),
    ],
)
def test_there_is_room_for_a_token_more_where_the_backend_runs_ahead(
    name: str, on: str, engine: str, looks_ahead: bool, tmp_path: Path
) -> None:
    """The cuda backend does, but for models with states."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]["config"]), encoding="utf-8")
    found = EngineOnDevice(str(path)).set_up(Options(), PlanFlags(on=on, engine=engine), [500])
    assert found.settings.looks_ahead is looks_ahead


def test_a_device_of_ones_own_is_taken_by_flags_and_from_a_file(
    config: str, tmp_path: Path
) -> None:
    by_flags = document(run(config, *MINE, "--dtype", "int4", *AT_ONCE))
    file = tmp_path / "own.csv"
    file.write_text("id,label_gb,read_gb_per_s,bf16_tflops\nattic,24,936,71\n", encoding="utf-8")
    by_file = document(run(config, "--devices", str(file), "--dtype", "int4", *AT_ONCE))
    assert by_flags["prediction"]["device"]["name"] == "mine"
    assert by_file["prediction"]["device"]["name"] == "attic"
    assert tpot_ms(by_flags) == tpot_ms(by_file)


def test_it_says_what_a_plan_says_of_the_same_load(config: str) -> None:
    load = ("--on", "rtx3090", "--engine", "llamacpp", "--dtype", "q4_k_m", "--prompt-tokens", "32")
    found = document(
        run(config, *load, "--max-tokens", "64", "--max-concurrency", "1", "--num-prompts", "3")
    )
    planned = plan(config, on="rtx3090", engine="llamacpp", dtype="q4_k_m", prompt_tokens="32",
                   new_tokens="64", max_concurrency=1, tensor_parallel_size="1")  # fmt: skip
    tpot = planned.choices[0].time()["tpot_ms"]
    assert found["tpot_excl_first"]["mean_ms"] == pytest.approx(tpot, abs=0.001)


def test_policy_steps_and_cache_are_options_of_the_engine(config: str) -> None:
    long = ("--on", "a100-80-sxm", "--prompt-tokens", "3000:0.4", "--max-tokens", "40")
    busy = (*long, "--request-rate", "6", "--num-prompts", "16")
    whole, pieces = (
        document(run(config, *busy, "--policy", policy)) for policy in ("orca", "splitfuse")
    )
    worst = [one["itl_chunk_pooled"]["p99_ms"] for one in (whole, pieces)]
    assert worst[0] > 1.5 * worst[1]  # a whole prompt holds up all that generate
    few = document(run(config, *busy, "--max-num-seqs", "1", "--kv-cache-memory", "2GiB"))
    assert few["prediction"]["device"]["kv_tokens"] == pytest.approx((2 << 30) / 131072, rel=0.01)
    assert few["e2e"]["p95_ms"] > pieces["e2e"]["p95_ms"]


def test_a_sweep_tries_devices_and_formats(config: str) -> None:
    flags = ("--on", "l40s", "--set", "on=l40s,h100-sxm", "--set", "dtype=int4", *AT_ONCE)
    result = run(config, *flags, "--objective", "tpot:p50")
    found = document(result)
    assert [tuple(one["settings"].values()) for one in found["sweep"]] == [
        ("l40s", "int4"), ("h100-sxm", "int4"),
    ]  # fmt: skip
    assert found["best"] == {"on": "h100-sxm", "dtype": "int4"}
    assert "best by tpot:p50: --on h100-sxm --dtype int4" in result.stdout


def test_a_model_that_is_here_has_its_texts_there_too(model: Path) -> None:  # noqa: F811
    flags = ("--on", "l4", "--max-concurrency", "2", "--num-prompts", "4")
    found = document(run(str(model), *flags, "--prompt-words", "6", "--max-tokens", "5"))
    here = document(
        run(str(model), *flags[2:], "--prompt-words", "6", "--max-tokens", "5", "--threads", "1")
    )
    assert found["total_input_tokens"] == here["total_input_tokens"]
    assert tpot_ms(found) != tpot_ms(here)
    assert here["prediction"]["device"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--on", "l4,l40s"), "--on l4,l40s names 2 devices: name one"),
        (("--on", "abacus"), "there is no device 'abacus'"),
        (("--on", "mine", "--memory", "24GiB"), "give --bandwidth and --tflops"),
        (("--on", "mine"), "--on mine: say what it has with --memory"),
        (("--memory", "24GiB"), "--memory describes your own device: give --on mine"),
        (("--engine", "vllm"), "--engine is about a device: name one with --on"),
        (("--tensor-parallel-size", "auto"), "auto is about a device: name one with --on"),
        (("--on", "l4", "--threads", "2"), "--threads is about this machine: give no --on"),
        (("--on", "l4", "--calibration", "served"), "--calibration is about this machine"),
        (("--on", "l4", "--set", "threads=1,2"), "--threads is about this machine"),
        (("--on", "l4", "--set", "dtype=fp8,fp9"), "--dtype: there is no format 'fp9'"),
        (("--set", "on=l4,l40s"), "'on' is not an option"),
        (("--on", "t4", "--dtype", "bf16"), "t4 cannot compute bf16"),
        (("--on", "t4", "--tensor-parallel-size", "1"), "does not fit on one NVIDIA T4"),
        (("--on", "l4", "--max-model-len", "200000"), "more than the 131072 tokens"),
        (("--on", "l4", "--answer-tokens", "0"), "--answer-tokens is 0"),
        (("--dtype", "fp8"), "--dtype is 'fp8', not one of"),
    ],
)
def test_what_makes_no_sense_is_one_line(config: str, flags: tuple[str, ...], words: str) -> None:
    result = run(config, *flags, *AT_ONCE)
    assert result.exit_code != 0
    said = result.output + str(result.exception)
    assert words in said.replace("\n", " ")


def test_a_config_has_no_tokenizer(config: str) -> None:
    result = run(config, "--on", "l4", "--max-concurrency", "1")
    assert "its tokenizer is not here, so give lengths in tokens" in str(result.exception)


def test_answers_end_before_what_clients_allow_which_a_reservation_costs(
    model: Path,  # noqa: F811
) -> None:
    flags = (str(model), "--max-concurrency", "12", "--num-prompts", "24", "--max-tokens", "100")
    flags = (*flags, "--prompt-tokens", "8")
    short = (*flags, "--kv-cache-memory", "40KiB", "--threads", "1", "--answer-tokens", "6:0.5")
    paged, full = (document(run(*short, "--kv-reservation", way)) for way in ("paged", "full"))
    assert paged["total_output_tokens"] == full["total_output_tokens"] < 24 * 20
    assert paged["flags"]["answer_tokens"] == "6:0.5"
    assert paged["output_tokens_per_s"] > 1.5 * full["output_tokens_per_s"]


def test_no_answer_is_longer_than_its_client_allows(config: str) -> None:
    exact = document(run(config, "--on", "l4", *AT_ONCE))
    more = document(run(config, "--on", "l4", *AT_ONCE, "--answer-tokens", "500"))
    assert exact["total_output_tokens"] == more["total_output_tokens"] == 8 * 40
    assert exact["e2e"] == more["e2e"]
    several = ("--replicas", "2", "--answer-tokens", "10")
    fleet = document(run(config, "--on", "l4", *AT_ONCE, *several))
    assert fleet["total_output_tokens"] == 8 * 10
