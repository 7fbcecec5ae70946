"""A search of a server of ours begins at the load that the server foresees to hold."""

from __future__ import annotations

from pathlib import Path

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import Outcome
from ridgeline.bench.search import foreseen_rate
from ridgeline.bench.search.slo import RequestSlo
from tests.bench.script_server import serving as serving_others
from tests.bench.search.test_main import SHORT, bench_search, document
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.serving import serving

FIRST = [Outcome(0, 0.0, 0.0, 1.0, [0.5], prompt_tokens=60, usage_tokens=20)]


def test_the_server_says_where_its_limit_is_and_a_search_begins_there(model: Path) -> None:  # noqa: F811
    slos = [RequestSlo("ttft", 95, 400), RequestSlo("tpot", None, 60)]
    with serving(model, {"max_num_seqs": 4}) as served:
        client_flags = ClientFlags(base_url=f"{served.url}/v1", model="tiny")
        rate_per_s = foreseen_rate(client_flags, slos, FIRST)
        assert rate_per_s is not None
        body = {"on": "here", "replicas": 1, "prompt_tokens": 60, "new_tokens": 20}
        body |= {"slo": ["ttft:p95:400", "tpot:mean:60"]}
        held, failed = (
            served.call("/v1/plan", body | {"request_rate": by * rate_per_s})[1]["choices"][0]
            for by in (0.99, 1.5)
        )
        assert held["meets_slo"]
        assert not failed["meets_slo"]
        assert (
            foreseen_rate(client_flags, [RequestSlo("ttft", 95, 1e-3)], FIRST) is None
        )  # nothing holds
        assert foreseen_rate(client_flags, slos, [Outcome(0, 0.0, 0.0, 1.0)]) is None  # no lengths
        flags = ("--base-url", served.url, "--slo", "ttft:mean:400", "--num-prompts", "25")
        done = bench_search(*flags, "--max-trials", "1", *SHORT)
        assert "the server foresees that it holds up to" in done.stderr
        (trial,) = document(done)["trials"]
        assert (trial["slos"][0]["slo"], trial["load"] > 1) == ("ttft:mean:400", True)


def test_another_server_foresees_nothing() -> None:
    with serving_others(lambda request: None) as server:
        client_flags = ClientFlags(base_url=server.url, model="scripted")
        assert foreseen_rate(client_flags, [RequestSlo("ttft", 95, 400)], FIRST) is None
    assert foreseen_rate(client_flags, [RequestSlo("ttft", 95, 400)], FIRST) is None  # it is gone
