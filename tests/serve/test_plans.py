"""Plans over HTTP: the command's own document, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.planner import LoadFlags, PlanFlags, plan
from ridgeline.planner.catalogue import devices
from ridgeline.planner.plan import plan_for
from ridgeline.serve.routes import plans
from ridgeline.serve.routes.plans import PlanRequest
from tests.serve.serving import Served
from tests.waiting import PATIENCE_S, connected, eventually

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "configs.json").read_text())
SHORT = {"prompt_tokens": 60, "new_tokens": 6}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has the time that it takes on a busy machine."""
    monkeypatch.setattr(plans, "MOST_S", 600.0)


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = CONFIGS[name].get("config", CONFIGS[name])
    return found


def ask(served: Served, **body: Any) -> Any:
    status, answer, headers = served.call("/v1/plan", body)
    assert status == 200, answer
    assert "x-ridgeline-ignored" not in headers
    return answer


def test_fields_are_the_flags_of_the_command() -> None:
    ours = set(PlanRequest.model_fields) - {"model", "compare_published", "picture", "format"}
    files = {"trace_file", "prices", "lora", "devices"}
    assert ours == {one.name for kind in (PlanFlags, LoadFlags) for one in fields(kind)} - files


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gemma-3-1b", "mamba-2.8b"])
def test_a_config_gets_the_plan_that_the_command_makes(served: Served, name: str) -> None:
    wishes = {"on": "l4,h100-sxm", "concurrency": 3, "tensor_parallel_size": "auto"}
    found = ask(served, model=config(name), compare_published=True, **wishes)
    assert found == plan(config(name), compare_published=True, **wishes).as_dict()
    assert found["memory"]["fits"] in (True, False)
    assert found["answer"].startswith("fits on" if found["memory"]["fits"] else "does not fit on")


def test_a_model_larger_than_the_card_is_planned_beside_ram(served: Served) -> None:
    wishes = {"on": "rtx4090+rtx3090", "ram": "32GB", "dtype": "q4_k_m", "ram_bandwidth": 60.0}
    found = ask(served, model=config("llama-3.1-70b"), **wishes)
    assert found == plan(config("llama-3.1-70b"), **wishes).as_dict()
    assert found["answer"].startswith("runs on one NVIDIA GeForce RTX 4090 and one")
    devices = found["offload"]["devices"]
    assert [one["device"] for one in devices] == ["rtx4090", "rtx3090", "ram"]
    for one in devices:
        assert one["total_bytes"] == sum(line["bytes"] for line in one["lines"])
    assert ask(served, model=config("llama-3.1-8b"), on="l4")["offload"] is None


def test_sizes_and_counts_may_be_numbers_or_text(served: Served) -> None:
    def asked(**wishes: Any) -> Any:
        return ask(served, model=config("llama-3.1-8b"), on="a100-80-sxm", **wishes)

    as_text = asked(weights_memory="10GiB", tensor_parallel_size="2", context=8192)
    assert as_text == asked(weights_memory=10 << 30, tensor_parallel_size=2, context=8192)
    memory = as_text["memory"]
    assert memory["per_device"]["weights_bytes"] == 10 << 30
    assert memory["weights_bytes"] == 20 << 30  # on both
    assert as_text["memory"]["num_devices"] == 2


def test_the_model_that_is_served_is_known_from_its_file(served: Served) -> None:
    own = ask(served)
    named = ask(served, model="tiny", on="l4")
    assert named["model"] == own["model"]
    assert named["memory"]["device"] == "l4"
    assert own["model"]["name"] == "tiny"
    assert own["memory"]["device"] == "here"
    arch = served.llm.arch
    assert own["model"]["num_params"] == sum(
        size[0] * (size[1] if len(size) > 1 else 1) for size in arch.matrix_shapes().values()
    )


def test_other_forms(served: Served) -> None:
    body = {"model": config("phi-4"), "on": "l40s,h100-sxm"}
    document = ask(served, **body)
    rows = list(csv.DictReader(io.StringIO(ask(served, **body, format="csv").decode())))
    best = [row for row in rows if row["device"] == document["memory"]["device"]]
    lines = {row["line"]: int(row["bytes"]) for row in best}
    assert lines == {line["name"]: line["bytes"] for line in document["memory"]["lines"]}
    for form, media, begin in (
        ("csv", "text/csv; charset=utf-8", b"device,"),
        ("markdown", "text/markdown; charset=utf-8", b"# Memory of "),
        ("svg", "image/svg+xml", b"<svg "),
    ):
        _, text, headers = served.call("/v1/plan", body | {"format": form})
        assert headers["content-type"] == media
        assert text.startswith(begin)
        assert b"h100-sxm" in text


