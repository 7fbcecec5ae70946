"""Adapters in the core: no prefix crosses them, and the backend is told of each."""

from __future__ import annotations

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord
from tests.core.harness import adapter, expected, finish, make_engine, tokens_of

PROMPT = (1, 2, 3, 0) * 5
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def cached_tokens(records: list[Record]) -> list[int]:
    return [r.num_cached_tokens for r in records if isinstance(r, RequestRecord)]


def test_no_prefix_crosses_adapters_and_each_finds_its_own() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    for number in (0, 1, 2, 1, 0, 2):
        request_id = engine.add(PROMPT, PARAMS, adapter=adapter(number))
        wanted = expected(engine.requests[request_id])
        assert tokens_of(finish(engine)) == wanted  # the ledger has checked every slot it read
    assert cached_tokens(records) == [0, 0, 0, 16, 16, 16]


def test_adapters_side_by_side_in_one_step_share_nothing() -> None:
    engine, runner = make_engine()
    wanted = {}
    for number in (0, 1, 2):
        request_id = engine.add(PROMPT, PARAMS, adapter=adapter(number))
        wanted |= expected(engine.requests[request_id])
    assert tokens_of(finish(engine)) == wanted
    assert {work.seq_id[0]: work.adapter for work in runner.steps[0].work} == {0: 0, 1: 1, 2: 2}
    assert len({tuple(answer) for answer in wanted.values()}) == 3


def test_an_adapter_and_a_tenant_are_both_part_of_the_root() -> None:
    records: list[Record] = []
    engine, _ = make_engine(listeners=[records.append])
    for number, root in ((1, b""), (1, b"a"), (0, b"a"), (1, b"a")):
        engine.add(PROMPT, PARAMS, adapter=adapter(number), cache_root=root)
        finish(engine)
    assert cached_tokens(records) == [0, 0, 0, 16]
    last = records[-1]
    assert isinstance(last, RequestRecord)
    assert (last.adapter, last.cache_root) == ("01" * 16, "61" + "01" * 16)


def test_beams_and_contrastive_search_keep_their_adapter() -> None:
    for params in (
        SamplingParams(max_tokens=6, n=2, use_beam_search=True, temperature=0),
        SamplingParams(max_tokens=6, penalty_alpha=0.5, top_k=3, temperature=0),
    ):
        engine, runner = make_engine()
        request_id = engine.add(PROMPT, params, adapter=adapter(2))
        wanted = expected(engine.requests[request_id])
        assert tokens_of(finish(engine)) == wanted
        assert {work.adapter for step in runner.steps for work in step.work} == {2}
