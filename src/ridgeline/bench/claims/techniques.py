"""The techniques: for each the load on which it is off and on, in turn, and what limits it.

``CLAIMS`` are what papers say that they bring. Each is described once, for the real engine and for
the virtual clock. What a technique brings is a factor; why it is not the paper's follows from
counts: how many steps there are, how long one takes, how many sequences share it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import NamedTuple

from ridgeline.bench.claims.harness import ClaimRequest, EngineVariant, Harness, RunCounts
from ridgeline.system.report import figure

_STATIC = 8  # sequences of a batch that is filled and run to its end
_BUSY = 0.7  # of what can be served: where the tail of a token is looked at
_SERVED_WELL, _NEAR = 0.95, 0.03  # where a rate holds, and how near it is found
_VALUE_BYTES = 2  # of a score of attention, in memory
_PASSES = 4  # scores are written, read by softmax, written again and read again (Dao et al.)


class Claim(NamedTuple):
    """A figure of a paper.

    Attributes:
        text: the figure as it is cited.
        low, high: the factor; equal where it is one number.
        paper: who says it, and when.
        setting: of what system, in a few words.
    """

    text: str
    low: float
    high: float
    paper: str
    setting: str


CLAIMS = {
    "iteration-level batching": Claim(
        "36.9x", 36.9, 36.9, "Yu et al., Orca, 2022",
        "the rate at equal latency, 175B over pipelines, against other kernels",
    ),
    "continuous batching": Claim(
        "23x", 23, 23, "Daniel et al., Anyscale, 2023",
        "13B on an A100 against static batches of another server",
    ),
    "paged KV cache": Claim(
        "2-4x", 2, 4, "Kwon et al., vLLM, 2023", "13B to 175B on A100s against reservation"
    ),
    "prompts in pieces": Claim(
        "2.3x", 2.3, 2.3, "Holmes et al., FastGen, 2024", "the rate at a service level, 70B"
    ),
    "tail of a token": Claim(
        "3.7x", 3.7, 3.7, "Holmes et al., FastGen, 2024", "the tail of a token's time, 70B"
    ),
    "prefix cache": Claim(
        "up to 6.4x", 1, 6.4, "Zheng et al., SGLang, 2024", "programs that share most of a prompt"
    ),
    "drafts": Claim(
        "2-3x", 2, 3, "Leviathan et al., 2023", "a small model drafts for one stream of T5-XXL"
    ),
    "lookahead": Claim(
        "1.5-2.3x", 1.5, 2.3, "Fu et al., 2024", "one stream on an A100, many guesses in a step"
    ),
    "weights in 4 bits": Claim(
        "2.7-3.9x", 2.7, 3.9, "Lin et al., AWQ, 2024", "one stream on a GPU, against 16 bits"
    ),
    "KV cache in fewer bits": Claim(
        "2.4-3.5x", 2.35, 3.47, "Liu et al., KIVI, 2024", "larger batches, with 2 bits"
    ),
    "attention in tiles": Claim(
        "2-4x", 2, 4, "Dao et al., FlashAttention, 2022", "attention alone, on an A100"
    ),
}  # fmt: skip


class Side(NamedTuple):
    """One of two ways that are compared: what it is called, its flags, and what it runs."""

    name: str
    flags: str
    run: Callable[[], RunCounts]


@dataclass(frozen=True)
class Technique:
    """A technique, off and on.

    Attributes:
        name: as in ``CLAIMS``, or another.
        off, on: the two sides.
        value: what is compared, of a tally; more is better.
        unit: of the value.
        why: what limits it here, of both tallies.
        claim: the paper's figure, if there is one.
    """

    name: str
    off: Side
    on: Side
    why: Callable[[RunCounts, RunCounts], str]
    claim: Claim | None
    value: Callable[[RunCounts], float] = field(default=lambda counts: counts.tokens_per_s)
    unit: str = "tokens/s"


def _steps(off: RunCounts, on: RunCounts) -> str:
    """Say by steps why one way is faster than another."""
    return (
        f"steps {off.num_steps:,} -> {on.num_steps:,}, each {on.step_s / off.step_s:.2g} times as "
        f"long; {off.num_seqs:.1f} -> {on.num_seqs:.1f} sequences in each"
    )


def _rows(off: RunCounts, on: RunCounts) -> str:
    return (
        f"tokens through the layers {off.num_rows:,} -> {on.num_rows:,} "
        f"({off.num_rows / on.num_rows:.1f} times fewer), but each step still reads all weights"
    )


def _read(off: RunCounts, on: RunCounts) -> str:
    return (
        f"a step {figure(1e3 * off.step_s)} -> {figure(1e3 * on.step_s)} ms: only the weights "
        "become smaller, not the cache, the arithmetic and what a step costs by itself"
    )


def _room(off: RunCounts, on: RunCounts) -> str:
    """Say why fewer bits of the cache help: more sequences have room, and less is read."""
    said = _steps(off, on)
    return f"{said}: all had room before" if off.num_seqs == on.num_seqs else said


def _guessed(off: RunCounts, on: RunCounts) -> str:
    return (
        f"{on.num_tokens / on.num_steps:.2f} tokens a step instead of "
        f"{off.num_tokens / off.num_steps:.2f}; a step takes {on.step_s / off.step_s:.2f} times "
        "as long with drafts"
    )


def _assumed(off: RunCounts, on: RunCounts) -> str:
    said = _guessed(off, on)
    return f"{said}; it is assumed that 0.6 are right, and the time of drafting is left out"


def _repeating(off: RunCounts, on: RunCounts) -> str:
    return f"{_guessed(off, on)}; this text repeats itself, and others gain less"


def _tails(off: RunCounts, on: RunCounts) -> str:
    return (
        f"the slowest 5 % of answers take {figure(1e3 * off.tail_s)} -> {figure(1e3 * on.tail_s)} "
        "ms a token or more"
    )


def _rates(off: RunCounts, on: RunCounts) -> str:
    return (
        f"{figure(off.rate_per_s)} -> {figure(on.rate_per_s)} requests/s; a step "
        f"{figure(1e3 * off.step_s)} -> {figure(1e3 * on.step_s)} ms; both are limited by "
        "arithmetic"
    )


def techniques(harness: Harness) -> Iterator[Technique]:
    """Yield all techniques that a stage can compare."""
    yield from _of_batching(harness)
    yield from _of_prompts(harness)
    yield from _of_guessing(harness)
    yield from _of_formats(harness)


def _many(harness: Harness) -> list[ClaimRequest]:
    """Return a load of many requests whose clients do not know how long their answers will be."""
    sizes, rng = harness.sizes, Random("many")
    load = []
    for i in range(sizes.num_requests):
        num_new = min(sizes.most_new, 1 + int(rng.expovariate(1 / sizes.mean_new)))
        prompt = harness.prompt(rng.randint(*sizes.prompts), f"many {i}")
        load.append(ClaimRequest(prompt, num_new, sizes.most_new))
    return load


def _of_batching(harness: Harness) -> Iterator[Technique]:
    load, sizes = _many(harness), harness.sizes

    def side(name: str, policy: str, reserve: str, most: int | None = None) -> Side:
        flags = f"--policy {policy} --kv-reservation {reserve}"
        variant = EngineVariant(
            policy=policy,
            kv_reservation=reserve,
            max_num_seqs=most or 256,
            cache_tokens=sizes.cache_tokens,
        )
        flags += f" --max-num-seqs {most}" if most else ""
        if not harness.is_real:  # as `ridgeline simulate` takes it; clients of a server just stop
            flags += f" --max-tokens {sizes.most_new} --answer-tokens {sizes.mean_new}:1"
        return Side(name, flags, lambda: harness.run(load, variant))

    num_prompt, num_new = sizes.one
    prompt = harness.prompt(num_prompt, "one")
    one = [ClaimRequest(prompt, num_new, num_new)]
    longer = [ClaimRequest(prompt + harness.prompt(i, "more"), 1, 1) for i in range(num_new)]
    yield Technique(
        "KV cache",
        Side(
            "recompute",
            "max_tokens=1, again",
            lambda: harness.run(longer, EngineVariant(), in_turn=True),
        ),
        Side("cached", "(always)", lambda: harness.run(one, EngineVariant())),
        _rows,
        None,
    )
    static = side("static", "static", "full")
    orca, paged = side("orca", "orca", "full"), side("orca, paged", "orca", "paged")
    few = side(f"static, {_STATIC}", "static", "full", _STATIC)
    all_of_it = side("splitfuse", "splitfuse", "paged")
    for name, off, on in (
        ("iteration-level batching", static, orca),
        ("paged KV cache", orca, paged),
        ("continuous batching", few, all_of_it),
    ):
        yield Technique(name, off, on, _steps, CLAIMS[name])


def _of_prompts(harness: Harness) -> Iterator[Technique]:
    sizes = harness.sizes
    load = _long(harness)
    whole, pieces = EngineVariant(policy="orca", kv_reservation="paged"), EngineVariant()
    most_per_s: list[float] = []  # found by the first that runs, and the same for both

    def busy(variant: EngineVariant) -> RunCounts:
        if not most_per_s:
            most_per_s.append(len(load) / harness.run(load, variant).seconds)
        return harness.run(_arriving(load, _BUSY * most_per_s[0]), variant)

    flags = "--policy orca --kv-reservation paged", "--policy splitfuse"
    yield Technique(
        "prompts in pieces: tail",
        Side("whole", flags[0], lambda: busy(whole)),
        Side("pieces", flags[1], lambda: busy(pieces)),
        _tails,
        CLAIMS["tail of a token"],
        value=lambda counts: 1 / counts.tail_s,
        unit="tokens/s of the slowest 5 %",
    )
    if not harness.is_real:  # finding a rate takes many runs
        yield Technique(
            "prompts in pieces: rate",
            Side("whole", flags[0], lambda: _highest_rate(harness, load, whole)),
            Side("pieces", flags[1], lambda: _highest_rate(harness, load, pieces)),
            _rates,
            CLAIMS["prompts in pieces"],
            value=lambda counts: counts.rate_per_s,
            unit="requests/s",
        )
    num_shared, num_own = sizes.shared
    runs = count()

    def in_turn(variant: EngineVariant) -> RunCounts:
        seed = f"run {next(runs)}"  # new texts for each run: a cache knows those of the last
        shared = harness.prompt(num_shared, seed)
        owns = (harness.prompt(num_own, f"{seed}, {i}") for i in range(sizes.num_requests))
        return harness.run(
            [ClaimRequest(shared + own, 8, 8) for own in owns], variant, in_turn=True
        )

    yield Technique(
        "prefix cache",
        Side("off", "--no-enable-prefix-caching", lambda: in_turn(EngineVariant())),
        Side(
            "on",
            "--enable-prefix-caching",
            lambda: in_turn(EngineVariant(enable_prefix_caching=True)),
        ),
        _rows,
        CLAIMS["prefix cache"],
    )


def _long(harness: Harness) -> list[ClaimRequest]:
    """Return a load of long prompts and short answers, as FastGen's."""
    num, num_prompt, num_new = harness.sizes.long_load
    rng, load = Random("long"), []
    for i in range(num):
        prompt, new = (max(4, int(rng.gauss(mean, 0.3 * mean))) for mean in (num_prompt, num_new))
        load.append(ClaimRequest(harness.prompt(prompt, f"long {i}"), new, new))
    return load


