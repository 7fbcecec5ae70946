"""What are promises worth? The same overload on two servers: one is told deadlines, one is not.

    python -m peers.promises [--model smollm2] [--seconds 90] [--load 1.5]

First it is measured how long requests take alone, and how many a second saturate the server. Then
more arrive than that, at random, each with one of two deadlines: 5 or 15 times what it would take
alone in the median. The server that is told nothing serves as always, and clients hang up when
their time is over. The other one is asked for promises. Refused in vain is what would have been
kept if it alone had not been refused: the trace of what was accepted is simulated again with it, by
a model of time fitted to that trace, at the speed that the machine had at each moment. All enter
when they had their verdict, since nobody can enter before.
It takes about five minutes, with progress on standard error. The table is markdown; the last line
on standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import httpx2

from peers.overhead import server
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.deadline import Due, latest_start_s
from ridgeline.foresight.simulator.replay_times import requests_in, settings_of
from ridgeline.foresight.simulator.run import Clock, ClockHooks, SimRequest, new_replica, serve
from ridgeline.foresight.step_time.features import Samples, StepTime, Watcher, of_record
from ridgeline.foresight.step_time.fit import fit
from ridgeline.model.cost.costs import Features

_PROMPTS, _ANSWERS = (20, 60, 150, 400), (16, 32, 64)
_NUM_ALONE = 12
_STREAMS, _FILLING_S, _SATURATING_S = 32, 10.0, 40.0
_TIGHT, _LOOSE = 5.0, 15.0  # deadlines, in times of what requests take alone
_MOST_REPLAYED = 100
_AROUND_S = 0.5  # before and behind a moment, for the speed then
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(slots=True)
class Sent:
    """A request, and what became of it; times are of this machine's monotonic clock."""

    prompt: tuple[int, ...]
    num_new: int
    after_s: float  # the start
    total_s: float = inf
    sent_s: float = 0.0
    end_s: float = inf
    outcome: str = "open"  # ok, refused, timeout, or what went wrong
    promise: str = ""  # kept or broken; in_time or late, if it was accepted without one

    @property
    def is_in_time(self) -> bool:
        """Whether a whole answer was there by its deadline."""
        return self.outcome == "ok" and self.end_s - self.sent_s <= self.total_s


def new_request(dice: random.Random, after_s: float = 0.0) -> Sent:
    """Draw a request that no cache has seen."""
    prompt = tuple(dice.randrange(1000, 20_000) for _ in range(dice.choice(_PROMPTS)))
    return Sent(prompt, dice.choice(_ANSWERS), after_s)


async def ask(http: httpx2.AsyncClient, one: Sent, *, is_told: bool) -> None:
    """Send a request and wait for its answer, for as long as it is of use."""
    body: dict[str, Any] = {"prompt": list(one.prompt), "max_tokens": one.num_new}
    body |= {"ignore_eos": True, "temperature": 0, "include_timings": True}
    if is_told:
        body["deadline"] = {"total_ms": 1e3 * one.total_s}
    one.sent_s = time.monotonic()
    patience_s = None if is_told or one.total_s == inf else one.total_s
    try:
        async with asyncio.timeout(patience_s):
            answer = await http.post("/v1/completions", json=body)
    except TimeoutError:
        one.outcome = "timeout"
        return
    one.end_s = time.monotonic()
    document = answer.json()
    if answer.status_code == 200:
        one.outcome = "ok"
        one.promise = document["metrics"].get("promise", {}).get("outcome", "")
    else:
        code = document["error"]["code"]
        one.outcome = "refused" if code == "deadline_cannot_be_kept" else str(code)


