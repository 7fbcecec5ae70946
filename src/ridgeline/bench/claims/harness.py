"""Where techniques are compared: a stage runs a load with a setup, and tells what it took.

There are two: the real engine on this machine, and the scheduler under a virtual clock with the
constants of a device. Both keep the same records, from which a tally is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.core.records import Record, RequestRecord, StepRecord

_PROMPT_TOKENS_PER_S, _LEAST_TOKENS_PER_S = 512, 4  # FastGen's service level


class ClaimRequest(NamedTuple):
    """A request: its prompt, how long its answer is, and how long its client allows it to be."""

    prompt: tuple[int, ...]
    num_new: int
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVariant:
    """How an engine is set up: the flags of ``ridgeline``; None leaves one as it is.

    ``drafts`` are "off", a method, or as in ``simulate --drafts``; ``cache_tokens`` are what the
    cache holds of the usual format, where a device has more than loads can fill.
    """

    policy: str = "splitfuse"
    max_num_seqs: int = 256
    kv_reservation: str = "auto"
    enable_prefix_caching: bool = False
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    drafts: str = "off"
    cache_tokens: int | None = None


class RunCounts(NamedTuple):
    """What a run took.

    Attributes:
        seconds: from the first arrival to the last end.
        num_tokens: generated.
        num_steps: of the engine.
        num_rows: tokens that went through the layers.
        num_seqs: in a step, in the mean.
        step_s: seconds of a step, in the mean.
        tail_s: seconds of a token of an answer, that 95 % of the answers do not exceed.
        served_well: the share of requests within FastGen's service level: a first token within a
            second for each 512 tokens of the prompt, and then four a second at least.
        rate_per_s: of arrivals, where that was looked for.
    """

    seconds: float
    num_tokens: int
    num_steps: int
    num_rows: int
    num_seqs: float
    step_s: float
    tail_s: float
    served_well: float
    rate_per_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second."""
        return self.num_tokens / self.seconds


class LoadSizes(NamedTuple):
    """How large loads are, so that all of them together fit the time.

    Attributes:
        num_requests: of a load of many.
        prompts: shortest and longest prompt of it.
        mean_new, most_new: tokens of its answers: the mean, and what clients allow.
        one: prompt and answer of a load of one stream.
        cache_tokens: what the cache holds where it is to be scarce; None for what the device has.
        shared: tokens that prompts share, and those that they do not.
        batches: numbers of streams, rising.
        long_prompt: of which attention is looked at alone.
        long_load: of requests with long prompts: their number, and tokens of both in the mean.
        weights: formats in 16 bits, 8 and 4.
        caches: formats of keys and values, the wide one first.
    """

    num_requests: int
    prompts: tuple[int, int]
    mean_new: int
    most_new: int
    one: tuple[int, int]
    cache_tokens: int | None
    shared: tuple[int, int]
    batches: tuple[int, ...]
    long_prompt: int
    long_load: tuple[int, int, int]
    weights: tuple[str, str, str]
    caches: tuple[str, str]


class Harness(Protocol):
    """Where loads run: an engine on this machine, or a scheduler under a virtual clock."""

    @property
    def name(self) -> str:
        """Of the machine."""

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def rounds(self) -> int:
        """How often both sides of a technique run, in turn."""

    @property
    def sizes(self) -> LoadSizes:
        """How large loads are."""

    @property
    def is_real(self) -> bool:
        """Whether a model computes; else only its time passes."""

    @property
    def num_heads(self) -> int:
        """Query heads of all layers together, on one device."""

    @property
    def read_bytes_per_s(self) -> float:
        """Of the device's memory; 0 where it was not measured."""

    @property
    def usd_per_hour(self) -> float | None:
        """What the device costs; None if that is not known."""

    def prompt(self, num_tokens: int, seed: str) -> tuple[int, ...]:
        """Return random token ids."""

    def repeating_prompt(self) -> tuple[int, ...]:
        """Return the ids of a text that its answer repeats."""

    def run(
        self, load: Sequence[ClaimRequest], variant: EngineVariant, *, in_turn: bool = False
    ) -> RunCounts:
        """Serve a load to its end; ``in_turn`` one after the other."""


def counted(records: Sequence[Record]) -> RunCounts:
    """Count what records tell of a run. Raises ValueError if a request failed."""
    steps = [one for one in records if isinstance(one, StepRecord) and one.work]
    ended = [one for one in records if isinstance(one, RequestRecord)]
    if errors := [one.error for one in ended if one.error]:
        raise ValueError(f"{len(errors)} of {len(ended)} requests failed: {errors[0]}")
    num_tokens = [sum(one.num_generated) for one in ended]
    token_s = sorted(
        (one.finish_s - one.first_token_s) / (num - 1)
        for one, num in zip(ended, num_tokens, strict=True)
        if one.first_token_s is not None and num > 1
    )
    begin_s = min(one.arrival_s for one in ended)
    return RunCounts(
        seconds=max(one.finish_s for one in ended) - begin_s,
        num_tokens=sum(num_tokens),
        num_steps=len(steps),
        num_rows=sum(count for one in steps for _, _, count in one.work),
        num_seqs=sum(len(one.work) for one in steps) / len(steps),
        step_s=sum(one.duration_s for one in steps) / len(steps),
        tail_s=token_s[int(0.95 * len(token_s))] if token_s else 0.0,
        served_well=sum(map(_is_served_well, ended)) / len(ended),
    )


def _is_served_well(one: RequestRecord) -> bool:
    if one.first_token_s is None:
        return False
    first_s, rest_s = one.first_token_s - one.arrival_s, one.finish_s - one.first_token_s
    is_soon = first_s <= len(one.prompt_token_ids) / _PROMPT_TOKENS_PER_S
    return is_soon and sum(one.num_generated) - 1 >= _LEAST_TOKENS_PER_S * rest_s
