"""The load that a plan is for: what comes, when, and within which times it must be answered.

The flags are those of ``bench serve`` where they mean the same. A seed that is fixed repeats every
draw, so a plan is a function of what was asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import NamedTuple

from ridgeline.engine.setup.options import flag_field
from ridgeline.foresight.explain import METRICS
from ridgeline.foresight.simulator.run import SimRequest
from ridgeline.foresight.simulator.workload import (
    Traced,
    gamma_arrivals,
    lognormal_lengths,
    parse_length,
    parse_trace,
)
from ridgeline.planner.memory.flags import AUTO

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_MOST_REPLICAS = 4096
# What a purchase is planned for unless more is said: a chat that writes as fast as people read.
BOUGHT_FOR = {"prompt_tokens": "1000", "new_tokens": "300"}
DEFAULT_PURCHASE_SLO = ("ttft:p95:5000", "tpot:mean:100")
_NOTHING = "--slo is METRIC:PERCENTILE:MILLISECONDS, such as ttft:p95:500"


class Slo(NamedTuple):
    """A bound on a latency.

    Attributes:
        metric: ttft, tpot or e2el, as in ``bench serve --goodput``.
        percentile: p50, p90, p95, p99, or mean.
        limit_ms: what it must not exceed.
    """

    metric: str
    percentile: str
    limit_ms: float

    @property
    def name(self) -> str:
        """Return it as people type it, without the limit."""
        return f"{self.metric}:{self.percentile}"


def parse_slo(text: str) -> Slo:
    """Read ``ttft:p95:500``. Raises ValueError, which says what there is."""
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"{text!r}: {_NOTHING}")
    metric, percentile, limit = parts
    if metric not in METRICS:
        raise ValueError(f"{text!r}: {metric!r} is not one of {', '.join(METRICS)}; {_NOTHING}")
    if percentile not in (*PERCENTILES, "mean"):
        raise ValueError(
            f"{text!r}: {percentile!r} is not one of {', '.join(PERCENTILES)}, mean; {_NOTHING}"
        )
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = math.nan
    if not 0 < limit_ms < math.inf:
        raise ValueError(f"{text!r}: {limit!r} is not a number of milliseconds above 0; {_NOTHING}")
    return Slo(metric, percentile, limit_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The flags of ``plan`` that describe a load, and what may be chosen for it."""

    prompt_tokens: str | None = flag_field(
        None,
        "Tokens of a prompt: 800, or 800:0.5 for a lognormal with that coefficient of variation.",
    )
    new_tokens: str | None = flag_field(None, "Tokens of an answer: 150, or 150:0.5.")
    request_rate: float | None = flag_field(
        None, "Requests per second. With --trace-file, its times are stretched to this rate."
    )
    burstiness: float = flag_field(
        1.0, "Burstiness of arrivals (gamma shape): 1 is a Poisson process, inf is even."
    )
    max_concurrency: int | None = flag_field(
        None, "Number of clients that each ask again as soon as they are answered. Default: 1, if "
            "nothing says how requests arrive.",
    )  # fmt: skip
    trace_file: str | None = flag_field(
        None,
        "Trace with times and lengths of requests: Azure, BurstGPT, Mooncake, or from serve "
        "--trace.",
        typed="path",
    )
    slo: tuple[str, ...] = flag_field(
        (), "A latency bound; repeatable: ttft, tpot or e2el, a percentile (p50, p90, p95, p99 or "
            "mean) and milliseconds, such as ttft:p95:500.", typed="texts",
    )  # fmt: skip
    replicas: str = flag_field(
        AUTO, "Number of replicas of the model, or auto: as few as possible."
    )
    spot: bool = flag_field(False, "Also plan for spot machines, which can be taken away.")
    evictions_per_hour: float | None = flag_field(
        None, "How often a spot machine is taken away. Default: by provider, else 0.05, assumed."
    )
    notice: float | None = flag_field(
        None,
        "Seconds of notice before a spot machine is taken away. Default: by provider, else "
        "30, assumed.",
    )
    prices: str | None = flag_field(
        None, "A CSV file of prices, instead of the catalogue's: device,provider,region,kind,"
        "usd_per_hour,date,source,confidence.",
    )  # fmt: skip
    max_usd_per_hour: float | None = flag_field(None, "Leave out choices that cost more.")
    buy: bool = flag_field(
        False, "Say what to buy, instead of what to rent: the machine with the lowest total cost.",
    )  # fmt: skip
    users: int | None = flag_field(
        None,
        "With --buy: people who ask at the same time, and again as soon as they are answered. "
        "Default: 1.",
    )
    usd_per_kwh: float = flag_field(0.25, "With --buy: price of electricity.")
    years: float = flag_field(3.0, "With --buy: years of use.")
    hours_per_day: float = flag_field(8.0, "With --buy: hours of use per day.")

    def __post_init__(self) -> None:
        """Raise ValueError, which names the flag, for values that make no sense."""
        object.__setattr__(self, "slo", tuple(self.slo))  # a command line makes lists
        self._complete_buying()
        if self.request_rate is not None and self.max_concurrency is not None:
            raise ValueError(
                "say how requests arrive: by --request-rate or --trace-file, or in a closed loop "
                "by --max-concurrency, not by both"
            )
        if self.trace_file is not None and (self.prompt_tokens or self.new_tokens):
            raise ValueError("--trace-file says how long requests are: give no other lengths")
        if self.trace_file is not None and self.max_concurrency is not None:
            raise ValueError("--trace-file says when requests come: give no --max-concurrency")
        positive = ("request_rate", "burstiness", "max_usd_per_hour", "evictions_per_hour")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not (value > 0 and (value < math.inf or name == positive[1])):
                raise ValueError(f"{_flag(name)} is {value!r}: it must be above 0")
        if self.notice is not None and not 0 <= self.notice < math.inf:
            raise ValueError(f"--notice is {self.notice!r}: it must be at least 0 seconds")
        concurrency = self.max_concurrency
        if concurrency is not None and not 1 <= concurrency <= 1 << 20:
            raise ValueError(
                f"--max-concurrency is {concurrency!r}: it must be a whole number of at least 1"
            )
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(self, name) is not None:
                parse_length(getattr(self, name), name)
        if self.replicas != AUTO and not (
            str(self.replicas).isdecimal() and 1 <= int(self.replicas) <= _MOST_REPLICAS
        ):
            raise ValueError(f"--replicas is {self.replicas!r}: it must be a whole number or auto")
        for text in self.slo:
            parse_slo(text)
        self._check_alone()
        if self.is_given and self.trace_file is None and not (
            self.prompt_tokens and self.new_tokens
        ):  # fmt: skip
            raise ValueError(
                "a plan for a load needs lengths: --prompt-tokens and --new-tokens, or --trace-file"
            )

    def _check_alone(self) -> None:
        """Raise ValueError for a flag that says nothing without another one."""
        if self.burstiness != 1 and (self.request_rate is None or self.trace_file is not None):
            raise ValueError(
                "--burstiness is about requests at a rate: give --request-rate, and no trace"
            )
        needs = {"spot": ("evictions_per_hour", "notice"),
                 "buy": ("usd_per_kwh", "years", "hours_per_day")}  # fmt: skip
        for flag in fields(self):
            for needed, names in needs.items():
                if flag.name not in names or getattr(self, needed):
                    continue
                if getattr(self, flag.name) != flag.default:
                    raise ValueError(f"{_flag(flag.name)} needs --{needed}")

    def _complete_buying(self) -> None:
        """Fill in what a purchase is planned for unless more is said; raise ValueError as above."""
        for name in ("usd_per_kwh", "years", "hours_per_day"):
            most = 24.0 if name == "hours_per_day" else 1e3
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ValueError(f"{_flag(name)} is {value!r}: it must be at most {most:g}")
        if not self.buy:
            if self.users is not None:
                raise ValueError("--users needs --buy: without it, give --max-concurrency")
            return
        for name in ("spot", "prices"):
            if getattr(self, name):
                raise ValueError(f"{_flag(name)} is for renting and cannot be used with --buy")
        if self.users is not None and not 1 <= self.users <= 1 << 20:
            raise ValueError(f"--users is {self.users!r}: it must be a whole number of at least 1")
        arrivals = (self.request_rate, self.max_concurrency, self.trace_file)
        if self.users is not None and arrivals not in (3 * (None,), (None, self.users, None)):
            raise ValueError("--users already says how requests arrive: give no rate or trace")
        if all(one is None for one in arrivals):
            object.__setattr__(self, "max_concurrency", self.users or 1)
        if self.trace_file is None:
            for name, usual in BOUGHT_FOR.items():
                object.__setattr__(self, name, getattr(self, name) or usual)
        object.__setattr__(self, "slo", self.slo or DEFAULT_PURCHASE_SLO)

    @property
    def is_given(self) -> bool:
        """Whether any flag asks for more than memory."""
        return any(getattr(self, flag.name) != flag.default for flag in fields(self))

    def slos(self) -> tuple[Slo, ...]:
        """Return the bounds."""
        return tuple(parse_slo(text) for text in self.slo)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, eq=False)