def client(port: int) -> httpx2.AsyncClient:
    """Return a client without limits of its own."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=None)


async def alone(port: int, dice: random.Random) -> float:
    """Return how many seconds a request takes if there is no other, in the median."""
    done = [new_request(dice) for _ in range(_NUM_ALONE)]
    async with client(port) as http:
        for one in done:
            await ask(http, one, is_told=False)
    if any(one.outcome != "ok" for one in done):
        raise SystemExit(f"the server does not answer: {done[0].outcome}")
    return statistics.median(one.end_s - one.sent_s for one in done)


async def saturate(port: int, dice: random.Random) -> float:
    """Return how many requests a second a full server answers."""
    done: list[Sent] = []
    end_s = time.monotonic() + _SATURATING_S

    async def work(http: httpx2.AsyncClient) -> None:
        while time.monotonic() < end_s:
            one = new_request(dice)
            await ask(http, one, is_told=False)
            done.append(one)

    async with client(port) as http, asyncio.TaskGroup() as tasks:
        for _ in range(_STREAMS):
            tasks.create_task(work(http))
    counted_s = _SATURATING_S - _FILLING_S  # at first all streams begin at once
    counted = [one for one in done if end_s - counted_s < one.end_s <= end_s]
    if not counted:
        raise SystemExit(f"the server answered nothing in {counted_s:.0f} s: take a smaller model")
    return len(counted) / counted_s


async def learn(port: int, dice: random.Random) -> None:
    """Wait until the server knows how fast it is."""
    async with client(port) as http:
        for _ in range(120):
            one = replace(new_request(dice), total_s=600.0)
            await ask(http, one, is_told=True)
            if one.outcome == "ok":
                return
            await asyncio.sleep(1)
    raise SystemExit(f"the server promises nothing: {one.outcome}")


async def load(port: int, plan: Sequence[Sent], *, is_told: bool, name: str) -> None:
    """Send the plan as it is due."""
    start_s, num_sent = time.monotonic(), 0
    async with client(port) as http, asyncio.TaskGroup() as tasks:
        for one in plan:
            await asyncio.sleep(start_s + one.after_s - time.monotonic())
            tasks.create_task(ask(http, one, is_told=is_told))
            num_sent += 1
            if num_sent % max(1, len(plan) // 10) == 0:
                say(f"{name}: {num_sent} of {len(plan)} requests sent")


def in_vain(path: Path, plan: Sequence[Sent], dice: random.Random) -> tuple[int, int]:
    """Return how many of some refused requests would have been kept, and of how many."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    times, settings = fitted(records), settings_of(records)
    speed = Speed(records, times)
    entered_s = {
        number: record["start_s"]
        for record in records
        if record["type"] == "step"
        for number in record["arrived"]
    }
    accepted = [
        replace(request, arrival_s=entered_s[number])
        for number, request in requests_in(records).items()
        if request.due_s < inf and number in entered_s
    ]
    deadline = {(one.prompt): one for one in plan}
    refused = [one for one in plan if one.outcome == "refused"]
    chosen = dice.sample(refused, min(_MOST_REPLAYED, len(refused)))

    def kept(load: Sequence[SimRequest]) -> set[tuple[int, ...]]:
        in_time, ended, clock = set(), list[Record](), Clock()
        at_speed = AtSpeed(times, speed, clock)
        replica, runner = new_replica(settings, clock, at_speed, ended.append)

        def pass_after_step() -> None:
            clock.now_s += at_speed.after(runner.num_rows, len(replica.ended))

        serve(replica, load, ClockHooks(clock, clock.wait_until, pass_after_step))
        for record in ended:
            if isinstance(record, RequestRecord):
                one = deadline.get(record.prompt_token_ids)
                if one is not None and record.finish_s <= one.sent_s + one.total_s:
                    in_time.add(record.prompt_token_ids)
        return in_time

    promised = {one.prompt for one in plan if one.promise == "kept"}
    before, num = kept(accepted) & promised, 0
    say(f"simulated again, {len(before)} of {len(promised)} promises are kept that were kept")
    for i, one in enumerate(chosen, start=1):
        slack_s = latest_start_s(times, len(one.prompt), one.num_new, Due(inf, one.total_s))
        params = SamplingParams(temperature=0, max_tokens=one.num_new, ignore_eos=True)
        again = SimRequest(
            prompt=one.prompt,
            num_new=(one.num_new,),
            arrival_s=one.end_s,
            params=params,
            due_s=one.sent_s + slack_s,
        )
        num += kept([*accepted, again]) >= before | {one.prompt}
        if i % 20 == 0:
            say(f"refused requests simulated again: {i} of {len(chosen)}")
    return num, len(chosen)


class Speed:
    """How much longer the steps of a trace took around a moment than a model of time says."""

    def __init__(self, records: Sequence[dict[str, Any]], times: StepTime) -> None:
        """Compare all steps of ``records`` with ``times``."""
        self._starts_s: list[float] = []
        self._sums_s = [(0.0, 0.0)]  # as the model says, and as it was, up to each step
        for record in records:
            if record["type"] == "step" and record["sampled"]:
                predicted_s, actual_s = self._sums_s[-1]
                predicted_s += times.seconds(of_record(step_of(record), times.windows))
                actual_s += record["schedule_s"] + record["execute_s"]
                self._starts_s.append(record["start_s"])
                self._sums_s.append((predicted_s, actual_s))

    def __call__(self, now_s: float) -> float:
        """Return actual by predicted seconds of the steps around a moment; 1 if there are none."""
        first = bisect_left(self._starts_s, now_s - _AROUND_S)
        last = bisect_right(self._starts_s, now_s + _AROUND_S)
        (predicted_s, actual_s), (upto_s, actually_upto_s) = self._sums_s[first], self._sums_s[last]
        if last == first:
            return 1.0
        return (actually_upto_s - actual_s) / (upto_s - predicted_s)


class AtSpeed:
    """A model of time at the speed that a machine had; what follows a step stays."""

    def __init__(self, times: StepTime, speed: Speed, clock: Clock) -> None:
        """Ask ``clock`` which moment it is."""
        self._times, self._speed, self._clock = times, speed, clock
        self.windows, self.after = times.windows, times.after

    def seconds(self, features: Features) -> float:
        """Return the seconds from the begin of scheduling to the end of executing."""
        return self._speed(self._clock.now_s) * self._times.seconds(features)


