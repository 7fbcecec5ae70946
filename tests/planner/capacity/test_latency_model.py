"""Published speeds: nine in ten lie in the stated interval, which no single figure decided."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers.fit_device_time import OLDER
from peers.kept_aside import misses
from peers.static_batch import batch_seconds, decode_counts, prefill_counts

from peers import fit_device_time
from ridgeline.model.cost.device_time import (
    DeviceTime,
    device_time,
    efficiency_of,
    ops_per_s,
    parse_efficiencies,
    reached_ops_per_s,
)
from ridgeline.model.cost.format_bytes import storage_of_dtype
from ridgeline.model.files.counting import shape_of_config
from ridgeline.planner.capacity.latency_model import efficiencies
from ridgeline.planner.catalogue import devices
from tests.model.cost.published_configs import PUBLISHED

ROOT = Path(__file__).parents[3]
KNOWN = json.loads((ROOT / "tests" / "data" / "known_speed.json").read_text())
CONFIGS = KNOWN["models"] | {name: one["config"] for name, one in PUBLISHED.items()}


def times_of(
    model: str, device: str, dtype: str, tp: int = 1, pp: int = 1, *, engine: str = OLDER
) -> DeviceTime:
    found = devices()[device]
    kv_bytes = 1.0 if dtype == "fp8" and engine == OLDER else 2.0
    shape = shape_of_config(CONFIGS[model])
    return device_time(
        *(shape, storage_of_dtype(dtype, shape), kv_bytes, found),
        *(efficiency_of(found, engine, efficiencies()), tp, pp),
    )


def log_error(point: dict[str, Any]) -> float:
    """Return log(published / predicted) of a time."""
    names = ("model", "device", "dtype", "tp")
    times = times_of(*(point[name] for name in names), engine=point["engine"])
    batch, new = point["batch"], point["new"]
    predicted_s = batch_seconds(times, batch, point["prompt"], new)
    if "ttft_ms" in point:
        return math.log(point["ttft_ms"] / 1e3 / (times.efficiency.request_s + predicted_s))
    if "tpot_ms" in point:
        return math.log(point["tpot_ms"] / 1e3 * new / predicted_s)
    per_s = point["tokens_per_s_per_device"] * point["tp"]
    return math.log(batch * new / per_s / predicted_s)


def is_inside(point: dict[str, Any]) -> bool:
    """Whether a published figure is in the interval that is stated."""
    found = efficiency_of(devices()[point["device"]], point["engine"], efficiencies())
    factor = found.first_factor_90 if "ttft_ms" in point else found.factor_90
    return abs(log_error(point)) <= math.log(factor)


def test_nine_in_ten_figures_of_each_generation_are_in_its_interval() -> None:
    inside: dict[str, list[bool]] = defaultdict(list)
    for point in KNOWN["points"]:
        generation = devices()[point["device"]].generation
        engine = "" if point["engine"] == OLDER else point["engine"]
        inside[engine if engine == "vllm" else f"{engine} {generation}"].append(is_inside(point))
    assert {name: len(of) for name, of in inside.items()} == {
        " hopper": 24, " ada": 12, " ampere": 21, "vllm": 8,
        "llamacpp ada": 15, "llamacpp ampere": 12, "llamacpp apple": 24,
    }  # fmt: skip
    assert all(sum(of) >= 0.9 * len(of) for of in inside.values())


def test_figures_that_nothing_was_fitted_to_are_in_the_interval() -> None:
    """As `python -m peers.kept_aside` prints them; throughputs are missed by 16 % in the mean."""
    found = list(misses())
    inside = [abs(one.error) <= math.log(one.factor) for one in found]
    assert len(found) == 44
    outside = [one.point["model"] for one, is_in in zip(found, inside, strict=True) if not is_in]
    assert outside == ["gpt-oss-120b"]
    throughputs = [abs(one.error) for one in found if "tokens_per_s" in one.point]
    assert sum(throughputs) / len(throughputs) < 0.17


def test_a_bare_roofline_would_not_do() -> None:
    """Without the constants most figures lie outside: they are not there for show."""
    outside = 0
    for point in KNOWN["points"][:57]:
        times = times_of(*(point[name] for name in ("model", "device", "dtype", "tp")))
        bare_s = 0.0
        for counts, steps in (
            (prefill_counts(point["batch"], point["prompt"]), 1),
            (decode_counts(point["batch"], point["prompt"] + point["new"] / 2), point["new"] - 1),
        ):
            parts = times.parts(counts)
            efficiency = times.efficiency
            read_s = (parts["weights"] + parts["cache"]) * efficiency.memory
            bare_s += steps * max(read_s, parts["compute"] * efficiency.compute)
        whole_s = batch_seconds(times, point["batch"], point["prompt"], point["new"])
        found = efficiency_of(devices()[point["device"]], OLDER, efficiencies())
        outside += abs(log_error(point) + math.log(whole_s / bare_s)) > math.log(found.factor_90)
    assert outside > 57 / 2


@pytest.mark.full
def test_the_table_is_what_the_tool_makes_of_the_figures(tmp_path: Path) -> None:
    fit_device_time.main(tmp_path / "table.csv")
    table = ROOT / "src" / "ridgeline" / "model" / "cost" / "data" / "efficiency.csv"
    for made, kept in zip(
        parse_efficiencies((tmp_path / "table.csv").read_text()),
        parse_efficiencies(table.read_text()),
        strict=True,
    ):
        assert (made.engine, made.generation, made.power) == (
            kept.engine, kept.generation, kept.power,
        )  # fmt: skip
        for name in ("layer_s", "memory", "compute", "attention", "error", "factor_90"):
            assert getattr(made, name) == pytest.approx(getattr(kept, name), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b", "jamba-v0.1"]),
    st.sampled_from(["l4", "h100-sxm", "h100-sxm/3g.40gb", "mi300x", "tpu-v5e"]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.integers(1, 512),
    st.integers(1, 8192),
)
def test_more_work_takes_no_less_time(
    model: str, device: str, tp: int, pp: int, batch: int, context: int
) -> None:
    times = times_of(model, device, "bf16", tp, pp, engine="vllm")
    now = times.seconds(decode_counts(batch, context))
    assert now > 0
    assert times.seconds(decode_counts(batch + 1, context)) >= now
    assert times.seconds(decode_counts(batch, context + 1)) >= now
    read = times.seconds(prefill_counts(1, context))
    assert times.seconds(prefill_counts(1, context + 1)) >= read
    assert times.seconds(prefill_counts(2, context)) >= read


def test_a_slice_reads_by_its_memory_and_computes_by_its_cores() -> None:
    """3g has 3 of 7 cores but 4 of 8 memories: decoding is half, reading prompts 43 %."""
    whole, part = (times_of("llama-3.1-8b", d, "bf16") for d in ("h100-sxm", "h100-sxm/3g.40gb"))
    decode, prefill = decode_counts(1, 500), prefill_counts(1, 4096)
    for name in ("weights", "cache"):
        assert part.parts(decode)[name] == pytest.approx(2 * whole.parts(decode)[name])
    assert part.parts(prefill)["compute"] == pytest.approx(7 / 3 * whole.parts(prefill)["compute"])


def test_traps_of_sheets_are_not_stepped_into() -> None:
    shape = shape_of_config(CONFIGS["llama-3.1-8b"])
    bf16, fp8, int8, int4 = (
        storage_of_dtype(name, shape) for name in ("bf16", "fp8", "int8", "int4")
    )
    h100, l4, b300, mi300x, a100 = (
        devices()[name] for name in ("h100-sxm", "l4", "b300-sxm", "mi300x", "a100-80-sxm")
    )
    assert ops_per_s(l4, fp8)[0] < 242e12  # dense, and what is reached of it; 485 is sparse
    assert ops_per_s(mi300x, bf16)[0] == pytest.approx(668.4e12)  # 51 % of its peak
    assert reached_ops_per_s(mi300x, "fp8") == pytest.approx(2615e12 * 668.4 / 1307)
    # Int8 units that are slower than bf16's are left alone; an A100 has none for fp8.
    assert ops_per_s(b300, int8)[0] == ops_per_s(b300, bf16)[0]
    assert ops_per_s(a100, fp8)[0] == ops_per_s(a100, bf16)[0]
    assert ops_per_s(h100, int4)[0] == ops_per_s(h100, bf16)[0]  # weights are widened


def test_experts_are_read_by_those_who_meet_them() -> None:
    """One token of Mixtral meets 2 of 8 experts; a hundred meet all."""
    times = times_of("mixtral-8x7b", "h100-sxm", "bf16")
    one, many = (times.parts(decode_counts(n, 1))["weights"] for n in (1, 100))
    assert 2.5 < many / one < 4


def test_what_was_not_measured_is_less_sure() -> None:
    rows = efficiencies()
    h100, own = devices()["h100-sxm"], efficiency_of(devices()["h100-sxm"], "vllm", rows)
    assert (own.engine, own.generation) == ("vllm", "hopper")
    for elsewhere in (
        efficiency_of(devices()["mi300x"], "vllm", rows), efficiency_of(h100, "ridgeline", rows),
    ):  # fmt: skip
        assert own.factor_90 <= elsewhere.factor_90
        assert own.first_factor_90 <= elsewhere.first_factor_90
        assert elsewhere.request_s > 0


def test_an_engine_has_its_constants_on_any_device_and_others_those_of_all() -> None:
    rows = efficiencies()
    l40s, t4 = devices()["l40s"], devices()["t4"]
    by_row = {(row.engine, row.generation): row.layer_s for row in rows}
    assert efficiency_of(l40s, "vllm", rows).layer_s == by_row["vllm", "all"]
    assert efficiency_of(l40s, "ridgeline", rows).layer_s == by_row["other", "all"]
    assert efficiency_of(t4, "llamacpp", rows).layer_s == by_row["llamacpp", "all"]
    # A layer costs engines of today less than half of what it cost in 2023.
    today = [row.layer_s for row in rows if row.engine in ("vllm", "sglang", "trtllm")]
    assert len(today) == 9
    assert max(today) < by_row[OLDER, "hopper"] / 2


def test_stages_of_a_pipeline_work_side_by_side() -> None:
    one, two = (times_of("llama-3.1-70b", "a100-80-sxm", "bf16", pp=pp) for pp in (1, 2))
    many = decode_counts(256, 2000)
    assert two.parts(many)["compute"] == pytest.approx(one.parts(many)["compute"] / 2)
    assert two.seconds(many) < one.seconds(many)
    alone = decode_counts(1, 2000)  # a single answer passes all stages one after the other
    assert two.seconds(alone) >= 0.99 * one.seconds(decode_counts(1, 1000))


def test_a_sequence_costs_each_step_what_no_byte_of_it_explains() -> None:
    """From 1 to 128 sequences a step of 8 x MI300X grew by 14 ms, of which bytes explain 3."""
    times = times_of("llama-3.1-70b", "h100-sxm", "fp8", 8, engine="vllm")
    one, many = (times.parts(decode_counts(num, 1000)) for num in (1, 128))
    assert many["sequences"] == pytest.approx(128 * times.efficiency.seq_s)
    assert one["sequences"] == pytest.approx(times.efficiency.seq_s)
    assert 1e-5 < times.efficiency.seq_s < 1e-4
    free = replace(times, efficiency=replace(times.efficiency, seq_s=0.0))
    more_s = times.seconds(decode_counts(128, 1000)) - free.seconds(decode_counts(128, 1000))
    assert more_s == pytest.approx(many["sequences"])


def test_units_for_four_bits_count_where_factors_have_them() -> None:
    shape = shape_of_config(CONFIGS["llama-3.1-70b"])
    b200, h100 = devices()["b200-sxm"], devices()["h100-sxm"]
    nvfp4, mxfp4, fp8 = (storage_of_dtype(n, shape) for n in ("nvfp4", "mxfp4", "fp8"))
    assert ops_per_s(b200, nvfp4)[0] == reached_ops_per_s(b200, "fp4")
    assert ops_per_s(b200, nvfp4)[0] > 1.5 * ops_per_s(b200, fp8)[0]
    assert ops_per_s(b200, mxfp4)[0] == ops_per_s(b200, mxfp4)[1]  # weights alone: widened
    assert ops_per_s(h100, nvfp4)[0] == ops_per_s(h100, nvfp4)[1]


def test_attention_in_long_prompts_has_an_efficiency_of_its_own() -> None:
    """llama.cpp reads 4,096 tokens at 0.69 to 0.79 of its speed at 512: not so products alone."""
    times = times_of("llama-3.1-8b", "rtx4090", "f16", engine="llamacpp")
    speeds = [n / times.seconds(prefill_counts(1, n)) for n in (512, 4096)]
    assert speeds[1] < 0.9 * speeds[0]
    alike = replace(times, efficiency=replace(times.efficiency, attention=times.efficiency.compute))
    speeds = [n / alike.seconds(prefill_counts(1, n)) for n in (512, 4096)]
    assert speeds[1] > 0.95 * speeds[0]


def test_a_damaged_row_of_constants_names_its_line() -> None:
    head = (
        "engine,generation,o_us,e_m,e_c,e_a,seq_us,p,request_ms,queue_share,num_points,loo_error,factor_90,"
        "first_factor_90,source\n"
    )
    (row,) = parse_efficiencies(head + "trtllm,ada,5,1,1,.5,7,1,9,0,1,1,1,1,x\n")
    assert (row.request_s, row.seq_s, row.attention) == pytest.approx((0.009, 7e-6, 0.5))
    with pytest.raises(ValueError, match=r"efficiency\.csv, line 2"):
        parse_efficiencies(head + "trtllm,ada,fast,1,1,1,0,1,9,0,1,1,1,1,x\n")