class OfferedLoad:
    """What comes.

    Attributes:
        rate_per_s: requests per second, over all replicas; None in a closed loop.
        concurrency: clients of a closed loop; None where there is a rate.
        burstiness: gamma shape of arrivals.
        lengths: (prompt, answer) of requests, in order; they are repeated as needed.
        arrivals_s: of a trace, stretched to the rate; empty where they are drawn.
    """

    rate_per_s: float | None
    concurrency: int | None
    burstiness: float
    lengths: tuple[tuple[int, int], ...]
    arrivals_s: tuple[float, ...] = ()

    @cached_property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, in the mean."""
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @cached_property
    def mean_new(self) -> float:
        """Tokens of an answer, in the mean."""
        return sum(new for _, new in self.lengths) / len(self.lengths)

    @cached_property
    def prompt_variation(self) -> float:
        """Standard deviation of prompts over their mean."""
        mean = self.mean_prompt
        squares = sum((prompt - mean) ** 2 for prompt, _ in self.lengths) / len(self.lengths)
        return math.sqrt(squares) / mean

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(prompt + new for prompt, new in self.lengths)

    def cut(self, most: int) -> OfferedLoad:
        """Return the load with no request of more tokens: answers end there, prompts before."""
        lengths = (
            (min(prompt, most - 1), max(1, min(new, most - prompt))) for prompt, new in self.lengths
        )
        return replace(self, lengths=tuple(lengths))

    def share(self, num_replicas: int, num: int, *, is_read: bool = True) -> list[SimRequest]:
        """Return ``num`` requests as one of the replicas gets them.

        Of a trace it is every so-manieth request; drawn arrivals are as bursty for each replica as
        for all. No prompt is like another, so no cache finds it.
        """
        if self.arrivals_s:
            taken = range(0, len(self.arrivals_s), num_replicas)[:num]
            at_s: Sequence[float | None] = [self.arrivals_s[i] for i in taken]
        else:
            taken = range(num)
            at_s = [None] * num
            if self.rate_per_s is not None:
                rate, rng = self.rate_per_s / num_replicas, Random("arrivals")
                at_s = gamma_arrivals(num, rate, self.burstiness, rng)
        return [
            SimRequest(prompt=(i,) * prompt, num_new=(new,), arrival_s=arrival_s, is_read=is_read)
            for i, arrival_s in zip(taken, at_s, strict=True)
            for prompt, new in (self.lengths[i % len(self.lengths)],)
        ]


_NUM_LENGTHS = 4096  # drawn; then they come again


def load_of(flags: LoadFlags) -> OfferedLoad:
    """Return the load that flags describe, with all lengths drawn.

    Raises ValueError, with file, line and field, for a damaged trace, and OSError.
    """
    if flags.trace_file is not None:
        text = Path(flags.trace_file).read_text(encoding="utf-8")
        return _of_trace(parse_trace(text, str(flags.trace_file)).requests, flags)
    prompts, answers = (
        lognormal_lengths(getattr(flags, name) or "1", name, _NUM_LENGTHS, Random(name))
        for name in ("prompt_tokens", "new_tokens")
    )
    is_closed = flags.request_rate is None
    return OfferedLoad(
        flags.request_rate,
        (flags.max_concurrency or 1) if is_closed else None,
        flags.burstiness,
        tuple(zip(prompts, answers, strict=True)),
    )


def _of_trace(requests: Sequence[Traced], flags: LoadFlags) -> OfferedLoad:
    start_s, span_s = requests[0].arrival_s, requests[-1].arrival_s - requests[0].arrival_s
    if not span_s:
        raise ValueError(f"{flags.trace_file}: all requests arrive at once, so there is no rate")
    rate = flags.request_rate or (len(requests) - 1) / span_s
    stretch = (len(requests) - 1) / (span_s * rate)
    return OfferedLoad(
        rate,
        None,
        flags.burstiness,
        tuple((one.num_prompt_tokens, one.num_answer_tokens) for one in requests),
        tuple(stretch * (one.arrival_s - start_s) for one in requests),
    )
