"""What a simulated run means: the load generator's own numbers, from records of virtual time.

Pure: it knows nothing of models, files and terminals. A case can be sent to another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ridgeline.bench.load.client_overhead import ClientOverhead
from ridgeline.bench.load.stats import Outcome, summarise
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.foresight.simulator.drafts import Drafts
from ridgeline.foresight.simulator.fleet import ROUTERS, Evict, RequestOutcome, serve_fleet
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.simulator.workload import Planned
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.model.cost.device_time import DeviceTime

CROWDED = 0.85  # of what can be served: above it, waiting depends on the smallest error


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A load, and what is to serve it.

    Attributes:
        warmups: requests that come first.
        load: requests to measure, whose names are their indices.
        refused: what a server would refuse, and why, by index.
        concurrency: sessions at a time in a closed loop; None in an open one.
        settings: of the engine.
        times: the model of time.
        replicas: how many engines of these settings serve it; without warm-ups, if several.
        router: which of them gets a request, a name of ``fleet.ROUTERS``.
        drafts: what each engine guesses; None for no speculation.
        kills: which of several engines end, and when; what they have goes on elsewhere.
        client_overhead: what clients wait for besides the engine; None if that is not known.
    """

    warmups: tuple[SimRequest, ...]
    load: tuple[SimRequest, ...]
    refused: Mapping[int, str]
    concurrency: int | None
    settings: EngineRecord
    times: StepTime | DeviceTime
    replicas: int = 1
    router: str = "least-tokens"
    drafts: Drafts | None = None
    kills: tuple[Evict, ...] = ()
    client_overhead: ClientOverhead | None = None

    def records(self) -> list[Record]:
        """Simulate it on one engine."""
        return simulate(
            self.load,
            self.settings,
            self.times,
            concurrency=self.concurrency,
            turnaround_s=self._turnaround_s(),
            warmups=self.warmups,
            drafts=self.drafts,
        )

    def _turnaround_s(self) -> float:
        """Return how long a client of a closed loop takes from one request to the next."""
        if self.client_overhead is None:
            return 0.0
        num_tokens = sum(len(request.prompt) for request in self.load)
        return self.client_overhead.seconds(num_tokens / len(self.load))

    def slower(self, factor: float) -> SimulatedRun:
        """Return the same on a machine on which all takes ``factor`` times as long."""
        return replace(self, times=self.times.scaled(factor))

    def summary(self, limits_ms: Mapping[str, float]) -> dict[str, Any]:
        """Simulate it, and return what the load generator would report."""
        if self.replicas == 1:
            return summarise(self.outcomes(self.records()), limits_ms)
        ended = self.fleet_ended()
        cost = cost_of(self.kills, ended)
        return summarise(self.fleet_outcomes(ended), limits_ms) | {"fleet": cost}

    def fleet_ended(self) -> list[RequestOutcome]:
        """Simulate it on several engines, and return how requests ended."""
        return serve_fleet(
            self.load,
            self.settings,
            self.times,
            self.replicas,
            router=ROUTERS[self.router](),
            concurrency=self.concurrency,
            drafts=self.drafts,
            faults=self.kills,
        )

    def fleet_outcomes(self, ended: Sequence[RequestOutcome]) -> list[Outcome]:
        """Return what clients of several engines see."""
        planned_s = {request.name: request.arrival_s for request in self.load}
        outcomes = [
            Outcome(
                index=int(one.request.name),
                arrival_s=planned_s[one.request.name],
                sent_s=one.arrival_s,
                end_s=one.finish_s,
                chunk_s=sorted(set(one.token_s)),
                prompt_tokens=len(one.request.prompt),
                cached_tokens=one.num_cached_tokens,
                usage_tokens=one.num_new,
            )
            for one in ended
        ]
        return self._with_refused(outcomes)

    def _with_refused(self, outcomes: list[Outcome]) -> list[Outcome]:
        if self.client_overhead is not None:
            outcomes = [self.client_overhead.add_to(outcome) for outcome in outcomes]
        outcomes += [Outcome(i, None, 0.0, 0.0, error=why) for i, why in self.refused.items()]
        return sorted(outcomes, key=lambda outcome: outcome.index)

    def outcomes(self, records: Sequence[Record]) -> list[Outcome]:
        """Return what clients see of these records, seconds from the start of the load."""
        requests = [r for r in records if isinstance(r, RequestRecord) and r.name]
        planned_s = {request.name: request.arrival_s for request in self.load}
        if self.concurrency is None:
            times = [(r.arrival_s, planned_s[r.name]) for r in requests]
            begin_s = min((at_s - due_s for at_s, due_s in times if due_s is not None), default=0.0)
        else:
            begin_s = min((r.arrival_s for r in requests), default=0.0)
        return self._with_refused(outcomes_of(records, begin_s, planned_s))

    def utilisation(self, summary: Mapping[str, Any]) -> float | None:
        """Return the load as a share of what could be served; None if that cannot be said.

        What could be served is what is served when all requests come at once.
        """
        if not self.load or not summary["output_tokens_per_s"]:
            return None
        at_once = replace(
            self,
            load=tuple(replace(a, arrival_s=0.0 if not a.turn else None) for a in self.load),
            concurrency=None,
        )
        most_per_s = at_once.summary({})["output_tokens_per_s"]
        asked_per_s = summary["output_tokens_per_s"]
        times_s = [a.arrival_s for a in self.load if a.arrival_s is not None]
        if self.concurrency is None:
            span_s = max(times_s) - min(times_s)
            if span_s > 0:
                asked_per_s = summary["total_output_tokens"] / span_s
            else:
                return 1.0
        return round(min(asked_per_s / most_per_s, 9.99), 3) if most_per_s else None


