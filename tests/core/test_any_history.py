"""Any sequence of adds, steps, aborts and failures, against a plain model of what must come out.

The model is what each sequence would say if it were served alone. The ledger verifies every read
of the cache on the way, ``Watched`` every step, and ``check`` every state in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from operator import eq
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ridgeline.core.cache.kvcache import KVCache, hash_block
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import Event, FinishReason, SeqId
from tests.core.harness import (
    POLICIES,
    Oracle,
    adapter,
    expected,
    finish,
    make_engine,
    make_request,
    make_scheduler,
)

MAX_LEN = 24
STOP_ID = 3

# Two letters in runs: equal prefixes, and so sharing, are the rule.
PROMPTS = st.lists(st.sampled_from([(0,), (1,), (0, 0, 0, 0), (0, 1, 0, 1)]), min_size=1).map(
    lambda runs: tuple(letter for run in runs for letter in run)[:16]
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, 8),
        "n": st.sampled_from((1, 1, 2, 3)),
        "stop_token_ids": st.sampled_from(((), (STOP_ID,))),
        "prompt_logprobs": st.sampled_from((None, None, None, 0)),
    }
) | st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, 8),
        "n": st.just(1),
        "best_of": st.integers(1, 3),
        "stop_token_ids": st.sampled_from(((), (STOP_ID,))),
        "use_beam_search": st.just(True),
        "early_stopping": st.sampled_from((True, False, "never")),
        "length_penalty": st.sampled_from((0.0, 1.0, 2.0)),
    }
)


def weak_hash(parent_key: bytes, tokens: tuple[int, ...]) -> bytes:
    return bytes([hash_block(parent_key, tokens)[0] & 3])


class Broken(Exception):
    """What a backend may raise."""


class Core(RuleBasedStateMachine):
    """An engine over the ledger, and what each of its sequences must say."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        block_size=st.integers(1, 16),
        longest=st.sampled_from((1, 1, 2, 3)),
        spare_blocks=st.integers(0, 6),
        seats=st.integers(1, 5),
        budget=st.integers(5, 40),
        caching=st.sampled_from((True, True, False)),
        weak=st.booleans(),
        accuracy=st.sampled_from((None, 0.0, 0.5, 0.9, 1.0)),
        checkpoints=st.sampled_from((None, None, 0, 1, 4)),
        windows=st.sampled_from(((None,), (None, None)))
        | st.lists(st.none() | st.integers(2, 12), min_size=1, max_size=3).map(tuple),
    )
    def start(
        self,
        policy: Policy,
        block_size: int,
        longest: int,
        spare_blocks: int,
        seats: int,
        budget: int,
        caching: bool,
        weak: bool,
        accuracy: float | None,
        checkpoints: int | None,
        windows: tuple[int | None, ...],
    ) -> None:
        if checkpoints is not None:  # states go with one group without a window
            windows = (None,)
        drafter = None if accuracy is None else Oracle(accuracy, random.Random(budget))
        budget = max(budget, MAX_LEN) if policy.whole_prompts else budget
        most = KVCache(0, block_size, windows=windows).most_blocks(MAX_LEN, budget)
        self.scheduler = make_scheduler(
            # Down to one longest request and no more.
            most * longest + spare_blocks,
            block_size,
            policy=policy,
            budget=budget,
            seats=seats,
            caching=caching,
            hash_block=weak_hash if weak else hash_block,
            speculation=Speculation(drafter) if drafter else None,
            checkpoints=checkpoints,
            every=4,
            windows=windows,
        )
        self.engine, self.runner = make_engine(self.scheduler, max_model_len=MAX_LEN)
        self.answers: dict[SeqId, list[int]] = {}  # what must be said
        self.reasons: dict[SeqId, FinishReason] = {}  # and why it ends
        self.said: dict[SeqId, list[int]] = {}
        self.ended: dict[SeqId, FinishReason] = {}
        self.cut_short: set[int] = set()  # requests that were aborted or failed
        self.resting: list[int] = []  # requests that were paused

    def hear(self, events: list[Event]) -> None:
        for event in events:
            assert event.seq_id not in self.ended, "news after the end"
            said_now = event.token is not None
            assert not (said_now and event.seq_id[0] in self.resting), "it should rest"
            said = self.said.setdefault(event.seq_id, [])
            answer = self.answers[event.seq_id]
            if event.token is not None:
                assert event.token == answer[len(said)]
                said.append(event.token)
            if event.finish_reason is not None:
                self.ended[event.seq_id] = event.finish_reason
            if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert said == answer
                assert event.finish_reason is self.reasons[event.seq_id]
            else:
                assert said != answer, "it should have ended"

    # --- what may happen -------------------------------------------------------------------------

    @rule(
        wish=REQUESTS,
        due_s=st.just(inf) | st.integers(0, 9),
        number=st.sampled_from((0, 0, 1, 2)),
        begun=st.just(()) | st.lists(st.integers(0, 8), min_size=3, max_size=3),
    )
    def add(
        self,
        wish: dict[str, Any],
        due_s: float = inf,
        number: int = 0,
        begun: Sequence[int] = (),
    ) -> None:
        """Add a request; with ``begun`` its answers have so many tokens from elsewhere."""
        params = {name: value for name, value in wish.items() if name != "prompt"}
        kv, width = self.scheduler.queues.kv, wish.get("best_of", 1)
        longest = min(len(wish["prompt"]) + wish["max_tokens"], MAX_LEN)
        need = kv.most_blocks(longest, self.scheduler.max_num_batched_tokens) * width
        if width > self.scheduler.queues.max_num_seqs or need > len(kv.pool.refs):
            with pytest.raises(ValueError, match=r"^best_of "):
                self.engine.add(wish["prompt"], SamplingParams(**params))
            return
        if begun := begun if "best_of" not in wish else ():
            params["seed"] = 5
        request = make_request(0, wish["prompt"], adapter=adapter(number), **params)
        alone = [*expected(request).values()] if begun else []
        before = tuple(tuple(answer[:num]) for answer, num in zip(alone, begun, strict=False))
        if all(map(eq, before, map(tuple, alone))):  # nothing would be left to say
            before = ()
        request_id = self.engine.add(
            wish["prompt"],
            SamplingParams(**params),
            adapter=adapter(number),
            due_s=due_s,
            answers=before,
        )
        answers = {(request_id, i): answer for i, answer in enumerate(alone)}
        answers = answers or expected(self.engine.requests[request_id])
        for seq_id, answer in answers.items():
            stopped = answer[-1] in wish["stop_token_ids"]
            self.reasons[seq_id] = FinishReason.STOP if stopped else FinishReason.LENGTH
            self.answers[seq_id] = answer[len(before[seq_id[1]]) :] if any(before) else answer
            if not self.answers[seq_id]:  # it ended elsewhere, and nobody hears of it here
                self.said[seq_id], self.ended[seq_id] = [], self.reasons[seq_id]

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.hear(self.engine.step())
            self.engine.check()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.engine.requests)))
        self.cut_short.add(request_id)
        self.hear(self.engine.abort(request_id))

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.engine.requests)))
        self.engine.pause(request_id)
        self.resting.append(request_id)

    @precondition(lambda self: self.resting)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.resting))
        self.resting = [other for other in self.resting if other != request_id]
        self.engine.resume(request_id)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), wish=st.none() | REQUESTS, due_s=st.just(inf) | st.integers(0, 9))
    def step_while_others_come_and_go(
        self, data: st.DataObject, wish: dict[str, Any] | None, due_s: float
    ) -> None:
        gone = data.draw(st.sets(st.sampled_from(list(self.engine.requests)), max_size=3))

        def come_and_go() -> None:
            for request_id in sorted(gone):
                self.cut_short.add(request_id)
                self.hear(self.engine.abort(request_id))
            if wish is not None:
                self.add(wish, due_s)
            self.engine.check()

        self.runner.during = come_and_go
        self.hear(self.engine.step())
        self.runner.during = lambda: None

    @precondition(lambda self: self.engine.has_work())
    @rule(when=st.sampled_from(("during", "after")))
    def step_whose_backend_breaks(self, when: str) -> None:
        def fail() -> None:
            raise Broken

        setattr(self.runner, when, fail)
        with pytest.raises(Broken):
            self.engine.step()
        setattr(self.runner, when, lambda: None)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def step_with_an_error(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.engine.requests)))
        self.runner.ledger.fail = {request_id: "wrong"}
        events = self.engine.step()
        self.runner.ledger.fail = {}
        failed = {event.seq_id[0] for event in events if event.error}
        assert failed <= {request_id}
        self.cut_short |= failed
        self.hear(events)

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "engine"):  # hypothesis asks before ``start`` too
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request_id in self.resting:
            self.engine.resume(request_id)
        self.resting = []
        self.hear(finish(self.engine))
        for seq_id, answer in self.answers.items():
            if seq_id[0] not in self.cut_short:
                assert self.said[seq_id] == answer, f"{seq_id} is not what it says alone"
                assert self.ended[seq_id] is self.reasons[seq_id]


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=200, stateful_step_count=30)