def _arriving(load: Sequence[ClaimRequest], rate_per_s: float) -> list[ClaimRequest]:
    """Return a load with Poisson arrivals."""
    rng, at_s, arriving = Random("arrivals"), 0.0, []
    for one in load:
        at_s += rng.expovariate(rate_per_s)
        arriving.append(one._replace(arrival_s=at_s))
    return arriving


def _highest_rate(
    harness: Harness, load: Sequence[ClaimRequest], variant: EngineVariant
) -> RunCounts:
    """Return the run with the highest rate at which 95 % are served well, to 3 %."""
    best = harness.run(load, variant)
    low, high = 0.0, 2 * len(load) / best.seconds
    while high - low > _NEAR * high:
        middle = (low + high) / 2
        counts = harness.run(_arriving(load, middle), variant)
        if counts.served_well >= _SERVED_WELL:
            low, best = middle, counts
        else:
            high = middle
    return best._replace(rate_per_s=low)


def _of_guessing(harness: Harness) -> Iterator[Technique]:
    num_new = 3 * harness.sizes.one[1]
    load = [ClaimRequest(harness.repeating_prompt(), num_new, num_new)]
    off = Side("off", "--speculative-config off", lambda: harness.run(load, EngineVariant()))
    kinds = {"drafts": "ngram", "lookahead": "lookahead"}
    for name, kind in kinds.items() if harness.is_real else [("drafts", "4:0.6")]:
        flag = "--speculative-config" if harness.is_real else "--drafts"
        on = Side(kind, f"{flag} {kind}", partial(harness.run, load, EngineVariant(drafts=kind)))
        why = _repeating if harness.is_real else _assumed
        yield Technique(name, off, on, why, CLAIMS[name])


