"""Plans for a load: what is chosen, what is said of it, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.calibration import roofline_calibration, save_calibration
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.simulator.fleet import serve_fleet
from ridgeline.model.cost.format_bytes import storage_of_dtype
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.planner import Plan, PlanFlags, plan
from ridgeline.planner.capacity.latency_model import knee, queue_s, steady, steady_closed
from ridgeline.planner.capacity.load import LoadFlags, OfferedLoad, Slo, load_of, parse_slo
from ridgeline.planner.capacity.option import (
    MOST_BUSY,
    Candidate,
    CapacityOption,
    SeenLatencies,
)
from ridgeline.planner.capacity.report import pareto_svg, per_second
from ridgeline.planner.documents import as_csv, as_markdown
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.plan import plan_for
from tests.foresight.simulator.test_run import SETTINGS
from tests.model.cost.published_configs import PUBLISHED
from tests.planner.capacity.test_latency_model import times_of
from tests.tiny import ARCHS, checkpoint

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]
TODAY = date(2026, 11, 20)
REPLICA = replace(
    SETTINGS, block_size=16, num_blocks=4000, max_num_batched_tokens=2048, max_num_seqs=256
)
HEADER = "device,provider,region,kind,usd_per_hour,date,source,confidence\n"


def planned(**wishes: Any) -> Plan:
    given = {"prompt_tokens": "400", "new_tokens": "60", "request_rate": 4.0, "on": "l4"}
    asked = {name: value for name, value in (given | wishes).items() if value is not None}
    return plan(LLAMA, today=TODAY, **asked)


def load(rate: float | None = 2.0, **changes: Any) -> OfferedLoad:
    wishes = {"prompt_tokens": "400", "new_tokens": "60", "request_rate": rate} | changes
    return load_of(LoadFlags(**wishes))


# --- what a load is ----------------------------------------------------------------------------


def test_a_rate_is_said_as_people_say_it() -> None:
    said = [per_second(rate) for rate in (1.0, 0.5, 2.0, 33.33, 999.4, 1000.0, 123456.0)]
    numbers = [text.removesuffix("s/s").removesuffix("/s").split()[0] for text in said]
    assert numbers == ["1", "0.5", "2", "33.3", "999", "1,000", "123,456"]
    assert said[0] == "1 request/s"
    assert all(text.endswith(" requests/s") for text in said[1:])


def test_a_bound_is_read_and_damage_is_named() -> None:
    assert parse_slo("ttft:p95:500") == Slo("ttft", "p95", 500.0)
    for text, part in {
        "ttft:500": "METRIC:PERCENTILE:MILLISECONDS", "itl:p95:1": "'itl' is not one of",
        "ttft:p96:1": "'p96' is not one of", "ttft:p95:soon": "'soon' is not a number",
        "ttft:p95:0": "'0' is not a number", "ttft:p95:nan": "'nan' is not a number",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=part) as caught:
            parse_slo(text)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wishes", "part"),
    [
        ({"request_rate": 0.0}, "--request-rate is 0.0"),
        ({"request_rate": 1.0, "max_concurrency": 2}, "not by both"),
        ({"prompt_tokens": "0"}, "--prompt-tokens is 0"),
        ({"new_tokens": "60:x"}, "--new-tokens is 60:x"),
        ({"replicas": "some"}, "--replicas is 'some'"),
        ({"notice": -1.0}, "--notice is -1.0"),
        ({"evictions_per_hour": 0.0}, "--evictions-per-hour is 0.0"),
        ({"new_tokens": None}, "needs lengths"),
        ({"slo": ["ttft:p95"]}, "METRIC:PERCENTILE:MILLISECONDS"),
        ({"on": "l40x"}, "did you mean l40 or l40s"),
        ({"on": "h100-sxm/9g.1gb"}, "its slices are"),
    ],
)
def test_bad_wishes_are_refused_in_one_line(wishes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part) as caught:
        planned(**wishes)
    assert "\n" not in str(caught.value)


def test_a_trace_says_when_and_how_long(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:15:{i:02d}.0,{100 + i},{10 + i}" for i in range(11)]
    trace = tmp_path / "azure.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    found = load_of(LoadFlags(trace_file=str(trace), request_rate=2.0))
    assert found.arrivals_s == pytest.approx([i / 2 for i in range(11)])
    assert found.lengths[3] == (103, 13)
    half = found.share(2, 100)
    assert [len(request.prompt) for request in half] == [100, 102, 104, 106, 108, 110]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00,,3\n")
    with pytest.raises(ValueError, match=r"azure\.csv, line 2: ContextTokens is missing"):
        load_of(LoadFlags(trace_file=str(trace)))


# --- the formula -------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.floats(0.05, 0.8), st.sampled_from(["400", "1500:0.5", "50"]))
def test_the_formula_is_near_the_simulation_it_stands_for(share: float, prompt: str) -> None:
    times = times_of("llama-3.1-8b", "l4", "fp8", engine="vllm")
    most = knee(times, load(prompt_tokens=prompt), REPLICA)
    some = load(share * most, prompt_tokens=prompt)
    found = steady(times, some, REPLICA, share * most)
    assert found is not None
    engine = replace(REPLICA, max_model_len=1 << 30, enable_prefix_caching=False)
    ended = serve_fleet(some.share(1, 240, is_read=False), engine, times, 1)[60:]
    tpot_s = [(e.finish_s - (e.first_token_s or 0)) / (e.num_new - 1) for e in ended]
    assert found.tpot_s == pytest.approx(sum(tpot_s) / len(tpot_s), rel=0.3)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 0.9), st.floats(0.1, 0.9))
def test_a_replica_is_slower_under_more_load(one: float, other: float) -> None:
    times = times_of("llama-3.1-8b", "l4", "bf16", engine="vllm")
    most = knee(times, load(), REPLICA)
    few, many = (steady(times, load(), REPLICA, most * share) for share in sorted((one, other)))
    assert few is not None
    assert many is not None
    assert few.tpot_s <= many.tpot_s
    assert few.ttft_s <= many.ttft_s * 1.0001
    assert steady(times, load(), REPLICA, 1.05 * most) is None


def test_a_replica_of_a_model_with_windows_bears_more_long_prompts() -> None:
    times = times_of("gpt-oss-20b", "h100-sxm", "bf16", engine="vllm")
    assert times.windows == ((128, 0.5),)
    whole = replace(times, work=replace(times.work, windows=()))
    room, long = replace(REPLICA, num_blocks=20_000), load(prompt_tokens="30000")
    assert knee(times, long, room) > 1.2 * knee(whole, long, room)
    short = load(prompt_tokens="64")
    assert knee(times, short, room) < 1.1 * knee(whole, short, room)


def test_clients_of_a_closed_loop_share_a_replica() -> None:
    times = times_of("llama-3.1-8b", "l4", "bf16", engine="vllm")
    one, ten = (steady_closed(times, load(None, max_concurrency=n), REPLICA, n) for n in (1, 10))
    assert one is not None
    assert ten is not None
    assert one.rate_per_s < ten.rate_per_s < 10 * one.rate_per_s


# --- choices -----------------------------------------------------------------------------------


def test_more_replicas_never_lower_goodput() -> None:
    goods = []
    for replicas in (1, 2, 3, 5):
        found = planned(replicas=str(replicas), slo=["ttft:p95:700"], tensor_parallel_size="1")
        (choice,) = found.choices
        assert choice.replicas == replicas
        goods.append(choice.goodput_per_s)
    assert goods == sorted(goods)
    assert goods[-1] == pytest.approx(4.0)


def test_the_fewest_replicas_that_do_are_chosen() -> None:
    bounds = ["ttft:p95:700", "tpot:mean:70"]
    best = planned(slo=bounds, tensor_parallel_size="1").choices[0]
    assert best.meets_slo
    assert best.replicas > 1
    fewer = planned(slo=bounds, tensor_parallel_size="1", replicas=str(best.replicas - 1))
    assert not fewer.choices[0].meets_slo


def test_no_division_is_the_identity() -> None:
    plain = planned(on="h100-sxm", replicas="1").choices[0]
    spelt = planned(
        on="h100-sxm", replicas="1", tensor_parallel_size="1", pipeline_parallel_size="1"
    ).choices[0]
    assert plain.as_dict() | {"on_frontier": 0} == spelt.as_dict() | {"on_frontier": 0}


def test_every_time_is_an_interval_and_the_document_is_as_designed() -> None:
    found = planned(on="h100-sxm,l4", slo=["ttft:p95:2000"]).as_dict()
    assert list(found["time"]) == [
        "ttft_ms", "ttft_ms_low", "ttft_ms_high", "tpot_ms", "tpot_ms_low", "tpot_ms_high",
        "output_tokens_per_s", "output_tokens_per_s_low", "output_tokens_per_s_high",
        "ttft_parts_ms", "source", "utilisation",
    ]  # fmt: skip
    assert found["time"]["source"] == "published"
    json.dumps(found, allow_nan=False)
    for choice in found["choices"]:
        for metric in ("ttft_ms", "tpot_ms", "e2el_ms"):
            for name in ("mean", "p50", "p90", "p95", "p99"):
                low, middle, high = (choice[metric][name + end] for end in ("_low", "", "_high"))
                assert low < middle
                assert high is None or middle < high
    known = {"device", "replicas", "tp", "pp", "dtype", "meets_slo", "goodput_per_s", "ttft_ms",
             "tpot_ms", "usd_per_hour", "usd_per_million_output_tokens", "spot", "on_frontier",
             "limited_by"}  # fmt: skip
    assert known <= set(found["choices"][0])
    alone = plan(LLAMA, on="l4").as_dict()
    assert [alone[name] for name in ("time", "choices", "published")] == [None] * 3


def test_above_the_knee_there_is_no_time_to_the_first_token() -> None:
    found = planned(request_rate=40.0, replicas="1", tensor_parallel_size="1")
    (choice,) = found.choices
    assert choice.latencies is None
    assert choice.utilisation is not None
    assert choice.utilisation > MOST_BUSY
    assert found.as_dict()["time"]["ttft_ms"] is None
    assert choice.as_dict()["ttft_ms"] is None
    most = choice.as_dict()["holds_up_to_per_s"]
    assert found.answer == f"1 x l4 holds up to {most:.3g} requests/s; you ask for 40"
    four = planned(request_rate=400.0, replicas="4", tensor_parallel_size="1")
    assert four.answer.startswith("4 x l4 hold up to ")
    held = planned(request_rate=0.99 * most, replicas="1", tensor_parallel_size="1")
    assert held.choices[0].meets_slo
    above = planned(request_rate=1.05 * most, replicas="1", tensor_parallel_size="1")
    assert above.choices[0].latencies is None
    assert not above.choices[0].meets_slo


def test_a_bound_that_nothing_meets_names_the_nearest() -> None:
    found = planned(on="l4,h100-sxm", slo=["ttft:p95:1", "tpot:p95:1000"])
    assert not any(choice.meets_slo for choice in found.choices)
    assert found.answer.startswith("nothing here meets it: the nearest are ")
    assert "h100-sxm (tp" in found.answer
    assert "ttft:p95" in found.answer
    assert "tpot" not in found.answer  # that one holds
    assert found.choices[0].limited_by == "ttft:p95"


def test_cost_is_of_whole_devices_and_the_cheapest_is_first() -> None:
    found = planned(on="a100-80-sxm,h100-sxm,rtxa6000", slo=["ttft:p95:1000"])
    best = found.choices[0]
    assert best.placement.device.id == "a100-80-sxm"
    assert best.usd_per_hour == 1.29  # Verda, 2026-10-29
    assert best.usd_per_million_tokens == pytest.approx(
        1.29 / (best.goodput_per_s * 60 * 3600) * 1e6
    )
    assert "for 1.29 USD an hour" in found.answer
    for choice in found.choices:
        if choice.placement.device.id == "a100-80-sxm":
            devices = choice.replicas * choice.placement.memory.tp
            assert choice.usd_per_hour == pytest.approx(1.29 * devices)
    meeting = [c.usd_per_hour for c in found.choices if c.meets_slo and c.usd_per_hour is not None]
    assert meeting == sorted(meeting)
    # The catalogue has no price of an RTX A6000: it costs no 0.
    costs = {c.usd_per_hour for c in found.choices if c.placement.device.id == "rtxa6000"}
    assert costs == {None}
    assert {c.as_dict()["usd_per_million_output_tokens"] for c in found.choices} >= {None}


def test_what_costs_more_than_is_allowed_is_said_with_the_least(tmp_path: Path) -> None:
    own = tmp_path / "mine.csv"
    own.write_text(f"{HEADER}l4,me,,on_demand,0.5,,a quote,high\n")
    least = planned(prices=str(own)).choices[0]
    none = planned(prices=str(own), max_usd_per_hour=0.001)
    assert none.choices == ()
    assert none.answer == (
        "--max-usd-per-hour 0.001 leaves nothing: the cheapest that holds the load is "
        f"{least.num_devices} x l4 for {least.usd_per_hour:.3g} USD per hour"
    )
    allowed = planned(prices=str(own), max_usd_per_hour=least.usd_per_hour)
    assert allowed.choices[0].usd_per_hour == least.usd_per_hour
    assert "--max-usd-per-hour" not in allowed.answer
    assert "| choice |" not in "\n".join(as_markdown(none))  # no heads above nothing
    own.write_text(f"{HEADER}h100-sxm,me,,on_demand,0.5,,a quote,high\n")
    unpriced = planned(prices=str(own), on="l4", max_usd_per_hour=1.0)
    assert "no dated price is known of what holds the load" in unpriced.answer


def test_own_prices_are_used_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    own = tmp_path / "mine.csv"
    own.write_text(f"{HEADER}l4,me,,on_demand,0.5,,a quote,high\n")
    best = planned(prices=str(own), tensor_parallel_size="1").choices[0]
    assert best.usd_per_hour == 0.5 * best.num_devices
    assert planned(prices=str(own), max_usd_per_hour=0.4).choices == ()
    own.write_text(f"{HEADER}l4,me,,on_demand,cheap,,a quote,high\n")
    with pytest.raises(ValueError, match=r"mine\.csv, line 2: usd_per_hour is 'cheap'"):
        planned(prices=str(own))
    own.write_text("device,provider\nl4,me\n")
    with pytest.raises(ValueError, match=r"mine\.csv, line 2: region is missing"):
        planned(prices=str(own))
    with pytest.raises(FileNotFoundError):
        planned(prices=str(tmp_path / "none.csv"))


def test_an_old_price_warns() -> None:
    found = planned(on="mi300x")
    assert "the price of mi300x at TensorWave is 186 days old" in found.warnings


def test_slices_are_devices_that_reach_no_other() -> None:
    found = planned(on="h100-sxm/3g.40gb,h100-sxm", request_rate=None, max_concurrency=1)
    by_device = {c.placement.device.id: c for c in found.choices if c.placement.num_devices == 1}
    part, whole = by_device["h100-sxm/3g.40gb"], by_device["h100-sxm"]
    assert all(c.placement.memory.tp == 1 for c in found.choices if "/" in c.placement.device.id)
    assert part.latencies is not None
    assert whole.latencies is not None
    # Half of the bandwidth, but the same overhead.
    assert 1.3 < part.latencies.ms["tpot"]["mean"] / whole.latencies.ms["tpot"]["mean"] < 2
    assert part.usd_per_hour == whole.usd_per_hour == 2.29  # one slice or two: one card is paid


@pytest.mark.parametrize(
    ("slice_id", "replicas", "cards"), [("3g.40gb", 2, 1), ("3g.40gb", 3, 2), ("7g.80gb", 3, 3)]
)
def test_slices_are_paid_as_the_cards_that_they_share(
    slice_id: str, replicas: int, cards: int, tmp_path: Path
) -> None:
    wishes: dict[str, Any] = {"on": f"h100-sxm/{slice_id}", "replicas": str(replicas)}
    found = planned(**wishes, request_rate=0.1)
    assert found.choices[0].usd_per_hour == pytest.approx(2.29 * cards)
    assert any("paid as the whole cards" in note for note in found.assumptions)
    own = tmp_path / "mine.csv"
    own.write_text(f"{HEADER}h100-sxm/{slice_id},me,,on_demand,0.5,,a quote,high\n")
    of_slices = planned(**wishes, request_rate=0.1, prices=str(own)).choices[0]
    assert of_slices.usd_per_hour == 0.5 * replicas


def test_the_frontier_is_what_nobody_beats() -> None:
    choices = planned(on="l4", request_rate=2.0).choices
    front = [c for c in choices if c.on_frontier]
    assert len(front) > 1  # more ranks answer sooner, and bear less for each
    for other in choices:
        if other.per_user is not None and not other.on_frontier:
            assert any(
                c.per_device >= other.per_device and (c.per_user or 0) >= other.per_user
                for c in front
            )
    for choice in front:
        assert choice.per_user is not None
        for other in choices:
            if other.per_user is not None:
                assert not (
                    other.per_device > choice.per_device and other.per_user > choice.per_user
                )


def test_pictures_and_tables() -> None:
    found = planned(on="l4,h100-sxm", slo=["ttft:p95:1000"])
    tree = ElementTree.fromstring(pareto_svg("Choices", found.answer, found.choices))
    titles = [e.text or "" for e in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len([c for c in found.choices if c.per_user])
    assert any("h100-sxm" in title and "USD/h" in title for title in titles)
    _check_dots(tree, found.choices)
    header, *rows = as_csv(found).splitlines()
    assert header.startswith("device,replicas,tp,pp,num_devices,dtype,engine,meets_slo")
    assert len(rows) == len(found.choices)
    text = "\n".join(as_markdown(found))
    assert found.answer in text
    with pytest.raises(ValueError, match="nothing to draw"):
        pareto_svg("Choices", "", ())


def _check_dots(tree: ElementTree.Element, choices: Sequence[CapacityOption]) -> None:
    """Each dot lies where its choice says: faster to the right, more above; green if it is good."""
    svg = "{http://www.w3.org/2000/svg}"
    drawn = sorted(
        (float(dot.get("cx", "")), -float(dot.get("cy", "")), dot.get("fill"))
        for dot in tree.iter(f"{svg}circle")
        if float(dot.get("cy", "")) > 96  # below the legend
    )
    known = [choice for choice in choices if choice.per_user]
    known.sort(key=lambda choice: (choice.per_user or 0, choice.per_device))
    assert len(drawn) == len(known) > 3
    assert [dot[2] for dot in drawn] == [
        "#2da44e" if choice.meets_slo else "#c9ced6" for choice in known
    ]
    above = sorted(range(len(known)), key=lambda i: known[i].per_device)
    heights = [drawn[i][1] for i in above]
    assert heights == sorted(heights)
    num_front = sum(choice.on_frontier for choice in known)
    (front,) = tree.iter(f"{svg}polyline")
    assert len(front.get("points", "").split()) == num_front


def test_what_was_seen_meets_bounds_by_percentile() -> None:
    ms = {"ttft": {"p95": 400.0, "mean": 100.0}, "tpot": {"p95": 20.0, "mean": 10.0}}
    seen = SeenLatencies(ms, 1.0, is_simulated=True)
    assert seen.meets([Slo("ttft", "mean", 100), Slo("tpot", "p95", 20)])
    assert not seen.meets([Slo("ttft", "p95", 399)])
    assert not seen.meets([Slo("tpot", "p95", 30)], {"tpot": 1.6})
    assert seen.excess([Slo("ttft", "p95", 200), Slo("tpot", "p95", 40)]) == 2.0


def test_this_machine_is_assumed_until_it_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    given = checkpoint(ARCHS["plain"])
    shape = shape_of_arch(given.arch, "llama")
    spec = ModelSpec("tiny", shape, storage_of_dtype("bf16", shape), checkpoint=given)
    wishes = PlanFlags(on="here", context=64)
    load_flags = LoadFlags(prompt_tokens="20", new_tokens="10", request_rate=1.0)
    found = plan_for(spec, wishes, load_flags=load_flags, today=TODAY)
    assert found.as_dict()["time"]["source"] == "assumed"
    assert any("ridgeline calibrate" in note for note in found.assumptions)
    config = resolve(Options(), spec.checkpoint)  # type: ignore[arg-type]
    path = spec.checkpoint.path  # type: ignore[union-attr]
    own = roofline_calibration(path, spec.checkpoint.arch, config)  # type: ignore[union-attr]
    save_calibration(tmp_path, replace(own, source="measured", factors=(0.9, 1.0, 1.1)))
    found = plan_for(spec, wishes, load_flags=load_flags, today=TODAY)
    assert found.as_dict()["time"]["source"] == "calibrated"
    interval = found.choices[0].interval_ms("tpot", "mean")
    assert interval is not None
    assert interval[2] is not None
    assert interval[2] / interval[0] == pytest.approx(1.1 / 0.9, rel=0.05)


# --- first tokens ------------------------------------------------------------------------------


def test_prompts_of_clients_that_begin_at_once_wait_for_each_other() -> None:
    times = times_of("llama-3.1-8b", "l4", "bf16", engine="vllm")
    one, ten, twenty = (queue_s(times, load(), REPLICA, n) for n in (1, 10, 20))
    assert one == 0
    assert ten > 0
    assert 1.8 < twenty / ten < 2.2


def test_a_first_token_takes_a_server_more_than_its_steps() -> None:
    """Its interval is its own, and an answer's end is as unsure as what it is made of."""
    closed = {"request_rate": None, "on": "h100-sxm", "replicas": "1", "tensor_parallel_size": "1"}
    (few,), (many,) = (planned(**closed, max_concurrency=n).choices for n in (1, 16))
    assert few.latencies is not None
    assert many.latencies is not None
    assert few.latencies.ms["ttft"]["mean"] > 1e3 * few.latency_model.request_s > 0
    assert many.latencies.ms["ttft"]["mean"] > few.latencies.ms["ttft"]["mean"]
    low, high = few.factors["ttft"]
    assert high is not None
    assert low <= few.latency_model.first_low
    assert high >= few.latency_model.first_high > few.latency_model.high
    (_, tpot), (_, e2el) = few.factors["tpot"], few.factors["e2el"]
    assert tpot is not None
    assert e2el is not None
    assert tpot < e2el < high


