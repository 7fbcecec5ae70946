"""Recurrent layers on the reference backend: the right numbers, and states that are shared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.backends import cpu, reference
from ridgeline.backends.interface import Setup
from ridgeline.backends.reference.recurrent import Floats, Recurrence, mix
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.decoding.search import new_search
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.scheduling.policies import Policy, SplitFuse, Static
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import Event, Runner, SeqId, Step, StepOutput, TokenLogprobs
from tests.backends.runners import (
    PROMPT_TOO,
    TOKENS,
    assert_near,
    distribution,
    step,
    work,
)
from tests.core.harness import Clock, Reciter, finish, make_scheduler, tokens_of
from tests.recurrent import MIXERS
from tests.tiny import RECURRENT, checkpoint, new_setup, plain_logits, random_arrays

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 40, 4, 64


def make(name: str, *, num_states: int = 4) -> ReferenceRunner:
    return ReferenceRunner(
        checkpoint(RECURRENT[name]),
        new_setup(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            num_states=num_states,
        ),
    )


def logprobs(name: str, tokens: tuple[int, ...]) -> Any:
    arch = RECURRENT[name]
    logits = plain_logits(arch, random_arrays(arch), tokens, MAX_LEN)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


# --- the right numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_a_whole_prompt(name: str) -> None:
    tokens = TOKENS[:23]
    item = work(tokens, (9, 3, 4, 0, 39, 7), params=PROMPT_TOO)._replace(state=2)
    output = make(name).execute(step(item))
    wanted = logprobs(name, tokens)
    for position, entry in enumerate(output.prompt_logprobs[0]):
        assert_near(entry, wanted[position])
    assert_near(output.logprobs[0][0], wanted[-1])


@pytest.mark.parametrize("name", RECURRENT)
def test_texts_that_no_engine_reads(name: str) -> None:
    runner = make(name, num_states=0)
    wanted = logprobs(name, TOKENS[:20])
    found = [runner.prompt_logits(TOKENS[:13]), runner.prompt_logits(TOKENS[13:20], 13)]
    logits = np.concatenate(found).astype(np.float64)
    ours = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(ours, wanted, atol=2e-4)


@pytest.mark.parametrize("name", MIXERS)
@given(cuts=st.sets(st.integers(1, 22)))
@settings(max_examples=20, deadline=None)
def test_no_bit_depends_on_how_a_text_is_cut(name: str, cuts: set[int]) -> None:
    mixer, rng = MIXERS[name], np.random.default_rng(3)
    weights = {
        part: rng.normal(0, 0.4, shape).astype(np.float32)
        for part, shape in mixer.shapes(24).items()
    }
    rows = rng.normal(0, 1, (23, 24)).astype(np.float32)

    def zeros() -> dict[str, Floats]:
        return {n: np.zeros(shape, np.float32) for n, shape in mixer.state_shapes(24).items()}

    def go(pieces: list[slice], state: dict[str, Floats], x: Floats, one: Recurrence) -> Floats:
        return np.concatenate([one(x[piece], state) for piece in pieces])

    ends = [0, *sorted(cuts), 23]
    pieces = [slice(*pair) for pair in pairwise(ends)]
    whole, cut = zeros(), zeros()
    first = mix(rows, weights, mixer, 1e-5, partial(go, [slice(0, 23)], whole))
    second = mix(rows, weights, mixer, 1e-5, partial(go, pieces, cut))
    assert first.tobytes() == second.tobytes()
    assert all(whole[part].tobytes() == cut[part].tobytes() for part in whole)


# --- states ------------------------------------------------------------------------------------


def assert_same(entry: TokenLogprobs, other: TokenLogprobs) -> None:
    np.testing.assert_allclose(distribution(entry), distribution(other), atol=1e-4)


@pytest.mark.parametrize("name", ["short convolution", "delta rule", "state space"])
def test_a_saved_state_resumes_and_a_failed_step_changes_nothing(name: str) -> None:
    tokens = TOKENS[:14]
    alone = make(name).execute(step(work(tokens, (0, 1, 2, 3))._replace(state=0))).logprobs[0][0]
    runner = make(name)
    first = work(tokens, (0, 1, 2, 3), end=10)._replace(state=1, save=((4, 2), (8, 3)))
    runner.execute(step(first))
    other = work(TOKENS[20:25], (5, 6))._replace(state=1)  # it takes the slot
    runner.execute(step(other))
    rest = work(tokens, (0, 1, 2, 3), start=8)._replace(state=0)
    resumed = Step((rest,), (), (), (), (), ((3, 0),))
    assert_same(runner.execute(resumed).logprobs[0][0], alone)
    earlier = work(tokens, (0, 1, 2, 3), start=4)._replace(state=0)
    swapped = Step((earlier,), (), (), (), (), ((2, 0), (0, 2)))
    assert_same(runner.execute(swapped).logprobs[0][0], alone)

    half = work(tokens, (0, 1, 2, 3), end=9)._replace(state=1)
    runner.execute(step(half))
    go_on = work(tokens, (0, 1, 2, 3), start=9)._replace(state=1)
    broken = go_on._replace(table=(0, 1, NUM_BLOCKS + 9, 3))
    states = [array.copy() for array in runner._recurrent.arrays()]
    if name in RECURRENT and RECURRENT[name].attentions:
        with pytest.raises(IndexError):
            runner.execute(step(broken))
    for before, now in zip(states, runner._recurrent.arrays(), strict=True):
        np.testing.assert_array_equal(before, now)
    assert_same(runner.execute(step(go_on)).logprobs[0][0], alone)


class Checked:
    """A runner that counts what of the hard cases happened."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_cached = self.num_copies = self.num_preempted = 0
        self.num_drafts = self.num_again = 0  # of right drafts before a wrong one
        self.events: list[Event] = []

    def execute(self, step: Step) -> StepOutput:
        self.num_cached += sum(length for _, length in step.admitted)
        self.num_copies += len(step.state_copies)
        self.num_preempted += len(step.preempted)
        for item in step.work:
            self.num_drafts += item.drafts
            if item.drafts and item.start >= item.sampling.prompt_len:
                self.num_again += len(item.tokens) - item.drafts - 1
        return self._runner.execute(step)


