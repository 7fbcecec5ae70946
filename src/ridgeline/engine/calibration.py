"""What was measured of a model here: how it is measured, kept on the disk, and chosen.

Measuring computes steps of many shapes for about a minute, from coarse to fine, and again with
other random prompts until the time is over. What would take too long for the time that is left is
passed over, so a large model gets small shapes.

A file is written whole or not at all, and passes the reader's check first. One that is damaged, or
of another version, is passed over, and replaced when the model is measured again; ``doctor`` says
so. Where no model was measured, a roofline stands in, and it says so: with the rates of this
machine's roof, which the CPU backend's own kernels measure, else with assumed ones."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ridgeline.backends import BACKENDS
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record
from ridgeline.core.scheduling.policies import Load
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.foresight.step_time.calibration import (
    COMPUTE_SHARE,
    MEMORY_SHARE,
    ONE_STREAM,
    Calibration,
    KeptRoof,
    parse_calibration,
    parse_roof,
    roof_file_name,
)
from ridgeline.foresight.step_time.features import (
    Measured,
    Samples,
    StepTime,
    Watcher,
    of_items,
    windows_of,
)
from ridgeline.foresight.step_time.fit import fitted
from ridgeline.model.cost import costs
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import processor_name, usable_cpus, write_whole
from ridgeline.system.report import duration
from ridgeline.version import __version__

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
        guess = roofline_calibration(llm.path, arch, llm.config)
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
    yield (
        "one stream",
        f"{1 / (one_s + times.after(1, 0)):,.0f} tokens/s, a step of {duration(one_s)}",
    )
    for num in (16, 64):
        step_s = times.seconds(of_items([(127, 1, 1)] * num, times.windows))
        rate = num / (step_s + times.after(num, 0))
        yield f"{num} streams", f"{rate:,.0f} tokens/s, a step of {duration(step_s)}"
    length = min(512, llm.config.max_model_len // 2)
    prompt_s = times.seconds(of_items([(0, length, 1)], times.windows))
    ops = costs.linear_flops(arch, length) + costs.attention_flops(arch, 0, length)
    speeds = f"{length / prompt_s:,.0f} tokens/s, {ops / prompt_s / 1e9:,.0f} GOP/s"
    yield f"a prompt of {length}", f"{speeds}, a step of {duration(prompt_s)}"
    yield "reads weights", f"at least at {calibration.weights_bytes_per_s / 1e9:,.1f} GB/s"
    if calibration.kv_bytes_per_s:
        yield "reads K/V", f"at {calibration.kv_bytes_per_s / 1e9:,.1f} GB/s"
    yield (
        "between steps",
        f"{duration(times.after(1, 0))}, and {duration(times.after_per_end_s)} for each end",
    )


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


# Assumed of a processor that was not measured; of each thread, up to the most.
_READ_BYTES_PER_S, _MOST_BYTES_PER_S = 12e9, 100e9
_OPS_PER_S = 150e9
LAYER_S = 25e-6  # meeting of threads, norms, the cache
_AFTER_S, _AFTER_PER_ROW_S = 1e-4, 2e-6


def newest_calibration(
    home: Path | None, model: Path, arch: ModelArch, config: EngineConfig
) -> Calibration:
    """Return the newest calibration of what will run, if ``home`` has one; else an assumed one."""
    return calibrations(home, model, arch, config)[0]


def calibrations(
    home: Path | None, model: Path, arch: ModelArch, config: EngineConfig
) -> list[Calibration]:
    """Return what was measured of what will run and what servers learnt, the newest first.

    If ``home`` has neither, it is an assumed one.
    """
    if home is None:
        return [roofline_calibration(model, arch, config)]
    wanted = roofline_calibration(model, arch, config, stored_roof(home))
    paths = (calibration_path(home, replace(wanted, source=one)) for one in ("measured", "served"))
    matches = [one for path in paths if (one := stored_calibration(path)) and one.is_of(wanted)]
    weights_bytes, kv_bytes = wanted.weights_bytes, wanted.kv_bytes_per_token
    matches = [
        replace(one, weights_bytes=weights_bytes, kv_bytes_per_token=kv_bytes) for one in matches
    ]
    return sorted(matches, key=lambda one: one.measured_at, reverse=True) or [wanted]


def roofline_calibration(
    model: Path, arch: ModelArch, config: EngineConfig, roof: KeptRoof | None = None
) -> Calibration:
    """Return what can be said of a model that was not measured here, where the roof is as given."""
    weights_bytes, kv_bytes = bytes_of(arch, config)
    return Calibration(
        model=model.name,
        arch=hashlib.sha256(repr(arch).encode()).hexdigest()[:10],
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        backend=config.backend,
        threads=config.threads,
        processor=processor_name(),
        source="assumed",
        measured_at=0.0,
        version=__version__,
        times=_roofline(arch, config, roof),
        step_error=None,
        total_error=None,
        factors=(),
        samples=(),
        after=(),
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes,
    )


def bytes_of(arch: ModelArch, config: EngineConfig) -> tuple[int, int]:
    """Return the bytes of all weights in memory, and of a token in the cache."""
    whole = replace(config, groups=())  # in one group a token has all layers
    footprint = BACKENDS[config.backend].footprint(arch, whole)
    return config.weights_bytes, footprint.kv_bytes_per_token


def _roofline(arch: ModelArch, config: EngineConfig, roof: KeptRoof | None) -> StepTime:
    """Return the model of time of a roof's rates; of assumed ones without it.

    A step computes and reads at the same time, but not perfectly: the two times are added as the
    sides of a right angle (Williams et al., "Roofline", 2009, with the corner rounded).
    """
    read_per_s = min(config.threads * _READ_BYTES_PER_S, _MOST_BYTES_PER_S)
    ops_per_s = config.threads * _OPS_PER_S
    if roof is not None and config.backend == "cpu":  # whose kernels the roof was measured with
        form = config.dtype if config.dtype in ("bf16", "f32") else "int8"
        read_per_s = MEMORY_SHARE * roof.read_bytes_per_s(config.threads)
        ops_per_s = COMPUTE_SHARE * roof.ops_per_s(form, config.threads)
    weights_bytes, kv_bytes = bytes_of(arch, config)
    weights_s = weights_bytes / read_per_s

    def step_s(num_tokens: int) -> float:
        ops_s = costs.linear_flops(arch, num_tokens) / ops_per_s
        return arch.num_layers * LAYER_S + math.hypot(weights_s, ops_s)

    knots = BACKENDS[config.backend].step_knots()
    last_s, more_s = step_s(knots[-1]), step_s(2 * knots[-1])
    return StepTime(
        knots,
        tuple(step_s(knot) for knot in knots),
        per_token_s=(more_s - last_s) / knots[-1],
        per_seq_s=0.0,
        per_row_s=costs.head_flops(arch, 1) / ops_per_s,
        per_position_s=kv_bytes / read_per_s,
        per_pair_s=costs.attention_flops(arch, 0, 1) / ops_per_s,
        after_s=_AFTER_S,
        after_per_row_s=_AFTER_PER_ROW_S,
        windows=windows_of(arch),
    )


Report = Callable[[int, int], None]


def calibration_path(home: Path, calibration: Calibration) -> Path:
    """Return the file that a calibration lies in."""
    return home / "calibration" / calibration.file_name


def save_calibration(home: Path, calibration: Calibration) -> Path:
    """Keep a calibration; return its path.

    Raises OSError, and ValueError for one that could not be read again.
    """
    path = calibration_path(home, calibration)
    text = json.dumps(calibration.to_json(), separators=(",", ":"))
    parse_calibration(text.encode())
    _write(path, text)
    return path


def save_quietly(home: Path | None, calibration: Calibration) -> None:
    """Keep a calibration; where there is no home that can be written, it is learnt again."""
    if home is not None:
        with suppress(OSError, ValueError):
            save_calibration(home, calibration)


def read_calibration(path: Path) -> Calibration:
    """Read a file. Raises ValueError if it is not one of this version, and OSError."""
    try:
        return parse_calibration(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None


def stored_calibration(path: Path) -> Calibration | None:
    """Return the calibration of a file; None if it is not there, or is none of this version."""
    try:
        return read_calibration(path)
    except (ValueError, OSError):
        return None


def stored_calibrations(home: Path) -> Iterator[Calibration]:
    """Yield the calibrations that are kept; a file that is none of this version is passed over."""
    for path in _files(home):
        if (calibration := stored_calibration(path)) is not None:
            yield calibration


def unreadable(home: Path) -> Iterator[str]:
    """Yield why each file that is passed over is none, in a line."""
    for path in _files(home):
        try:
            read_calibration(path)
        except (ValueError, OSError) as error:
            yield str(error)


def save_roof(home: Path, roof: KeptRoof) -> Path:
    """Keep a roof; return its path. Raises OSError."""
    path = home / "roof" / roof_file_name(roof.processor, roof.threads)
    _write(path, json.dumps(asdict(roof)))
    return path


def stored_roof(home: Path) -> KeptRoof | None:
    """Return the roof that was measured here; None where none was, or its file is damaged."""
    processor, threads = processor_name(), usable_cpus()
    try:
        roof = parse_roof((home / "roof" / roof_file_name(processor, threads)).read_bytes())
    except (OSError, ValueError):
        return None
    return roof if (roof.processor, roof.threads) == (processor, threads) else None


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def _files(home: Path) -> list[Path]:
    return sorted((home / "calibration").glob("*.json"))


def measure_and_save_roof(home: Path, report: Report = lambda done, total: None) -> KeptRoof:
    """Measure with all threads in about ten seconds, and keep it in ``home``. Raises OSError."""
    from ridgeline.backends.cpu import measure_roof  # compiles kernels

    roof = measure_roof(usable_cpus(), report)
    one, many = (
        {name: rate for name, rate in asdict(rates).items() if rate is not None}
        for rates in (roof.one_thread, roof.all_threads)
    )
    record = KeptRoof(processor_name(), roof.threads, round(time.time(), 3), one, many)
    save_roof(home, record)
    return record