def test_a_small_model_is_simulated_with_no_more_blocks_than_a_load_can_hold() -> None:
    """A device holds tens of millions of blocks of it, and lists of all took gigabytes."""
    given = checkpoint(ARCHS["plain"])
    shape = shape_of_arch(given.arch, "llama")
    spec = ModelSpec("tiny", shape, storage_of_dtype("bf16", shape), checkpoint=given)
    load_flags = LoadFlags(prompt_tokens="40:1", new_tokens="30:1", max_concurrency=300)
    found = plan_for(spec, PlanFlags(on="l4"), load_flags=load_flags, today=TODAY).choices[0]
    offered = load_of(load_flags)
    one = Candidate(found.placement, found.latency_model, None, offered, lambda: None)
    held = one.simulated_settings()
    assert held.num_blocks < 100_000 < one.settings.num_blocks
    more = replace(held, num_blocks=3 * held.num_blocks)
    requests = offered.share(1, 600)
    assert serve_fleet(requests, held, one.times, 1, concurrency=300) == (
        serve_fleet(requests, more, one.times, 1, concurrency=300)
    )


def test_concurrency_beside_lengths_is_the_load() -> None:
    load: dict[str, Any] = {"on": "h100-sxm", "prompt_tokens": "128", "new_tokens": "128"}
    asked = plan(LLAMA, **load, concurrency=24)
    assert asked.load is not None
    assert asked.load.concurrency == 24
    assert any("--concurrency 24: clients" in line for line in asked.assumptions)
    by_its_flag = plan(LLAMA, **load, max_concurrency=24)
    assert asked.as_dict()["choices"] == by_its_flag.as_dict()["choices"]
    speed = asked.choices[0].tokens_per_s[1]
    assert f" ({speed:,.0f} (" in asked.answer  # what such clients get together
    assert "tokens/s" in asked.answer
    both = plan(LLAMA, **load, max_concurrency=24, concurrency=24)  # and room for all of them
    assert both.load is not None
    assert (both.load.concurrency, both.best.memory.concurrency) == (24, 24)