Request = tuple[tuple[int, ...], dict[str, Any]]  # a prompt, and parameters
REQUESTS: list[Request] = [
    (TOKENS[:23], {"temperature": 0}),
    ((*TOKENS[:17], *TOKENS[30:33]), {"temperature": 0}),
    (TOKENS[:23], {"temperature": 1.0, "seed": 5, "n": 3}),
    (TOKENS[40:43], {"temperature": 1.0, "seed": 6}),
    (TOKENS[:12], {"n": 2, "use_beam_search": True, "temperature": 0}),
    (TOKENS[10:31], {"temperature": 0, "prompt_logprobs": 0}),
]


def answers(
    runner: Runner, requests: list[Request], **options: Any
) -> tuple[list[dict[SeqId, list[int]]], Checked]:
    """Serve requests that come one step after the other; return the tokens of each."""
    scheduler = make_scheduler(**{"block_size": BLOCK_SIZE, **options})
    checked = Checked(runner)
    engine = Engine(scheduler, checked, Clock(), max_model_len=MAX_LEN, new_search=new_search)
    events: list[Event] = []
    for prompt, params in requests:
        params = {"max_tokens": 8, "ignore_eos": True} | params
        engine.add(prompt, SamplingParams(**params))
        events += engine.step()
        engine.check()
    events += finish(engine)
    checked.events = events
    said = tokens_of(events)
    places = range(len(requests))
    return [{k: said[k] for k in sorted(said) if k[0] == i} for i in places], checked


@pytest.mark.parametrize(
    "name", ["short convolution", "delta rule", "beside attention", "states alone"]
)
def test_the_same_answers_however_they_are_served(name: str) -> None:
    runner = make(name, num_states=20)
    alone = [
        list(answers(runner, [request], num_blocks=40, seats=3, checkpoints=0)[0][0].values())
        for request in REQUESTS
    ]
    num_cached = num_copies = num_preempted = 0
    ways: list[tuple[Policy, int, int, int, int]] = [
        (SplitFuse(), 40, 64, 8, 12),
        (SplitFuse(), 14, 9, 5, 4),
        (SplitFuse(), 17, 8, 8, 1),
        (Static(), 40, 64, 3, 3),
    ]
    for policy, num_blocks, budget, seats, checkpoints in ways:
        together, checked = answers(
            runner,
            [*REQUESTS, *REQUESTS],
            policy=policy,
            num_blocks=num_blocks,
            budget=budget,
            seats=seats,
            checkpoints=checkpoints,
        )
        found = [list(of_one.values()) for of_one in together]
        assert found == [*alone, *alone]
        num_cached += checked.num_cached
        num_copies += checked.num_copies
        num_preempted += checked.num_preempted
    assert num_cached > 50
    assert num_copies > 20
    assert num_preempted > 3


# LFM2, Mamba-2, Falcon-H1, Qwen3-Next and Qwen3.5, in small.
KINDS = ["short convolution", "states alone", "beside attention"]
KINDS += ["shared expert", "gated attention"]
LONG: list[Request] = [
    (prompt, params | ({} if "use_beam_search" in params else {"max_tokens": 24, "logprobs": 1}))
    for prompt, params in REQUESTS
]


