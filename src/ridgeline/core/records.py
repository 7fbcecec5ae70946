"""What happened, in numbers: one record per engine, per request and per step.

Metrics, ``--trace``, explanations and simulations all read these. Together they are enough to
replay every decision: feed the arrivals of each step to a fresh scheduler, answer its steps with
the recorded tokens, and it decides the same again. Times are seconds of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.core.step import SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """How the engine was set up.

    ``num_checkpoints`` are of states, None for models without; ``windows`` are those of the cache,
    one for each group of layers, None where nothing falls out of it. The last two are the policy's.
    """

    policy: str
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_prefix_caching: bool
    seed: int
    eos_ids: tuple[int, ...]
    num_checkpoints: int | None = None
    windows: tuple[int | None, ...] = (None,)
    looks_ahead: bool = False
    least_prompt_tokens: int = 64
    reserve_full: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, written when its last sequence ended.

    Attributes:
        request_id: counts from 0; step records name a request by it.
        name: what its client knows it by: ``x-request-id``, and the end of the answer's id.
        cache_root: hexadecimal; only requests with the same root share cached prefixes.
        adapter: digest of its adapter, hexadecimal: also the end of the root; empty for none.
        params: sampling parameters that differ from their defaults.
        arrival_s: when it was added.
        scheduled_s: when its first token was computed; None if it never ran.
        first_token_s: when its first answer token, or its vector, was there; None if none was.
        finish_s: when its last sequence ended.
        num_cached_tokens: prompt tokens that the first admission found in the prefix cache.
        num_preemptions: over all its sequences.
        num_generated: tokens per answer, without those from elsewhere.
        finish_reasons: per answer.
        num_drafts: how often drafts of one of its sequences were verified.
        num_draft_tokens, num_accepted_tokens: tokens that were verified, and the right ones.
        error: what went wrong, if something did.
        due_s: when it was to run at the latest; None if nothing was promised.
        owner: whose it was, for the shares of slots: the label of a key.
        answers: tokens that each answer had from elsewhere; empty if it began here.
        is_background: whether it gave way to others.
        pushed: prompts that wait before the engine are counted from 0 as they come: the number of
            the first that came with it, and its own. None where none wait, and in older traces.
    """

    request_id: int
    name: str
    cache_root: str
    prompt_token_ids: tuple[int, ...]
    params: Mapping[str, Any]
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finish_s: float
    num_cached_tokens: int
    num_preemptions: int
    num_generated: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    error: str | None
    due_s: float | None = None
    adapter: str = ""
    owner: str = ""
    answers: tuple[tuple[int, ...], ...] = ()
    is_background: bool = False
    pushed: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        number: counts from 0.
        start_s: when it was begun.
        schedule_s, execute_s, commit_s: durations of its three parts.
        arrived, aborted, paused, resumed: requests, since the step before, and in this order.
        work: (sequence, first position, number of tokens) of each item.
        drafts: sequences with drafts, and which; these are the last of their tokens in ``work``.
        sampled: tokens sampled for each item, () for one that failed; empty if the backend failed
            and all starts again. Of an item with drafts, those that follow from right ones.
        ranked: beams, with the likeliest tokens behind each and their log-probabilities.
        similarities: of such beams in a contrastive search, how like the text before each is.
        errors: sequences that ended here because their item failed, and why.
        admitted: sequences that began to run, with the length of their cached prefix.
        preempted: sequences whose blocks were taken.
        waits: live sequences that did not run, and why.
        num_copies: blocks copied on write.
        num_running: sequences that hold blocks, after scheduling.
        num_waiting: sequences that do not.
        num_outside: prompts that waited before the engine, as its policy was told.
        is_read: whether a client read an answer while it grew, as its policy was told.
        blocks_used: blocks with a holder, after scheduling.
        blocks_indexed: blocks, held or free, whose content a new prompt can share.
        num_pushed: prompts that had come when it was chosen who enters before this step; None where
            none wait before the engine, and in older traces.
        num_permitted: how many of them might then enter beside promises; None for all.
        gives_way: whether the background was then to rest.
        num_since: how many of ``arrived``, ``aborted``, ``paused`` and ``resumed`` came before that
            choice; behind them nothing was left to do, so no step was run.
    """

    number: int
    start_s: float
    schedule_s: float
    execute_s: float
    commit_s: float
    arrived: tuple[int, ...]
    aborted: tuple[int, ...]
    paused: tuple[int, ...]
    resumed: tuple[int, ...]
    work: tuple[tuple[SeqId, int, int], ...]
    drafts: tuple[tuple[SeqId, tuple[int, ...]], ...]
    sampled: tuple[tuple[int, ...], ...]
    ranked: tuple[tuple[SeqId, tuple[tuple[int, float], ...]], ...]
    similarities: tuple[tuple[SeqId, float], ...]
    errors: tuple[tuple[SeqId, str], ...]
    admitted: tuple[tuple[SeqId, int], ...]
    preempted: tuple[SeqId, ...]
    waits: tuple[tuple[SeqId, str], ...]
    num_copies: int
    num_running: int
    num_waiting: int
    num_outside: int
    is_read: bool
    blocks_used: int
    blocks_indexed: int
    num_pushed: int | None = None
    num_permitted: int | None = None
    gives_way: bool = False
    num_since: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts in this step, but for prompts of which a single token is left."""
        guessing = dict(self.drafts)
        return sum(n for seq_id, _, n in self.work if n > 1 and seq_id not in guessing)

    @property
    def duration_s(self) -> float:
        """All of the step, in seconds."""
        return self.schedule_s + self.execute_s + self.commit_s

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.start_s + self.duration_s


Record = EngineRecord | RequestRecord | StepRecord
