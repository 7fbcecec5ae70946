"""Metrics agree with what clients were told and with the trace, exactly, and rest at zero."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ridgeline import __version__
from ridgeline.core.records import Record
from ridgeline.core.step import Step
from tests.engine.test_llm import POISON
from tests.serve.engine.test_async_engine import post
from tests.serve.serving import Served, serving
from tests.waiting import eventually

COMPLETE = "/v1/completions"


def ledger(served: Served) -> Counter[str]:
    """Send requests of all kinds at once; return what their clients saw."""
    found: Counter[str] = Counter()
    lock = threading.Lock()

    def ask(i: int) -> None:
        body: dict[str, Any] = {"prompt": [40 + i % 5] * (3 + i % 30), "max_tokens": 1 + i % 17}
        body |= {"n": 1 + i % 3, "ignore_eos": i % 2 == 0, "seed": i}
        if i % 10 == 3:
            body["prompt"] = [41, POISON]
        status, answer, _ = served.call(COMPLETE, body)
        with lock:
            found[f"status {status}"] += 1
            if status == 200:
                found["prompt"] += answer["usage"]["prompt_tokens"]
                found["generated"] += answer["usage"]["completion_tokens"]
                found["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                found["requests"] += 1
                found.update(choice["finish_reason"] for choice in answer["choices"])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(80)))
    return found


def test_metrics_are_what_clients_saw(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with serving(model, {"trace": trace}) as served:
        seen = ledger(served)
        served.call(COMPLETE, {"prompt": "x", "n": 0})
        served.assert_idle()
        now = served.metrics()

        def value(name: str, labels: str = "") -> float:
            return now[f"ridgeline:{name}{labels}"]

        assert seen["status 500"] == 8
        assert value("prompt_tokens_total") == seen["prompt"]
        assert value("generation_tokens_total") == seen["generated"]
        assert value("prefix_cache_hits_total") == seen["cached"]
        for reason in ("stop", "length"):
            ends = value("request_success_total", f'{{finished_reason="{reason}"}}')
            assert ends == seen[reason]
        assert value("request_success_total", '{finished_reason="error"}') == 8
        assert value("time_to_first_token_seconds_count") == seen["requests"]
        assert value("request_prompt_tokens_sum") == seen["prompt"]
        assert value("request_generation_tokens_sum") == seen["generated"]
        assert value("request_generation_tokens_count") == seen["stop"] + seen["length"]
        assert value("build_info", f'{{version="{__version__}"}}') == 1
        assert now["process_resident_memory_bytes"] > 1 << 20
        assert value("e2e_request_latency_seconds_count") == seen["requests"] + 8
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert value(gauge) == 0
        for status, count in ((200, seen["status 200"]), (500, 8), (400, 1)):
            labels = f'{{handler="{COMPLETE}",method="POST",status="{status}"}}'
            assert now[f"http_requests_total{labels}"] == count
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        steps = [record for record in records if record["type"] == "step"]
        assert value("iteration_tokens_total_count") == len(steps)
        assert value("iteration_tokens_total_sum") == sum(n for s in steps for _, _, n in s["work"])
        assert value("num_preemptions_total") == sum(len(step["preempted"]) for step in steps)
        requests = [record for record in records if record["type"] == "request"]
        latency_s = sum(r["finish_s"] - r["arrival_s"] for r in requests)
        assert abs(value("e2e_request_latency_seconds_sum") - latency_s) < 1e-9
        answered = [r for r in requests if r["first_token_s"] is not None]
        wanted = [r["params"].get("max_tokens", 16) for r in answered]
        longest = [max(r["num_generated"]) for r in answered]
        means_s = [
            (r["finish_s"] - r["first_token_s"]) / (most - 1)
            for r, most in zip(answered, longest, strict=True)
            if most > 1
        ]
        assert value("request_params_n_sum") == sum(r["params"].get("n", 1) for r in answered)
        assert value("request_params_n_count") == seen["requests"]
        assert value("request_params_max_tokens_sum") == sum(wanted)
        assert value("request_max_num_generation_tokens_sum") == sum(longest)
        inference_s = sum(r["finish_s"] - r["scheduled_s"] for r in answered)
        assert abs(value("request_inference_time_seconds_sum") - inference_s) < 1e-9
        assert value("request_time_per_output_token_seconds_count") == len(means_s)
        assert abs(value("request_time_per_output_token_seconds_sum") - sum(means_s)) < 1e-9
        gaps = sum(n - 1 for r in requests for n in r["num_generated"] if n)
        assert value("inter_token_latency_seconds_count") == gaps


def test_no_counter_goes_down_when_a_request_fails(model: Path, tmp_path: Path) -> None:
    """A request that fails at its first token has generated none, at no moment."""
    trace, totals = tmp_path / "trace.jsonl", list[float]()

    def note(record: Record) -> None:  # in the engine's thread
        nonlocal totals
        lines = served.running.model_server.metrics.text().decode().splitlines()
        name = "ridgeline:generation_tokens_total{"
        totals += [float(line.split()[-1]) for line in lines if line.startswith(name)]

    def before(step: Step) -> None:
        if any(work.tokens == (99, 98, 97) for work in step.work):
            raise RuntimeError("kernel exploded")

    with serving(model, {"trace": trace}) as served:
        served.running.async_engine.listeners.append(note)
        served.valve.before = before
        body = {"max_tokens": 4, "ignore_eos": True}
        for prompt, status in (([40], 200), ([99, 98, 97], 500), ([41, POISON], 500), ([42], 200)):
            assert served.call(COMPLETE, body | {"prompt": prompt})[0] == status
        served.assert_idle()
    assert totals == sorted(totals)
    assert totals[-1] == 8
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    steps = [record for record in records if record["type"] == "step"]
    assert [step["sampled"] for step in steps if step["errors"]] == [[[]], [[]]]
    (_, first), (_, second) = (step["errors"][0] for step in steps if step["errors"])
    assert "failed on this request" in first
    assert "not finite" in second


def test_gauges_show_what_runs_and_waits(model: Path) -> None:
    with serving(model, {"max_num_seqs": 2}) as served:
        held = served.valve.hold()
        body = {"prompt": [40] * 20, "max_tokens": 9, "ignore_eos": True}
        connections = [post(served.port, body) for _ in range(5)]
        eventually(lambda: served.running.async_engine.num_streams == 5)
        eventually(lambda: served.metrics()["ridgeline:num_requests_running"] >= 1)
        now = served.metrics()
        running, waiting = (now[f"ridgeline:num_requests_{s}"] for s in ("running", "waiting"))
        assert running + waiting == 5
        assert waiting >= 3
        assert now["ridgeline:kv_cache_usage_perc"] > 0
        held.set()
        served.assert_idle()
        assert served.metrics()["ridgeline:kv_cache_usage_perc"] == 0
        for connection in connections:
            connection.close()


def test_the_text_is_prometheus_and_nothing_of_clients_becomes_a_label(served: Served) -> None:
    before = len(served.metrics())
    for i in range(20):
        served.call(f"/no/such/{i}")
        served.call(COMPLETE, {"prompt": "x", "model": f"model-{i}", "user": f"user-{i}"})
        served.call("/health", None, f"METHOD{i}"[:6])
    assert len(served.metrics()) <= before + 4
    _, text, headers = served.call("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"ridgeline:prompt_tokens", "ridgeline:time_to_first_token_seconds"} <= families
    assert {"ridgeline:num_requests_running", "http_requests"} <= families


def test_the_dashboard_asks_for_metrics_that_exist(served: Served) -> None:
    dashboard = Path(__file__).parents[3] / "contrib" / "grafana" / "ridgeline.json"
    panels = json.loads(dashboard.read_text())["panels"]
    assert all(panel["description"] for panel in panels)
    asked = set(re.findall(r"(?:ridgeline:|http_)\w+", dashboard.read_text()))
    served.call("/health")
    there = {name.partition("{")[0] for name in served.metrics()}
    assert len(asked) > 10
    assert asked <= there


def test_what_was_foreseen_is_beside_what_happened(model: Path) -> None:
    with serving(model) as served:
        body = {"prompt": "what will be", "max_tokens": 30, "ignore_eos": True}
        assert served.call("/v1/completions", body)[0] == 200
        served.assert_idle()
        found = served.metrics()
        steps = found['ridgeline:step_prediction_error_ratio_bucket{le="+Inf"}']
        monitor = served.running.model_server.metrics.monitor
        assert steps == monitor.num_steps == served.valve.num_steps
        assert found["ridgeline:predicted_step_seconds_total"] > 0
        took_s = found["ridgeline:compared_step_seconds_total"]
        assert 0 < took_s <= found["ridgeline:step_duration_seconds_sum"]
        assert found["ridgeline:time_model_calibrated"] == 0
        assert found["ridgeline:speed_ratio"] > 0
        names = {
            f'ridgeline:prediction_mean_abs_error_ratio{{of="{of}"}}' for of in ("step", "tpot")
        }
        assert names <= found.keys()


def test_what_each_key_used_is_counted_under_its_label(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sesame-one admin\nbob sesame-two\n")
    with serving(model, api_key_file=file, api_key=["sesame-three"]) as served:
        used: dict[str, Counter[str]] = {"alice": Counter(), "bob": Counter(), "key1": Counter()}
        for i, label in enumerate(["alice", "bob", "alice", "alice"]):
            key = {"alice": "sesame-one", "bob": "sesame-two"}[label]
            body = {"prompt": [40] * (20 + i), "max_tokens": 3 + i, "n": 2, "ignore_eos": True}
            _, answer, _ = served.call(COMPLETE, body, authorization=f"Bearer {key}")
            usage = answer["usage"]
            used[label].update(
                key_requests=1,
                key_prompt_tokens=usage["prompt_tokens"],
                key_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                key_generation_tokens=usage["completion_tokens"],
            )
        served.call(COMPLETE, {"prompt": "x"}, authorization="Bearer wrong")
        _, text, _ = served.call("/metrics", authorization="Bearer sesame-one")
        assert b"sesame" not in text
        now = {
            (sample.name, sample.labels.get("key")): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }
        names = ("requests", "prompt_tokens", "cached_tokens", "generation_tokens")
        for label, expected in used.items():
            for name in names:
                value = now[f"ridgeline:key_{name}_total", label]
                assert value == expected[f"key_{name}"], (label, name)
        assert {label for _, label in now} == {None, *used}
        assert now["ridgeline:key_cached_tokens_total", "alice"] > 0
        for total in ("prompt_tokens", "generation_tokens"):
            of_keys = sum(now[f"ridgeline:key_{total}_total", label] for label in used)
            assert of_keys == now[f"ridgeline:{total}_total", None]


def test_a_key_pays_for_what_nobody_read(served: Served) -> None:
    before = served.metrics()['ridgeline:key_generation_tokens_total{key="-"}']
    body = {"prompt": [40] * 9, "max_tokens": 100, "ignore_eos": True, "stream": True}
    connection = post(served.port, body)
    connection.recv(1000)
    connection.close()
    served.assert_idle()

    def is_counted() -> bool:
        now = served.metrics()
        of_key = now['ridgeline:key_generation_tokens_total{key="-"}']
        return before < of_key == now["ridgeline:generation_tokens_total"]

    eventually(is_counted)