class Lone:
    """What requests answer without drafts and company, and ways to serve them with both."""

    def __init__(self, runner: Runner, block_size: int, seed: int) -> None:
        self.runner, self.block_size, self.dice = runner, block_size, random.Random(seed)
        self.answers: list[list[list[int]]] = []
        self.events: list[list[Event]] = []
        for request in LONG:
            [said], checked = self.serve([request], num_blocks=40, seats=3, checkpoints=0)
            self.answers.append([*said.values()])
            self.events.append(checked.events)

    def serve(
        self, requests: list[Request], **options: Any
    ) -> tuple[list[dict[SeqId, list[int]]], Checked]:
        return answers(self.runner, requests, block_size=self.block_size, **options)

    def with_drafts(self, accuracy: float, **options: Any) -> Checked:
        """Serve all twice, side by side, with drafts; compare what is said."""
        said = {
            (i, index): tokens
            for i, of_one in enumerate(self.answers * 2)
            for index, tokens in enumerate(of_one)
        }
        speculation = Speculation(Reciter(said, accuracy, self.dice), most=self.dice.randint(1, 6))
        together, checked = self.serve([*LONG, *LONG], speculation=speculation, **options)
        assert [[*of_one.values()] for of_one in together] == self.answers * 2
        return checked

    def entries(self, checked: Checked) -> Iterator[tuple[TokenLogprobs, TokenLogprobs]]:
        """Yield what was said of each token, beside what is said of it alone."""
        for i, events in enumerate(self.events * 2):
            for index in {event.seq_id[1]: None for event in events}:
                alone = [event for event in events if event.seq_id == (0, index)]
                found = [event for event in checked.events if event.seq_id == (i, index)]
                for one, other in zip(found, alone, strict=True):
                    assert (one.token, one.finish_reason) == (other.token, other.finish_reason)
                    if one.logprobs and other.logprobs:
                        yield one.logprobs, other.logprobs


def ways(tight: int) -> list[dict[str, Any]]:
    """Ways to serve: with room, in chunks, with few blocks, and with a single checkpoint."""
    roomy = {"num_blocks": 40, "budget": 64, "seats": 8, "checkpoints": 12}
    return [
        roomy,
        roomy | {"budget": 9, "checkpoints": 4},
        roomy | {"num_blocks": tight, "seats": 5, "checkpoints": 8},
        roomy | {"checkpoints": 1},
        roomy | {"caching": False, "seats": 3, "checkpoints": 3},
        roomy | {"policy": Static(), "seats": 3, "checkpoints": 3},
    ]


@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_no_answer(name: str) -> None:
    lone = Lone(make(name, num_states=20), BLOCK_SIZE, 3)
    num_drafts = num_again = num_cached = num_preempted = 0
    for way in ways(14):
        checked = lone.with_drafts(0.8, **way)
        for one, other in lone.entries(checked):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        num_drafts += checked.num_drafts
        num_again += checked.num_again
        num_cached += checked.num_cached
        num_preempted += checked.num_preempted
    assert num_drafts > 500
    assert num_again > 25
    assert num_cached > 50
    assert num_preempted > 3


@pytest.mark.parametrize("name", KINDS)
def test_the_state_before_drafts_is_kept(name: str) -> None:
    tokens, table = TOKENS[:14], (0, 1, 2, 3)
    runner, plain = make(name), make(name)
    item = work(tokens, table, end=11)._replace(state=1)
    for one in (runner, plain):
        one.execute(step(item))
    more = (tokens[11], *TOKENS[30:33])  # the last three are guesses
    drafted = item._replace(start=11, tokens=more, state=1, seeds=(5,), drafts=3, save=((1, 2),))
    runner.execute(step(drafted))
    plain.execute(step(item._replace(start=11, tokens=more[:1])))
    for with_drafts, without in zip(
        runner._recurrent.arrays(), plain._recurrent.arrays(), strict=True
    ):
        np.testing.assert_allclose(with_drafts[2], without[1], rtol=1e-5, atol=1e-5)
        assert np.abs(with_drafts[1] - without[1]).max() > 1e-3


def test_what_the_backend_says_and_needs() -> None:
    arch = RECURRENT["delta rule"]
    setup = Setup("auto", "auto", 16, 1, MAX_LEN, 4, 64)
    found = reference.footprint(arch, reference.check(setup, arch))
    runner = make("delta rule", num_states=5)
    assert found.state_bytes_per_seq * 5 == sum(a.nbytes for a in runner._recurrent.arrays())
    assert runner.memory()["recurrent_states"].num_bytes == 5 * found.state_bytes_per_seq
    cpu_setup = cpu.check(setup, arch)
    beside = RECURRENT["beside attention"].layers[0]
    two = replace(beside, beside=MIXERS["delta rule"])
    other = RECURRENT["short convolution"].layers[0]
    for layers, message in (
        ((two,), "layer 0 has another mixer than a state space beside attention: use --backend"),
        ((*arch.layers, other), "layers keep states of different shapes"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.footprint(replace(arch, layers=layers), cpu_setup)
