"""The edge of a server, fitted to runs of which both sides are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.bench.load.client_overhead import ClientOverhead, read_client_overhead
from ridgeline.bench.load.stats import Outcome, summarise
from ridgeline.bench.simulate.predicted import outcomes_of
from ridgeline.cli.main import app
from ridgeline.core.records import Record, RequestRecord
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.structure import to_json
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.foresight.simulator.test_run import SETTINGS, TIMES

TRUE = ClientOverhead(0.004, 0.0003)
Pair = Callable[..., str]


def served(num_prompt: int) -> list[Record]:
    warm = [SimRequest(prompt=(9,), num_new=(2,), arrival_s=0.0, name="")]
    load = [
        SimRequest(
            prompt=(3,) * (num_prompt + i % 5), num_new=(6,), arrival_s=1 + 0.2 * i, name=str(i)
        )
        for i in range(20)
    ]
    return simulate([*warm, *load], SETTINGS, TIMES)


def result_of(records: list[Record], edge: ClientOverhead) -> dict[str, Any]:
    """What clients beyond this edge measure."""
    arrivals = {r.name: r.arrival_s for r in records if isinstance(r, RequestRecord)}
    outcomes = outcomes_of(records, 0.0, arrivals)
    return summarise([edge.add_to(one) for one in outcomes], {})


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Write both sides of a run; return them as the flag names them."""

    def write(num_prompt: int, edge: ClientOverhead = TRUE, **changes: Any) -> str:
        records = served(num_prompt)
        result, trace = (tmp_path / f"{num_prompt}.{end}" for end in ("json", "jsonl"))
        result.write_text("a block\n" + json.dumps(result_of(records, edge) | changes) + "\n")
        trace.write_text("".join(json.dumps(to_json(one)) + "\n" for one in records))
        return f"{result},{trace}"

    return write


def test_two_runs_tell_a_constant_from_what_a_token_costs(pair: Pair) -> None:
    found = read_client_overhead([pair(4), pair(40), pair(15)])
    assert found.base_s == pytest.approx(TRUE.base_s, abs=1e-5)
    assert found.per_token_s == pytest.approx(TRUE.per_token_s, rel=0.01)


def test_one_run_knows_their_sum_alone(pair: Pair) -> None:
    found = read_client_overhead([pair(20)])
    assert found.per_token_s == 0
    assert found.base_s == pytest.approx(TRUE.seconds(22), abs=1e-5)


@pytest.mark.parametrize(
    ("edge", "wanted"),
    [(ClientOverhead(0.004, -0.0001), "per_token_s"), (ClientOverhead(-0.001, 0.001), "base_s")],
)
def test_nothing_is_negative(pair: Pair, edge: ClientOverhead, wanted: str) -> None:
    found = read_client_overhead([pair(4, edge), pair(30, edge)])
    assert getattr(found, wanted) == 0
    assert min(found.base_s, found.per_token_s) >= 0
    assert max(found.base_s, found.per_token_s) > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_failed": 1}, "in which no request failed"),
        ({"num_requests": 19, "num_failed": 0}, "in which no request failed"),
        ({"total_input_tokens": 7}, "and it says 7"),
        ({"ttft_from_send": None}, "is not a result of bench serve: TypeError"),
    ],
)
def test_two_files_that_are_not_of_one_run_are_refused(
    pair: Pair, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read_client_overhead([pair(4, **changes)])


def test_what_is_no_pair_is_named() -> None:
    with pytest.raises(ValueError, match=r"--edge 'result.json' is not RESULT,TRACE"):
        read_client_overhead(["result.json"])


@pytest.mark.parametrize("how", [("--request-rate", "5"), ("--max-concurrency", "2")])
def test_a_simulation_adds_it_to_what_clients_see(
    pair: Pair,
    model: Path,  # noqa: F811
    how: tuple[str, str],
) -> None:
    flags = (str(model), *how, "--num-prompts", "12", "--seed", "3", "--kv-cache-memory", "1MiB")
    flags += ("--prompt-tokens", "9", "--new-tokens", "8")

    def found(*more: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["simulate", *flags, *more])
        assert done.exit_code == 0, done.output
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return document

    plain, seen = found(), found("--edge", pair(20))
    later_ms = 1e3 * TRUE.seconds(22)
    assert seen["prediction"]["edge"]["base_ms"] == pytest.approx(later_ms, abs=0.01)
    assert plain["prediction"]["edge"] is None
    if "--request-rate" in how:
        for name in ("ttft_from_send", "e2e"):
            assert seen[name]["mean_ms"] == pytest.approx(
                plain[name]["mean_ms"] + later_ms, abs=0.01
            )
        assert seen["tpot_excl_first"] == plain["tpot_excl_first"]
    assert seen["duration_s"] > plain["duration_s"]
    assert any("client's side" in one for one in plain["warnings"])
    assert not any("client's side" in one for one in seen["warnings"])


def test_an_outcome_without_tokens_is_later_by_the_constant() -> None:
    assert TRUE.add_to(Outcome(0, 0.0, 0.0, 1.0)).end_s == 1.004
