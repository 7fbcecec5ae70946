"""The catalogue: what is easily taken wrong, one test each; prices with dates, never invented."""

from __future__ import annotations

import csv
import io
from datetime import date
from importlib.resources import files
from pathlib import Path

import pytest

from ridgeline.model.cost.hardware import parse_devices, parse_prices
from ridgeline.planner import plan
from ridgeline.planner.catalogue import devices, find_devices, prices_of
from tests.model.cost.published_configs import PUBLISHED

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
TODAY = date(2026, 11, 24)
HEADER = "device,provider,region,kind,usd_per_hour,date,source,confidence\n"


def test_weights_in_fp8_are_widened_where_there_are_no_units_for_them() -> None:
    found = plan(LLAMA, on="a100-80-sxm", dtype="fp8")
    assert "a100-80-sxm has no fp8 units: weights are widened as they are used" in found.warnings


@pytest.mark.parametrize("device", ["t4", "groq-lpu-v1", "v100-sxm2-16", "rtx2080ti", "m1-16"])
def test_a_device_without_units_for_bf16_is_not_offered_it(device: str) -> None:
    found = plan(LLAMA, on=device)  # of a model in bf16
    assert found.as_dict()["devices"][0]["dtype"] == "f16"
    assert any(f"{device} cannot compute bf16: planned in f16" in line for line in found.warnings)
    with pytest.raises(
        ValueError, match=f"--dtype bf16: {device} cannot compute bf16; --dtype f16"
    ):
        plan(LLAMA, on=device, dtype="bfloat16")
    both = plan(LLAMA, on=f"{device},l4", dtype="bf16")
    assert [placement.device.id for placement in both.placements] == ["l4"]
    assert f"left out, as they have no bf16: {device}" in both.warnings


def test_processors_compute_any_format_and_nobody_else_is_warned() -> None:
    for device in ("cpu-graviton2", "l4", "m4-max-128"):
        found = plan(LLAMA, on=device)
        assert found.as_dict()["devices"][0]["dtype"] == "bf16"
        assert not any("bf16" in line for line in found.warnings)


def test_peaks_are_dense_where_sheets_print_sparse_ones() -> None:
    assert devices()["l4"].peak_ops_per_s["bf16"] == 121e12  # the headline says 242
    assert devices()["h100-sxm"].peak_ops_per_s["bf16"] == 989e12  # 1,979
    assert devices()["rtx5090"].peak_ops_per_s["bf16"] == 209.5e12  # "3,352 AI TOPS"


def test_gb_on_labels_are_not_what_programs_have() -> None:
    assert devices()["a100-80-sxm"].usable_bytes == 81152 << 20  # 79.25 GiB
    assert devices()["l40s"].usable_bytes == 45467 << 20  # nvidia-smi: 46,068 MiB
    h200 = devices()["h200-sxm"].usable_bytes
    assert 139.5 < h200 / 2**30 < 140.4  # what nvidia-smi says
    for name, low_gib, high_gib in (
        ("rtx4090", 23.53, 23.65), ("l4", 22.04, 22.07), ("h100-sxm", 79.11, 79.33),
    ):  # fmt: skip
        assert low_gib <= devices()[name].usable_bytes / 2**30 <= high_gib  # in vLLM's logs
    assert h200 < 141 << 30  # 141 are decimal
    labelled = devices()["gaudi3"]
    assert (labelled.usable_bytes, labelled.memory_known) == (128_000_000_000, "label")


