"""Measuring a model here: steps of many shapes for about a minute, and the fit to them.

Shapes come from coarse to fine, and again with other random prompts until the time is over. What
would take too long for the time that is left is passed over, so a large model gets small shapes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.scheduling.policies import Load
from ridgeline.engine.calibration.load import assume
from ridgeline.engine.llm import LLM
from ridgeline.foresight.step_time.calibration import ONE_STREAM, Calibration
from ridgeline.foresight.step_time.features import of_items, windows_of
from ridgeline.foresight.step_time.least_squares import fitted
from ridgeline.foresight.step_time.sampler import Measured, Samples, Watcher
from ridgeline.model.cost import costs

_MOST_PER_BIN = 1024  # steps to fit to; fewer are kept
_SHARE = 0.25  # of the time that is left, which one shape may take


class _LoadShape(NamedTuple):
    """Prompts of a length, each with an answer, of which ``gap`` steps lie between."""

    prompts: tuple[int, ...]
    num_new: tuple[int, ...]
    gap: int = 0


def calibrate(
    llm: LLM, seconds: float, report: Callable[[int, int], None] = lambda done, total: None
) -> Calibration:
    """Measure a model that does nothing else now; return its model of time.

    Args:
        llm: its engine gets requests of random tokens, and has none at the end.
        seconds: about how long.
        report: told how many of how many seconds are over.

    Raises ValueError if nothing could be measured in the time.
    """
    arch, engine = llm.arch, llm.engine
    samples, order = Samples(per_bin=_MOST_PER_BIN), list[Measured]()
    watcher = Watcher(samples, windows_of(arch))

    def take(record: Record) -> None:
        if sample := watcher.take(record):
            order.append(sample)

    begin_s = time.monotonic()
    engine.listeners.append(take)
    speculation, engine.scheduler.speculation = engine.scheduler.speculation, None
    try:
        _run(llm, _LoadShape((16,), (4,)), random.Random(0))  # what is done once is done now
        order.clear()
        guess = assume(llm.path, arch, llm.config)
        for number, shape in enumerate(_shapes(llm.config.max_model_len)):
            over_s = time.monotonic() - begin_s
            report(round(min(over_s, seconds)), round(seconds))
            if over_s > seconds:
                break
            speed = _speed(order, guess)
            if order and _expected_s(shape, guess) * speed > _SHARE * (seconds - over_s):
                continue
            _run(llm, shape, random.Random(number))
    finally:
        engine.scheduler.speculation = speculation
        engine.listeners.remove(take)
    calibration = fitted(guess, samples, order, "measured", time.time())
    return replace(calibration, samples=tuple(samples.thinned()))


def rates(calibration: Calibration, llm: LLM) -> Iterator[tuple[str, str]]:
    """Yield what a model of time says in units that people know: name and text."""
    arch, times = llm.arch, calibration.times
    one_s = times.seconds(ONE_STREAM)
    yield "one stream", f"{1 / (one_s + times.after(1, 0)):,.0f} tokens/s, a step of {_ms(one_s)}"
    for num in (16, 64):
        step_s = times.seconds(of_items([(127, 1, 1)] * num, times.windows))
        rate = num / (step_s + times.after(num, 0))
        yield f"{num} streams", f"{rate:,.0f} tokens/s, a step of {_ms(step_s)}"
    length = min(512, llm.config.max_model_len // 2)
    prompt_s = times.seconds(of_items([(0, length, 1)], times.windows))
    ops = costs.linear_flops(arch, length) + costs.attention_flops(arch, 0, length)
    speeds = f"{length / prompt_s:,.0f} tokens/s, {ops / prompt_s / 1e9:,.0f} GOP/s"
    yield f"a prompt of {length}", f"{speeds}, a step of {_ms(prompt_s)}"
    yield "reads weights", f"at least at {calibration.weights_bytes_per_s / 1e9:,.1f} GB/s"
    if calibration.kv_bytes_per_s:
        yield "reads K/V", f"at {calibration.kv_bytes_per_s / 1e9:,.1f} GB/s"
    yield (
        "between steps",
        f"{_ms(times.after(1, 0))}, and {_ms(times.after_per_end_s)} for each end",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _shapes(max_model_len: int) -> Iterator[_LoadShape]:
    """Yield shapes, without end: the coarse ones first, then again with other lengths."""
    for turn in count():
        for shape in _turn(random.Random(turn)):
            longest_prompts = [max(1, max_model_len - num_new) for num_new in shape.num_new]
            yield shape._replace(prompts=tuple(map(min, shape.prompts, longest_prompts)))


def _turn(dice: random.Random) -> Iterator[_LoadShape]:
    """Yield a turn of shapes."""
    yield _LoadShape((8,), (8,))
    for num in (1, 4, 16, 64):
        yield _LoadShape(tuple(dice.randint(16, 256) for _ in range(num)), (16,) * num)
    for num in (256, 20, 1024, 64, 5, 512, 128, 14, 2048):
        yield _LoadShape((num,), (2,))
    yield _arriving(dice, 24, 20)
    for num in (1, 4, 16):  # long contexts
        yield _LoadShape(tuple(dice.randint(700, 1500) for _ in range(num)), (16,) * num)
    for num in (2, 3, 6, 8, 12, 24, 32, 48):
        yield _LoadShape(tuple(dice.randint(16, 256) for _ in range(num)), (16,) * num)
    yield _arriving(dice, 24, 5)
    for num in (9, 17, 28, 40, 100, 160, 400, 700, 1500):
        yield _LoadShape((num,), (2,))
    yield _arriving(dice, 24, 2)


def _arriving(dice: random.Random, num: int, gap: int) -> _LoadShape:
    """Return requests that come while others generate, as in a server."""
    prompts = tuple(dice.randint(16, 400) for _ in range(num))
    return _LoadShape(prompts, tuple(dice.randint(8, 48) for _ in range(num)), gap)


def _run(llm: LLM, shape: _LoadShape, dice: random.Random) -> None:
    """Answer the prompts of a shape, with random tokens, to the end."""
    engine, vocab = llm.engine, range(llm.arch.vocab_size)
    waiting = list(zip(shape.prompts, shape.num_new, strict=True))
    until_next = 0
    while waiting or engine.has_work():
        while waiting and (until_next <= 0 or not engine.has_work()):
            length, num_new = waiting.pop(0)
            prompt = tuple(dice.choices(vocab, k=length))
            params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
            engine.add(prompt, params, new_text=partial(llm.text.new_text, prompt, params))
            until_next = shape.gap
        engine.step(Load(is_read=bool(shape.gap)))
        until_next -= 1


def _expected_s(shape: _LoadShape, guess: Calibration) -> float:
    """Return roughly how long a shape takes by a model of time."""
    times, num = guess.times, len(shape.prompts)
    prompts_s = times.seconds(of_items([(0, n, 1) for n in shape.prompts], times.windows))
    together = 1 if shape.gap else num
    answers_s = max(shape.num_new) * times.seconds(of_items([(0, 1, 1)] * together, times.windows))
    return prompts_s + answers_s * (num if shape.gap else 1)


def _speed(order: Sequence[Measured], guess: Calibration) -> float:
    """Return the seconds that steps took so far, over the seconds that were guessed."""
    guessed_s = sum(guess.times.seconds(sample.features) for sample in order)
    return sum(sample.seconds for sample in order) / guessed_s if guessed_s else 1.0