def outcomes_of(
    records: Sequence[Record], begin_s: float, planned_s: Mapping[str, float | None]
) -> list[Outcome]:
    """Return what clients see of records, in seconds from ``begin_s``; names are indices.

    ``planned_s`` says when requests were to come; those without a name are left out.
    """
    chunks = _token_times(records)
    return [
        Outcome(
            index=int(r.name),
            arrival_s=planned_s[r.name],
            sent_s=r.arrival_s - begin_s,
            end_s=r.finish_s - begin_s,
            chunk_s=[at_s - begin_s for at_s in chunks.get(r.request_id, ())],
            prompt_tokens=len(r.prompt_token_ids),
            cached_tokens=r.num_cached_tokens,
            usage_tokens=sum(r.num_generated),
            error=r.error or ("its client left" if "abort" in r.finish_reasons else None),
        )
        for r in records
        if isinstance(r, RequestRecord) and r.name
    ]


def _token_times(records: Sequence[Record]) -> dict[int, list[float]]:
    """Return when each token of a request was there."""
    times_s: dict[int, list[float]] = {}
    for record in records:
        if isinstance(record, StepRecord):
            at_s = record.start_s + record.schedule_s + record.execute_s
            for (seq_id, _, _), tokens in zip(record.work, record.sampled, strict=False):
                if tokens:
                    times_s.setdefault(seq_id[0], []).append(at_s)
    return times_s


def tokens_of_sessions(planned: Sequence[Planned], prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return how many tokens each session may have at its end; arguments as below."""
    tokens: list[int] = []
    for request, prompt in zip(planned, prompts, strict=True):
        num = len(prompt) + request.max_tokens
        if request.turn:
            tokens[-1] += num
        else:
            tokens.append(num)
    return tokens


def sim_requests(
    planned: Sequence[Planned], prompts: Sequence[tuple[int, ...]], max_model_len: int
) -> tuple[list[SimRequest], list[SimRequest], dict[int, str]]:
    """Return warm-ups, requests to measure, and what a server would refuse.

    Args:
        planned: requests, with negative indices for warm-ups.
        prompts: their token ids; of a later turn, what is new in it.
        max_model_len: the longest prompt and answer together. Longer answers end there.
    """
    warmups: list[SimRequest] = []
    load: list[SimRequest] = []
    refused: dict[int, str] = {}
    said = 0  # tokens of the session so far
    for request, prompt in zip(planned, prompts, strict=True):
        said = said + len(prompt) if request.turn else len(prompt)
        if said >= max_model_len:
            if request.index >= 0:
                refused[request.index] = (
                    f"prompts are longer than prompt and answer may be together ({max_model_len})"
                )
            continue
        num_new = min(request.max_tokens, max_model_len - said)
        sim_request = SimRequest(
            prompt=prompt,
            num_new=(num_new,),
            arrival_s=request.arrival_s,
            name=str(request.index) if request.index >= 0 else "",
            turn=request.turn,
            think_s=request.think_s,
        )
        (load if request.index >= 0 else warmups).append(sim_request)
        said += num_new
    return warmups, load, refused


def kills_a_minute(text: str, num_replicas: int) -> float:
    """Read ``12``, or ``10%`` of the servers: how many end in a minute. Raises ValueError."""
    try:
        per_minute = float(text.removesuffix("%"))
        if not 0 <= per_minute < math.inf:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--kills-per-minute is {text}: write a number of at least 0, or a part of the servers "
            "such as 10%"
        ) from None
    return per_minute * num_replicas / 100 if text.endswith("%") else per_minute


def random_kills(
    num_replicas: int, per_minute: float, until_s: float, back_after_s: float, seed: int
) -> tuple[Evict, ...]:
    """Return when which server ends: a Poisson process over those that are there.

    Args:
        num_replicas: servers.
        per_minute: how many end in a minute, of all together.
        until_s: none ends later.
        back_after_s: how long it takes until one like it takes requests again, with nothing read.
        seed: of the draws.
    """
    rng, now_s, kills = Random(f"{seed} kills"), 0.0, list[Evict]()
    back_s = [0.0] * num_replicas
    while per_minute:
        now_s += rng.expovariate(per_minute / 60)
        if now_s >= until_s:
            break
        there = [replica for replica in range(num_replicas) if back_s[replica] <= now_s]
        if there:
            replica = rng.choice(there)
            back_s[replica] = now_s + back_after_s
            kills.append(Evict(at_s=now_s, replica=replica, back_s=back_s[replica]))
    return tuple(kills)


def cost_of(kills: Sequence[Evict], ended: Sequence[RequestOutcome]) -> dict[str, Any]:
    """Return what became of a fleet's work: what its caches had, and what kills cost.

    ``share_cached`` is of all prompt tokens, and ``share_again`` of all tokens that were computed.
    """
    num_prompt = sum(len(one.request.prompt) for one in ended)
    num_cached = sum(one.num_cached_tokens for one in ended)
    num_computed = sum(one.num_computed for one in ended)
    num_again = sum(one.num_again for one in ended)
    return {
        "kills": len(kills),
        "requests_moved": sum(one.num_moves > 0 for one in ended),
        "requests_lost": sum(one.is_lost for one in ended),
        "tokens_again": num_again,
        "share_again": round(num_again / num_computed, 6) if num_computed else 0.0,
        "share_cached": round(num_cached / num_prompt, 4) if num_prompt else 0.0,
    }