def test_what_no_log_shows_of_a_gpu_is_estimated_within_1_percent() -> None:
    text, slices = (
        (files("ridgeline.model.cost") / "data" / name).read_text(encoding="utf-8")
        for name in ("devices.csv", "mig.csv")
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    hidden = io.StringIO()
    table = csv.DictWriter(hidden, list(rows[0]))
    table.writeheader()
    table.writerows(row | {"usable_mib": ""} for row in rows)
    estimated = parse_devices(hidden.getvalue(), slices)
    checked = [
        row for row in rows
        if row["kind"] == "gpu" and row["usable_mib"]
        and (row["reported_mib"] or not row["name"].startswith("NVIDIA"))
    ]  # fmt: skip
    assert len(checked) == 36
    for row in checked:
        device = estimated[row["id"]]
        assert device.memory_known == "estimated"
        assert device.usable_bytes / 2**20 == pytest.approx(float(row["usable_mib"]), rel=0.006)
    gpus = [device for device in devices().values() if device.kind == "gpu" and not device.parent]
    assert {device.memory_known for device in gpus} == {"seen", "estimated"}


def test_an_estimate_of_memory_is_said() -> None:
    assert any("capacity is estimated" in line for line in plan(LLAMA, on="rtx4060").warnings)
    assert not any("capacity" in line for line in plan(LLAMA, on="rtx3060").warnings)


def test_there_are_three_h100() -> None:
    found = [devices()[f"h100-{form}"] for form in ("pcie", "sxm", "nvl")]
    assert [device.peak_ops_per_s["bf16"] / 1e12 for device in found] == [756.5, 989, 835]
    assert [device.read_bytes_per_s / 1e12 for device in found] == [2.0, 3.35, 3.9]


def test_figures_are_of_one_card_where_sheets_list_pairs_and_superchips() -> None:
    nvl, gb200 = devices()["h100-nvl"], devices()["gb200"]
    assert nvl.usable_bytes == 95334 << 20  # the pair has 188 GB
    assert nvl.read_bytes_per_s < 4e12
    assert gb200.peak_ops_per_s["bf16"] == 2500e12  # the superchip has 5,000
    assert gb200.usable_bytes < 200e9


def test_int8_has_almost_no_units_on_b300() -> None:
    for name in ("b300-sxm", "gb300"):
        device = devices()[name]
        assert device.ops_per_s("int8") < device.ops_per_s("bf16") / 10


def test_mi300x_is_planned_by_what_was_measured() -> None:
    device = devices()["mi300x"]
    assert device.ops_per_s("bf16") / device.peak_ops_per_s["bf16"] == pytest.approx(0.51, abs=0.01)
    assert devices()["l4"].ops_per_s("bf16") == 121e12  # nobody measured it: the dense peak
    assert devices()["a100-80-sxm"].ops_per_s("fp8") is None  # no such units


def test_an_lpu_has_sram_alone() -> None:
    device = devices()["groq-lpu-v1"]
    assert device.is_sram
    assert device.usable_bytes == 230_000_000
    assert not devices()["h100-sxm"].is_sram
    assert device not in find_devices("all").devices


def test_a_slice_has_its_share() -> None:
    whole, part = devices()["h100-sxm"], devices()["h100-sxm/3g.40gb"]
    assert part.read_bytes_per_s == whole.read_bytes_per_s / 2  # by memory slices: 4 of 8
    share = part.peak_ops_per_s["bf16"] / whole.peak_ops_per_s["bf16"]
    assert share == pytest.approx(3 / 7)  # by compute slices
    assert part.usable_bytes == 40_000_000_000
    assert part.max_ranks == 1
    assert len([d for d in devices().values() if d.parent]) == 58


def test_every_fact_has_a_source_a_date_and_a_confidence() -> None:
    whole = [device for device in devices().values() if not device.parent]
    assert len(whole) == 284
    for device in whole:
        assert device.source, device.id
        assert device.date, device.id
        assert device.confidence in ("high", "medium", "low"), device.id
        assert device.usable_bytes > 0, device.id


def test_devices_are_found_by_id_and_a_wrong_id_gets_a_hint() -> None:
    assert [d.id for d in find_devices("l4, h100-sxm/2g.20gb,l4").devices] == [
        "l4",
        "h100-sxm/2g.20gb",
    ]
    sizes = [device.usable_bytes for device in find_devices("all").devices]
    assert sizes == sorted(sizes)
    (here,) = find_devices("here").devices
    assert (here.id, here.kind) == ("here", "cpu")
    with pytest.raises(ValueError, match="did you mean h100-sxm"):
        find_devices("h100-sxn")
    with pytest.raises(ValueError, match=r"no slice 'h100-sxm/9g.90gb' of h100-sxm: .*/1g.10gb"):
        find_devices("h100-sxm/9g.90gb")
    with pytest.raises(ValueError, match="it has no slices"):
        find_devices("l4/1g.10gb")


def test_prices_come_cheapest_first_and_old_ones_warn() -> None:
    (h100,) = find_devices("h100-sxm").devices
    found, warnings = prices_of(h100, "on_demand", TODAY)
    assert found[0].usd_per_hour == 2.29
    assert [p.usd_per_hour for p in found] == sorted(p.usd_per_hour for p in found)
    assert warnings == []
    (mi300x,) = find_devices("mi300x").devices
    _, warnings = prices_of(mi300x, "on_demand", TODAY)
    assert any("190 days old" in warning for warning in warnings)


def test_a_price_without_a_date_is_used_from_the_users_own_file_alone(tmp_path: Path) -> None:
    (tpu,) = find_devices("tpu-v6e").devices
    assert prices_of(tpu, "on_demand", TODAY) == ([], [])  # the catalogue's own has no date
    own = tmp_path / "mine.csv"
    own.write_text(f"{HEADER}tpu-v6e,me,,on_demand,0.5,,a quote,high\n")
    found, _ = prices_of(tpu, "on_demand", TODAY, own)
    assert [price.usd_per_hour for price in found] == [0.5]


def test_what_can_be_rented_has_a_dated_price_but_for_these() -> None:
    """No dated price of them was found that can be looked up; none is made up."""
    rented = [device for device in devices().values() if device.is_rented and not device.parent]
    assert {one.id for one in rented if not prices_of(one, "on_demand", TODAY)[0]} == {
        "a30", "arc-b60", "gaudi2", "gaudi3", "gb300", "gh200", "mi355x", "rtxa6000",
        "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x",
    }  # fmt: skip


def test_no_price_is_none_and_never_zero() -> None:
    (gb300,) = find_devices("gb300").devices
    assert prices_of(gb300, "on_demand", TODAY) == ([], [])
    with pytest.raises(ValueError, match="line 2"):
        parse_prices(f"{HEADER}l4,me,,on_demand,0,2026-11-01,a quote,high\n")


@pytest.mark.parametrize("row", ["l4,me", "l4,me,,monthly,1,2026-01-01,x,high", "l4,,,spot,a,,x,y"])
def test_a_damaged_file_of_prices_names_its_line(row: str, tmp_path: Path) -> None:
    own = tmp_path / "mine.csv"
    own.write_text(HEADER + row + "\n")
    (l4,) = find_devices("l4").devices
    with pytest.raises(ValueError, match=r"mine.csv, line 2: (wanted|kind|usd_per_hour)"):
        prices_of(l4, "spot", TODAY, own)


def test_a_damaged_date_is_named(tmp_path: Path) -> None:
    own = tmp_path / "mine.csv"
    own.write_text(f"{HEADER}l4,me,,spot,1,last week,x,high\n")
    (l4,) = find_devices("l4").devices
    with pytest.raises(ValueError, match="YYYY-MM-DD"):
        prices_of(l4, "spot", TODAY, own)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"devices\.csv is empty"):
        parse_devices("", "")