def test_the_catalogue(served: Served) -> None:
    found = served.call("/v1/plan/devices")[1]
    here, *others = found["devices"]
    assert here["id"] == "here"
    assert here["usable_bytes"] > 0
    assert [one["id"] for one in others] == list(devices())
    assert found["models"] == ["tiny"]
    for one in others[:3]:
        found = ask(served, model=config("gemma-3-1b"), on=one["id"])
        assert found["memory"]["device"] == one["id"]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"model": "/etc/passwd"}, 404, "model", "there is no model '/etc/passwd' here"),
        ({"model": "smollm2"}, 404, "model", "this server has 'tiny'"),
        ({"model": {}}, 400, "model", "config.json"),
        ({"model": {"hidden_size": "x"}}, 400, "model", "num_hidden_layers"),
        ({"model": config("phi-4") | {"num_hidden_layers": 600}}, 400, "model", "600 layers"),
        ({"model": config("phi-4") | {"num_hidden_layers": 10**9}}, 400, "model", "4096"),
        ({"model": config("phi-4"), "on": "h100-smx"}, 400, "on", "did you mean h100-sxm"),
        ({"context": 0}, 400, "context", "context is 0"),
        ({"context": "many"}, 400, "context", ""),
        ({"tensor_parallel_size": "two"}, 400, "tensor_parallel_size", "whole number or auto"),
        ({"kv_cache_memory": "a lot"}, 400, "kv_cache_memory", "'a lot' is not a size"),
        ({"gpu_memory_utilization": 1.5}, 400, "gpu_memory_utilization", "at most 1"),
        ({"engine": "orca"}, 400, "engine", "vllm"),
        ({"trace_file": "/etc/passwd"}, 400, "trace_file", "is not a parameter here"),
        ({"prices": "/etc/passwd"}, 400, "prices", "is not a parameter here"),
        ({"request_rate": 3.0, "new_tokens": 9}, 400, "prompt_tokens", "is missing"),
        ({**SHORT, "request_rate": 3.0, "max_concurrency": 2}, 400, "max_concurrency", "arrive"),
        ({**SHORT, "slo": ["ttft:p97:100"]}, 400, "slo", "'p97' is not one of"),
        ({**SHORT, "slo": "ttft:p95:100"}, 400, "slo", ""),
        ({**SHORT, "request_rate": 0.0}, 400, "request_rate", "from 0.001 to 100000"),
        ({**SHORT, "request_rate": 1e30}, 400, "request_rate", "from 0.001 to 100000"),
        ({**SHORT, "prompt_tokens": 10**9}, 400, "prompt_tokens", "at most 32,768"),
        ({**SHORT, "prompt_tokens": "9:1e308"}, 400, "prompt_tokens", "variation of 5"),
        ({**SHORT, "new_tokens": "few"}, 400, "new_tokens", "whole number"),
        ({**SHORT, "replicas": 0}, 400, "replicas", "whole number or auto"),
        ({"out": "/tmp/x.svg"}, 400, "out", "is not a parameter here"),
        ({"format": "table"}, 400, "format", "'json', 'csv', 'markdown'"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused_and_how(
    served: Served, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    found, error = served.refused("/v1/plan", body)
    assert (found, error["param"]) == (status, param), error
    assert words in error["message"]
    assert "--" not in error["message"], "flags are the command line's"


VALUES = st.one_of(
    st.sampled_from([None, True, "", "x", "full_attention", [], [1], [None], {}, {"a": 1}]),
    st.sampled_from([0, -1, 1, 3, 0.5, 10**12, 10**30, 1e300, "bfloat16", ["full_attention"] * 3]),
)


@given(st.sampled_from(sorted(CONFIGS)), st.data())
@settings(
    max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_damaged_config_is_planned_or_refused(
    served: Served, name: str, data: st.DataObject
) -> None:
    damaged = dict(config(name))
    field = data.draw(st.sampled_from(sorted(damaged)))
    inner = damaged[field]
    if isinstance(inner, dict) and inner and data.draw(st.booleans()):
        damaged[field] = inner | {data.draw(st.sampled_from(sorted(inner))): data.draw(VALUES)}
    else:
        damaged[field] = data.draw(VALUES)
    body = {"model": damaged, "on": "l4", "compare_published": True}
    status, answer, _ = served.call("/v1/plan", body)
    assert status in (200, 400), (field, damaged[field], answer)
    if status == 400:
        assert answer["error"]["param"] == "model", answer


def test_a_long_body_is_refused(served: Served) -> None:
    status, error = served.refused("/v1/plan", {"model": {"x": "y" * (9 << 20)}})
    assert (status, error["code"]) == (413, "request_too_large")
    status, error = served.refused("/v1/plan", {"model": {"layer_types": ["full"] * 70_000}})
    assert (status, "too many values" in error["message"]) == (400, True)


@pytest.mark.parametrize("load", [{}, SHORT | {"request_rate": 9.0}], ids=["memory", "load"])
def test_plans_do_not_hold_up_answers(
    served: Served, load: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is made in a thread: the loop, and with it all streams, go on meanwhile."""
    is_at_work, may_end = threading.Event(), threading.Event()
    answers: list[Any] = []

    def slow_plan(*args: Any, **options: Any) -> Any:
        is_at_work.set()
        assert may_end.wait(PATIENCE_S), "no other request was answered while a plan was being made"
        return plan_for(*args, **options)

    def ask_for_plan() -> None:
        answers.append(ask(served, model=config("gemma-3-1b"), on="l4", **load))

    monkeypatch.setattr(plans, "plan_for", slow_plan)
    thread = threading.Thread(target=ask_for_plan)
    thread.start()
    assert is_at_work.wait(PATIENCE_S)
    assert served.call("/health")[0] == 200
    assert not answers
    may_end.set()
    thread.join()
    assert answers[0]["memory"]["device"] == "l4"


def test_a_load_gets_the_choices_that_the_command_makes(served: Served) -> None:
    load = SHORT | {"request_rate": 2.0, "slo": ["ttft:p95:900", "tpot:mean:70"], "spot": True}
    body = {"model": config("llama-3.1-8b"), "on": "l4,a100-80-sxm", "tensor_parallel_size": "1"}
    found = ask(served, **body, **load)
    own = plan(**body, **load | {"prompt_tokens": "60", "new_tokens": "6"})
    assert found == json.loads(json.dumps(own.as_dict()))
    assert found["answer"] == own.answer
    assert {one["device"] for one in found["choices"]} == {"l4", "a100-80-sxm"}
    assert found["choices"][0]["spot"]["replicas"] >= 1
    assert found["time"]["ttft_ms"] == found["choices"][0]["ttft_ms"]["mean"]
    drawn = ask(served, **body, **load, picture=True)
    assert drawn.pop("picture") == ask(served, **body, **load, format="svg").decode()
    assert drawn == found
    rows = csv.DictReader(io.StringIO(ask(served, **body, **load, format="csv").decode()))
    assert [row["device"] for row in rows] == [one["device"] for one in found["choices"]]


def test_a_load_of_the_model_that_is_served_is_planned_for_this_machine(served: Served) -> None:
    found = ask(served, **SHORT, max_concurrency=2)
    assert {one["device"] for one in found["choices"]} == {"here"}
    assert found["time"]["source"] in ("assumed", "calibrated")
    assert found["answer"].startswith("1 x here holds it")


def test_a_load_that_nothing_bears_has_no_picture(served: Served) -> None:
    body = {"model": config("llama-3.1-8b"), "on": "l4", "request_rate": 1e5, "replicas": 1}
    found = ask(served, **body, **SHORT, picture=True)
    assert found["picture"] is None
    assert "you ask for 100,000" in found["answer"]
    status, error = served.refused("/v1/plan", body | SHORT | {"format": "svg"})
    assert (status, "nothing to draw" in error["message"]) == (400, True)


LONG = SHORT | {"new_tokens": 4000, "max_concurrency": 200, "slo": ["tpot:p99:9"]}


def test_one_load_at_a_time_and_others_do_not_wait_for_it(served: Served) -> None:
    body = json.dumps(LONG | {"model": config("llama-3.1-8b"), "on": "l4,h100-sxm"})
    with connected(served.port) as connection:
        connection.request("POST", "/v1/plan", body, {"content-type": "application/json"})
        eventually(lambda: served.call("/v1/plan", SHORT)[0] == 503)
        status, error = served.refused("/v1/plan", SHORT)
        assert (status, error["code"]) == (503, "plan_busy")
        assert "each key has one at a time" in error["message"]
        assert served.call("/v1/plan", SHORT)[2]["retry-after"] == "2"
        assert ask(served, model=config("phi-4"), on="l4")["memory"]["device"] == "l4"
    # Who leaves ends it, long before its time is over.
    eventually(lambda: served.call("/v1/plan", SHORT)[0] == 200)


def test_a_plan_for_a_load_is_kept_for_its_other_forms(served: Served) -> None:
    """They need no turn: they come while another's plan is being made."""
    mine = SHORT | {"model": config("phi-4"), "on": "l4", "request_rate": 0.5}
    found = ask(served, **mine, picture=True)
    long = json.dumps(LONG | {"model": config("llama-3.1-8b"), "on": "l4,h100-sxm"})
    with connected(served.port) as connection:
        connection.request("POST", "/v1/plan", long, {"content-type": "application/json"})
        other = mine | {"request_rate": 0.25}
        eventually(lambda: served.call("/v1/plan", other)[0] == 503)
        assert ask(served, **mine) == {key: found[key] for key in found if key != "picture"}
        assert ask(served, **mine, format="svg").decode() == found["picture"]
        assert served.call("/v1/plan", other)[0] == 503, "another is still being made"
        assert served.call("/v1/plan", mine | {"compare_published": True})[0] == 503
    eventually(lambda: served.call("/v1/plan", other)[0] == 200)


def test_a_plan_that_takes_too_long_ends_amid_a_simulation(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MOST_S", 0.1)
    monkeypatch.setattr(plans, "BUSY_TIMES", 10_000)
    one = {"model": config("llama-3.1-8b"), "on": "h100-sxm", "tensor_parallel_size": 1}
    status, error = served.refused("/v1/plan", LONG | one)
    assert (status, error["code"]) == (400, "plan_too_long")
    assert "fewer devices" in error["message"]


def test_a_plan_that_only_waits_for_a_busy_machine_is_asked_for_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it computes is little; only the time that passes is too long, and no request's fault."""
    monkeypatch.setattr(plans, "BUSY_TIMES", 0)
    one = {"model": config("llama-3.1-8b"), "on": "h100-sxm", "tensor_parallel_size": 1}
    status, answer, headers = served.call("/v1/plan", LONG | one)
    assert (status, answer["error"]["code"]) == (503, "plan_busy")
    assert int(headers["retry-after"]) > 0


@given(
    st.fixed_dictionaries(
        {"prompt_tokens": st.sampled_from([1, 700, "90:5", 32_768]), "new_tokens": st.just(2)},
        optional={
            "request_rate": st.sampled_from([1e-3, 1e5]) | st.floats(),
            "max_concurrency": st.integers(-1, 3) | st.just(1 << 16),
            "burstiness": st.sampled_from([0.01, 1e6]) | st.floats(),
            "replicas": st.sampled_from([1, "auto", 4096, -1]),
            "spot": st.booleans(),
            "evictions_per_hour": st.sampled_from([1e-6, 60.0]) | st.floats(),
            "notice": st.sampled_from([0.0, 86_400.0]) | st.floats(),
            "slo": st.lists(st.sampled_from(["ttft:p99:1e-300", "e2el:mean:1e300", "tpot:p50:1"])),
            "max_usd_per_hour": st.floats(),
        },
    )
)
@settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_an_odd_load_is_planned_or_refused(served: Served, load: dict[str, Any]) -> None:
    status, answer, _ = served.call("/v1/plan", {"model": config("gemma-3-1b"), "on": "l4"} | load)
    assert status in (200, 400), answer
    if status == 400 and answer["error"]["code"] == "invalid_value":
        assert answer["error"]["param"] in load