def _of_formats(harness: Harness) -> Iterator[Technique]:
    num_prompt, num_new = harness.sizes.one
    prompt = harness.prompt(num_prompt, "one")
    one = [ClaimRequest(prompt, num_new, num_new)]
    wide, eight, four = harness.sizes.weights

    def side(dtype: str) -> Side:
        return Side(dtype, f"--dtype {dtype}", lambda: harness.run(one, EngineVariant(dtype=dtype)))

    yield Technique("weights in 8 bits", side(wide), side(eight), _read, None)
    name = "weights in 4 bits"
    yield Technique(name, side(wide), side(four), _read, CLAIMS[name])
    many = _many(harness)

    def cached(dtype: str) -> Side:
        variant = EngineVariant(kv_cache_dtype=dtype, cache_tokens=harness.sizes.cache_tokens)
        return Side(dtype, f"--kv-cache-dtype {dtype}", lambda: harness.run(many, variant))

    name = "KV cache in fewer bits"
    wide, narrow = harness.sizes.caches
    yield Technique(name, cached(wide), cached(narrow), _room, CLAIMS[name])
    if harness.read_bytes_per_s:
        yield _tiles(harness)


def _tiles(harness: Harness) -> Technique:
    """Return attention with and without scores in memory: a prompt that ran, and a sum.

    No engine here can write scores to memory, so what that would take is added.
    """
    num = harness.sizes.long_prompt
    load = [ClaimRequest(harness.prompt(num, "long"), 1, 1)]
    score_bytes = _PASSES * _VALUE_BYTES * harness.num_heads * num * num
    more_s = score_bytes / harness.read_bytes_per_s

    def untiled() -> RunCounts:
        counts = harness.run(load, EngineVariant())
        return counts._replace(seconds=counts.seconds + more_s, step_s=counts.step_s + more_s)

    def why(off: RunCounts, on: RunCounts) -> str:
        return (
            f"calculated: {figure(score_bytes / 1e9)} GB of scores of a prompt of {num:,} are not "
            f"written and read, {figure(1e3 * more_s)} ms of {figure(1e3 * off.seconds)} for the "
            "whole prompt, most of which is products"
        )

    return Technique(
        "attention in tiles",
        Side("scores in memory", "(calculated)", untiled),
        Side("tiles", "(always)", lambda: harness.run(load, EngineVariant())),
        why,
        CLAIMS["attention in tiles"],
    )


