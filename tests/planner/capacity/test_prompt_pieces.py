"""Prompts in pieces that suit the device, against whole prompts, on GPUs under a virtual clock.

The load is FastGen's: prompts of 2,600 tokens and answers of 60, both normal, with Poisson
arrivals. A request is served well if its first token comes within a second for each 512 tokens of
its prompt, and the others fast enough (Holmes et al., 2024). A rate holds if 95 % are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ridgeline.core.records import EngineRecord, RequestRecord
from ridgeline.engine.setup.home import stores
from ridgeline.foresight.simulator.run import SimRequest, TimeModel, simulate
from ridgeline.planner import PlanFlags
from ridgeline.planner.capacity.latency_model import latency_model_of
from ridgeline.planner.capacity.option import engine_record, least_prompt_tokens
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.memory.placement import place
from tests.model.cost.published_configs import PUBLISHED

TOKENS_PER_S = (2, 4, 6, 8, 10, 15, 20)  # service levels; FastGen's is 4
NUM_REQUESTS = 80
LLAMA_2_70B = PUBLISHED["llama-3.1-70b"]["config"] | {"vocab_size": 32000}


def load(rate_per_s: float) -> list[SimRequest]:
    rng, at_s, requests = Random(7), 0.0, []
    for i in range(NUM_REQUESTS):
        at_s += rng.expovariate(rate_per_s)
        num_prompt, num_new = (max(4, int(rng.gauss(mean, 0.3 * mean))) for mean in (2600, 60))
        requests.append(SimRequest(prompt=(i,) * num_prompt, num_new=(num_new,), arrival_s=at_s))
    return requests


def share_served_well(records: list[RequestRecord], least_per_s: float) -> float:
    def is_well(one: RequestRecord) -> bool:
        assert one.first_token_s is not None
        first_s = one.first_token_s - one.arrival_s
        per_s = (sum(one.num_generated) - 1) / (one.finish_s - one.first_token_s)
        return first_s <= len(one.prompt_token_ids) / 512 and per_s >= least_per_s

    return sum(map(is_well, records)) / len(records)


def highest_rates(settings: EngineRecord, times: TimeModel, first: float) -> Mapping[int, float]:
    """Return for each level the highest rate that holds, on a grid of 8 %; 0 for none."""
    found, rate_per_s = dict.fromkeys(TOKENS_PER_S, 0.0), first
    while True:
        records = simulate(load(rate_per_s), settings, times)
        ended = [one for one in records if isinstance(one, RequestRecord)]
        holding = [level for level in TOKENS_PER_S if share_served_well(ended, level) >= 0.95]
        if not holding:
            return found
        found |= dict.fromkeys(holding, rate_per_s)
        rate_per_s *= 1.08


@pytest.mark.parametrize(
    ("device", "first", "gain"),
    [
        ("a100-80-sxm", 0.7, 1.2),
        pytest.param("h100-sxm", 2.0, 1.3, marks=pytest.mark.full),
    ],
)
def test_pieces_that_suit_a_gpu_are_never_worse_than_whole_prompts(
    device: str, first: float, gain: float
) -> None:
    spec = read_model_spec(LLAMA_2_70B, stores())
    flags: dict[str, Any] = {"engine": "vllm", "tensor_parallel_size": "4", "context": 4096}
    placement = place(spec, devices()[device], PlanFlags(**flags), default_ranks="1")
    times = latency_model_of(spec, placement).times

    def rates(policy: str, least: int = 64) -> Mapping[int, float]:
        is_whole = policy == "orca"
        settings = replace(
            engine_record(placement, times),
            policy=policy,
            max_num_batched_tokens=1 << 17 if is_whole else 2048,
            max_model_len=8192,
            least_prompt_tokens=least,
            reserve_full=False,
        )
        return highest_rates(settings, times, first)

    whole, pieces = rates("orca"), rates("splitfuse", least_prompt_tokens(times.seconds))
    assert all(pieces[level] >= whole[level] for level in TOKENS_PER_S)
    assert pieces[4] >= gain * whole[4] > 0
    assert rates("splitfuse")[2] < whole[2]  # what suits a processor does not suit a GPU