def step_of(record: dict[str, Any]) -> StepRecord:
    """Return the record of a step that a trace has as JSON values."""
    return StepRecord(**{name: value for name, value in record.items() if name != "type"})


def fitted(records: Sequence[dict[str, Any]]) -> StepTime:
    """Return the model of time of a trace."""
    watcher = Watcher(Samples(), ())
    for record in records:
        if record["type"] == "step":
            watcher.take(step_of(record))
        elif record["type"] == "request":
            watcher.take(RequestRecord(**{n: v for n, v in record.items() if n != "type"}))
    return fit(watcher.samples.steps(), watcher.samples.after(), _KNOTS)


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def table(told: Sequence[Sent], untold: Sequence[Sent], span_s: float) -> list[str]:
    """Return the rows that compare both."""
    promised = [one for one in told if one.promise in ("kept", "broken")]
    unpromised = [one for one in told if one.promise in ("in_time", "late")]
    refused = [one for one in told if one.outcome == "refused"]
    broken = [one for one in promised if one.promise != "kept"]
    goods = [sum(one.is_in_time for one in side) for side in (untold, told)]
    verdicts = sorted(1e3 * (one.end_s - one.sent_s) for one in refused)
    share = f"{len(broken)} ({100 * len(broken) / max(1, len(promised)):.1f} % of promised)"
    speed = [f"{good / span_s:.2f}" for good in goods]
    rows = [
        ("requests", str(len(untold)), str(len(told))),
        ("answered in time", *map(str, goods)),
        (
            "goodput, requests/s in time",
            speed[0],
            f"{speed[1]} ({goods[1] / max(1, goods[0]):.2f}x)",
        ),
        ("given up when the time was over", str(sum(o.outcome == "timeout" for o in untold)), "-"),
        ("promised", "-", str(len(promised))),
        ("promises broken", "-", share),
        ("accepted without a promise", "-", str(len(unpromised))),
        ("refused at once", "-", str(len(refused))),
    ]
    if verdicts:
        p99 = verdicts[min(len(verdicts) - 1, int(0.99 * len(verdicts)))]
        middle = statistics.median(verdicts)
        rows.append(("time of a refusal, median and p99, ms", "-", f"{middle:.0f}, {p99:.0f}"))
    odd = [o.outcome for o in (*told, *untold) if o.outcome not in ("ok", "refused", "timeout")]
    if odd:
        rows.append(("failed otherwise", "", f"{len(odd)}: {odd[0]}"))
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> None:
    """Measure both; print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--load", type=float, default=1.5, help="in times of what saturates it")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    dice = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace.jsonl"
        plain = ("--speculative-config", "off")  # a model of time has no drafts in it
        with server(flags.model, *plain) as port:
            alone_s = asyncio.run(alone(port, dice))
            say(f"alone a request takes {alone_s:.2f} s; saturating for {_SATURATING_S:.0f} s")
            rate_per_s = asyncio.run(saturate(port, dice))
            say(f"{rate_per_s:.2f} requests/s saturate it")
            plan, after_s = [], 0.0
            while (after_s := after_s + dice.expovariate(flags.load * rate_per_s)) < flags.seconds:
                total_s = dice.choice((_TIGHT, _LOOSE)) * alone_s
                plan.append(replace(new_request(dice, after_s), total_s=total_s))
            untold = [replace(one) for one in plan]
            asyncio.run(load(port, untold, is_told=False, name="without deadlines"))
        with server(flags.model, *plain, "--trace", str(trace)) as port:
            asyncio.run(learn(port, dice))
            asyncio.run(load(port, plan, is_told=True, name="with deadlines"))
        num_vain, num_replayed = in_vain(trace, plan, dice)
    tight_s, loose_s = _TIGHT * alone_s, _LOOSE * alone_s
    print(f"{flags.load:g} times what saturates the server ({rate_per_s:.2f} requests/s), ", end="")
    print(f"for {flags.seconds:g} s; deadlines of {tight_s:.2f} and {loose_s:.2f} s\n")
    print("| | deadlines not told | deadlines told |\n|---|---|---|")
    print("\n".join(table(plan, untold, flags.seconds)))
    print(f"| refused in vain, of those simulated again | - | {num_vain} of {num_replayed} |\n")
    counts = {
        "rate_per_s": rate_per_s,
        "alone_s": alone_s,
        "in_time": {
            "untold": sum(o.is_in_time for o in untold),
            "told": sum(o.is_in_time for o in plan),
        },
        "num_promised": sum(one.promise in ("kept", "broken") for one in plan),
        "num_broken": sum(one.promise == "broken" for one in plan),
        "num_refused": sum(one.outcome == "refused" for one in plan),
        "num_in_vain": num_vain,
        "num_replayed": num_replayed,
    }
    print(json.dumps(vars(flags) | counts))


if __name__ == "__main__":
    main()