@dataclass(frozen=True)
class Comparison:
    """What a technique brought: values of both sides, one of each round."""

    technique: Technique
    off: Sequence[RunCounts]
    on: Sequence[RunCounts]

    @property
    def factors(self) -> list[float]:
        """The factor of each round."""
        value = self.technique.value
        return [value(on) / value(off) for off, on in zip(self.off, self.on, strict=True)]

    @property
    def factor(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.factors)

    @property
    def why(self) -> str:
        """What limits it here, and what the paper measured."""
        claim = self.technique.claim
        said = f" (the paper: {claim.setting})" if claim else ""
        return self.technique.why(self.off[-1], self.on[-1]) + said


class BatchSize(NamedTuple):
    """What a number of streams at once brings, and costs."""

    num_streams: int
    tokens_per_s: float
    token_s: float
    usd_per_million: float | None


def batch_sizes(harness: Harness) -> Iterator[BatchSize]:
    """Yield throughput, latency and cost of rising numbers of streams."""
    num_prompt, num_new = harness.sizes.one
    for num in harness.sizes.batches:
        each = (harness.prompt(num_prompt // 4, f"batch {i}") for i in range(num))
        counts = harness.run(
            [ClaimRequest(prompt, num_new, num_new) for prompt in each], EngineVariant()
        )
        usd = harness.usd_per_hour
        cost = None if usd is None else usd / 3600 / (num / counts.tail_s) * 1e6
        yield BatchSize(num, num / counts.tail_s, counts.tail_s, cost)
