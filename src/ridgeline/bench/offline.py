"""How fast one engine computes, without a server, and where its time goes."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.backends.cpu import Roof, measure_roof
from ridgeline.backends.interface import Counters, Traffic
from ridgeline.bench.out_file import check_place
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.progress import count_bar, say
from ridgeline.system import svg
from ridgeline.system.machine import write_text
from ridgeline.system.report import Row, Table, bold, counted
from ridgeline.system.terminal import console, drawn

_REPEATS = 3
# OpenAI's default, and what llama.cpp's users run.
_SAMPLED: dict[str, dict[str, Any]] = {
    "t1": {"temperature": 1.0},
    "k40": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A number of streams, with prompt and answer tokens of each; greedy without ``sampling``."""

    name: str
    num_streams: int
    prompt_tokens: int
    new_tokens: int
    sampling: str = ""  # a key of ``_SAMPLED``


def bench(llm: LLM, *, prompt_tokens: int, new_tokens: int) -> None:
    """Measure every shape that fits the model; print a table, then one line of JSON.

    One, 16 and 64 streams are sampled too: at temperature 1 alone (``t1``), and at temperature 0.8
    with top-k 40 and top-p 0.95 (``k40``).
    """
    room = llm.config.max_model_len
    shapes = [
        BenchShape("prefill_512", 1, 512, 2),
        *(
            BenchShape(f"batch{n}" if n > 1 else "single", n, prompt_tokens, new_tokens)
            for n in (1, 4, 16, 64)
        ),
    ]
    shapes += [
        replace(shape, name=f"{shape.name}_{sampling}", sampling=sampling)
        for shape in (shapes[1], *shapes[3:])
        for sampling in _SAMPLED
    ]
    fitting = [s for s in shapes if s.prompt_tokens + s.new_tokens <= room]
    if not fitting:
        raise ValueError(f"no shape fits --max-model-len {room}: lower --prompt-tokens")
    rng = random.Random(0)
    results: dict[str, dict[str, float]] = {}
    with count_bar("Measuring", note="shapes") as report:
        _measure(llm, BenchShape("warm-up", 1, 16, 4), rng)
        for done, shape in enumerate(fitting):
            report(done, len(fitting))
            runs = [_measure(llm, shape, rng) for _ in range(_REPEATS)]
            results[shape.name] = {k: statistics.median(run[k] for run in runs) for k in runs[0]}
    _print(fitting, results)
    config = {"model": llm.path.name, "backend": llm.config.backend, "threads": llm.config.threads}
    print(json.dumps(config | {"repeats": _REPEATS, "median": results}))


def _measure(llm: LLM, shape: BenchShape, rng: random.Random) -> dict[str, float]:
    vocab = range(llm.arch.vocab_size)
    prompts = [rng.choices(vocab, k=shape.prompt_tokens) for _ in range(shape.num_streams)]
    sampling = _SAMPLED.get(shape.sampling, {"temperature": 0})
    params = SamplingParams(**sampling, max_tokens=shape.new_tokens, ignore_eos=True)
    steps: list[StepRecord] = []

    def keep(record: Record) -> None:
        if isinstance(record, StepRecord):
            steps.append(record)

    llm.engine.listeners.append(keep)
    try:
        llm.generate(prompts, params, progress=False)
    finally:
        llm.engine.listeners.remove(keep)
    first, last = decode_steps(steps, shape.num_streams)
    prefill, decode = steps[:first], steps[first:last]
    prompt_tokens = sum(n for step in prefill for _, _, n in step.work)
    decode_tokens = sum(len(tokens) for step in decode for tokens in step.sampled)
    return {
        "prefill_tokens_per_s": round(prompt_tokens / _span_s(prefill), 1),
        "decode_tokens_per_s": round(decode_tokens / _span_s(decode), 1),
        "decode_step_ms": round(1e3 * _span_s(decode) / len(decode), 2),
        "end_to_end_tokens_per_s": round(shape.num_streams * shape.new_tokens / _span_s(steps), 1),
    }


def decode_steps(steps: Sequence[StepRecord], num_streams: int) -> tuple[int, int]:
    """Return the range of steps in which all streams decode and nothing else happens.

    Prefill ends with the last step that has more than single tokens. Streams whose prompts came
    first finish first; the work of the others is then of another shape, unless there is nothing
    else.
    """
    prompts = [i for i, step in enumerate(steps) if step.num_prompt_tokens]
    first = 1 + max(prompts, default=0)  # a prompt of one token is the first step
    last = first
    while last < len(steps) and len(steps[last].work) == num_streams:
        last += 1
    return first, last if last > first else len(steps)


def _span_s(steps: list[StepRecord]) -> float:
    return steps[-1].end_s - steps[0].start_s


def _print(shapes: list[BenchShape], results: dict[str, dict[str, Any]]) -> None:
    heads = (
        "shape", "streams", "prompt", "new", "prefill tok/s", "decode tok/s", "ms/step",
        "total tok/s",
    )  # fmt: skip
    rows = [
        (
            shape.name,
            str(shape.num_streams),
            str(shape.prompt_tokens),
            str(shape.new_tokens),
            *(f"{value:,.1f}" for value in results[shape.name].values()),
        )
        for shape in shapes
    ]
    console(100).print(drawn(Table(heads, rows)))


_COMPILED = ("linears", "head", "attention", "row operations", "barrier")
_PREFILL_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of one shape: seconds and traffic by kind. The seconds add up to ``span_s``.

    Of ``num_tokens`` rows ``num_draft_tokens`` were guesses; of these ``num_accepted_tokens`` were
    right and were kept.
    """

    shape: BenchShape
    is_prefill: bool
    num_steps: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    span_s: float
    seconds: dict[str, float]
    traffic: dict[str, Traffic]

    @property
    def num_lasting_tokens(self) -> int:
        """Rows without wrong guesses."""
        return self.num_tokens - self.num_draft_tokens + self.num_accepted_tokens

    @property
    def title(self) -> str:
        """What it is, in words."""
        if self.is_prefill:
            return f"prefill, {self.shape.prompt_tokens} tokens"
        return f"decode, {counted(self.shape.num_streams, 'stream')}"


class _Watch:
    """Listens to the engine: each step's record, with what its kernels counted."""

    def __init__(self, counters: Counters) -> None:
        self.steps: list[StepRecord] = []
        self.cycles: list[dict[str, float]] = []  # mean over threads; ``call`` is thread 0's step
        self.num_experts: list[int] = []  # whose matrices were read, in all layers
        self.own_s: list[float] = []  # time spent in listening
        self._counters = counters

    def __call__(self, record: Record) -> None:
        begin_s = time.monotonic()
        if isinstance(record, StepRecord):
            cycles = self._counters.take()
            means = {kind: float(cycles[kind].mean()) for kind in _COMPILED}
            self.cycles.append(means | {"call": float(cycles["step"][0])})
            self.num_experts.append(int(cycles["experts"].sum()))
            self.steps.append(record)
            self.own_s.append(time.monotonic() - begin_s)


def profile(llm: LLM, *, prompt_tokens: int, new_tokens: int, picture: Path) -> None:
    """Measure the roof, then three phases; print a table, draw ``picture``, end with JSON.

    Raises ValueError where the backend counts nothing, no shape fits the model, or the disk is
    full.
    """
    check_place(picture)
    room = llm.config.max_model_len
    if prompt_tokens + new_tokens > room:
        raise ValueError(f"no shape fits --max-model-len {room}: lower --prompt-tokens")
    counters = llm.runner.profile(lambda: say("compiling kernels that count (once)"))
    with count_bar("Measuring the roof", note="rounds") as report:
        roof = measure_roof(llm.config.threads, report)
    many = min(64, llm.config.max_num_seqs)
    wanted = [
        (BenchShape("single", 1, prompt_tokens, new_tokens), False),
        (BenchShape(f"batch{many}", many, prompt_tokens, new_tokens), False),
        (BenchShape("prefill", 1, min(512, room - 2), 2), True),
    ]
    rng = random.Random(0)
    phases = []
    with count_bar("Profiling", note="shapes") as report:
        measure_phase(llm, counters, BenchShape("warm-up", 1, 16, 4), rng, is_prefill=False)
        for done, (shape, is_prefill) in enumerate(wanted):
            report(done, len(wanted))
            phases.append(measure_phase(llm, counters, shape, rng, is_prefill=is_prefill))
    _print_profile(phases, roof)
    write_text(picture, _draw(llm, phases, roof))
    print(f"The picture is {picture}", file=sys.stderr)
    print(json.dumps(_facts(llm, phases, roof)))


def measure_phase(
    llm: LLM, counters: Counters, shape: BenchShape, rng: random.Random, *, is_prefill: bool
) -> Phase:
    """Run a shape; return its prefill, or all steps after it. ``llm`` must be profiled."""
    repeats = _PREFILL_REPEATS if is_prefill else 1
    parts = [_run(llm, counters, shape, rng, is_prefill) for _ in range(repeats)]
    first = parts[0]
    return Phase(
        shape,
        is_prefill,
        num_steps=sum(part.num_steps for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        span_s=sum(part.span_s for part in parts),
        seconds={kind: sum(part.seconds[kind] for part in parts) for kind in first.seconds},
        traffic={
            kind: sum((p.traffic[kind] for p in parts[1:]), traffic)
            for kind, traffic in first.traffic.items()
        },
    )


def attainable_ops_per_s(traffic: Traffic, roof: Roof) -> float:
    """Return the operations per second that the roof allows for work of this intensity."""
    rates = roof.all_threads
    peak = {
        "f32": rates.f32_ops_per_s,
        "bf16": rates.bf16_ops_per_s or rates.f32_ops_per_s,
        "int8": rates.int8_ops_per_s,
    }[traffic.form]
    return min(peak, traffic.ops_per_byte * rates.read_bytes_per_s)


def _run(
    llm: LLM, counters: Counters, shape: BenchShape, rng: random.Random, is_prefill: bool
) -> Phase:
    vocab = range(llm.arch.vocab_size)
    prompts = [rng.choices(vocab, k=shape.prompt_tokens) for _ in range(shape.num_streams)]
    params = SamplingParams(temperature=0, max_tokens=shape.new_tokens, ignore_eos=True)
    counters.take()
    watch = _Watch(counters)
    llm.engine.listeners.append(watch)
    try:
        answers = llm.generate(prompts, params, progress=False)
    finally:
        llm.engine.listeners.remove(watch)
    first, last = decode_steps(watch.steps, shape.num_streams)
    part = slice(first) if is_prefill else slice(first, last)
    steps, cycles = watch.steps[part], watch.cycles[part]
    own_s = sum(watch.own_s[part][:-1])  # after the last step there is no gap
    span_s = steps[-1].end_s - steps[0].start_s - own_s
    per_cycle = counters.seconds_per_cycle()
    seconds = {kind: per_cycle * sum(step[kind] for step in cycles) for kind in _COMPILED}
    call_s = per_cycle * sum(step["call"] for step in cycles)
    # A thread may wake after the step has ended for the caller: no thread waited for that.
    waiting_s = seconds.pop("barrier")
    working_s = sum(seconds.values())
    seconds["barrier"] = max(0.0, min(waiting_s, call_s - working_s))
    seconds["rest of the call"] = max(0.0, call_s - working_s - seconds["barrier"])
    num_sampled = sum(len(tokens) for step in steps for tokens in step.sampled)
    tokens = [answer.outputs[0].token_ids for answer in answers]
    detokenise_s = num_sampled * _detokenise_s(llm, prompts, tokens)
    schedule_s = sum(step.schedule_s for step in steps)
    execute_s = sum(step.execute_s for step in steps)
    commit_s = sum(step.commit_s for step in steps)
    seconds |= {
        "schedule": schedule_s,
        "prepare, sample": max(0.0, execute_s - call_s),
        "detokenise": min(detokenise_s, commit_s),
        "commit": max(0.0, commit_s - detokenise_s),
        "other Python": max(0.0, span_s - schedule_s - execute_s - commit_s),
    }
    traffic: dict[str, Traffic] = {}
    for step, num_experts in zip(steps, watch.num_experts[part], strict=True):
        for kind, one in llm.runner.traffic(step, num_experts).items():
            traffic[kind] = traffic[kind] + one if kind in traffic else one
    num_drafts, num_right = _guesses(steps)
    return Phase(
        shape,
        is_prefill,
        num_steps=len(steps),
        num_tokens=sum(n for step in steps for _, _, n in step.work),
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_right,
        span_s=span_s,
        seconds=seconds,
        traffic=traffic,
    )


def _guesses(steps: Sequence[StepRecord]) -> tuple[int, int]:
    """Return how many rows were guesses, and how many of these were right."""
    num_drafts = num_right = 0
    for step in steps:
        drafts = dict(step.drafts)
        for (seq_id, _, _), tokens in zip(step.work, step.sampled, strict=True):
            if seq_id in drafts:
                num_drafts += len(drafts[seq_id])
                num_right += len(tokens) - 1
    return num_drafts, num_right


def _detokenise_s(
    llm: LLM, prompts: Sequence[list[int]], answers: Sequence[Sequence[int]]
) -> float:
    """Return the seconds that one token takes to become text: all of them once more."""
    streams = [TextStream(llm.tokenizer.new_decoder(tuple(prompt))) for prompt in prompts]
    begin_s = time.monotonic()
    for stream, tokens in zip(streams, answers, strict=True):
        for token in tokens:
            stream.feed(token, True)
            stream.take()
    return (time.monotonic() - begin_s) / sum(map(len, answers))


# --- results -----------------------------------------------------------------------------------


def _print_profile(phases: Sequence[Phase], roof: Roof) -> None:
    heads = ("where a step goes", "ms/step", "share", "GB/s", "GOP/s", "of the roof")
    rows: list[Row] = []
    for phase in phases:
        step_ms = 1e3 * phase.span_s / phase.num_steps
        rate = phase.num_lasting_tokens / phase.span_s
        rows.append(bold(phase.title, f"{step_ms:,.2f}", "100.0%", "", f"{rate:,.0f} tok/s"))
        for kind, seconds in phase.seconds.items():
            cells = [f"{1e3 * seconds / phase.num_steps:,.3f}", f"{seconds / phase.span_s:.1%}"]
            if facts := _rates(phase, kind, roof):
                cells += [f"{facts[0]:,.1f}", f"{facts[1]:,.0f}", f"{facts[2]:.0%}"]
            rows.append((f"  {kind}", *cells))
        if phase.num_draft_tokens:
            ratio = phase.num_accepted_tokens / phase.num_draft_tokens
            share = phase.num_draft_tokens / phase.num_tokens
            rows.append(("  rows that were guesses", "", f"{share:.1%}", "", f"{ratio:.0%} kept"))
    rates = roof.all_threads
    out = console(100, markup=True)
    out.print(drawn(Table(heads, rows)))
    giga = [x / 1e9 for x in (rates.read_bytes_per_s, rates.int8_ops_per_s, rates.f32_ops_per_s)]
    text = "memory {:,.1f} GB/s, int8 {:,.0f} GOP/s, f32 {:,.0f} GOP/s".format(*giga)
    out.print(f"[dim]The roof, {_threads(roof)}: {text}[/]")


def _threads(roof: Roof) -> str:
    return counted(roof.threads, "thread")


def _rates(phase: Phase, kind: str, roof: Roof) -> tuple[float, float, float] | None:
    """Return GB/s, GOP/s and the share of the roof, where work of this kind has a roof."""
    traffic, seconds = phase.traffic.get(kind), phase.seconds[kind]
    if traffic is None or not traffic.ops or not seconds:
        return None
    ops_per_s = traffic.ops / seconds
    share = ops_per_s / attainable_ops_per_s(traffic, roof)
    return traffic.read_bytes / seconds / 1e9, ops_per_s / 1e9, share


def _draw(llm: LLM, phases: Sequence[Phase], roof: Roof) -> str:
    dots = [
        RooflinePoint(kind, phase.title, traffic.ops_per_byte, traffic.ops / phase.seconds[kind])
        for phase in phases
        for kind, traffic in phase.traffic.items()
        if traffic.ops and phase.seconds[kind]
    ]
    rates = roof.all_threads
    peaks = {"int8": rates.int8_ops_per_s, "f32": rates.f32_ops_per_s}
    if rates.bf16_ops_per_s:
        peaks["bf16"] = rates.bf16_ops_per_s
    title = f"{llm.path.name}, {_threads(roof)}"
    return roofline_svg(title, dots, rates.read_bytes_per_s, peaks)


def _facts(llm: LLM, phases: Sequence[Phase], roof: Roof) -> dict[str, object]:
    def of(phase: Phase) -> dict[str, object]:
        kinds = {}
        for kind, seconds in phase.seconds.items():
            values = _rates(phase, kind, roof)
            names = ("gb_per_s", "gop_per_s", "share_of_roof")
            rates = (
                {n: float(f"{v:.3g}") for n, v in zip(names, values, strict=True)} if values else {}
            )
            kinds[kind] = {"share": round(seconds / phase.span_s, 4)} | rates
        return {
            "step_ms": round(1e3 * phase.span_s / phase.num_steps, 3),
            "num_draft_tokens": phase.num_draft_tokens,
            "num_accepted_tokens": phase.num_accepted_tokens,
            "kinds": kinds,
        }

    return {
        "model": llm.path.name,
        "threads": roof.threads,
        "read_gb_per_s": round(roof.all_threads.read_bytes_per_s / 1e9, 1),
        "phases": {phase.title: of(phase) for phase in phases},
    }


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One kind of work; ``series`` chooses its colour."""

    label: str
    series: str
    ops_per_byte: float
    ops_per_s: float


def roofline_svg(
    title: str, dots: Sequence[RooflinePoint], read_bytes_per_s: float, peaks: Mapping[str, float]
) -> str:
    """Return the picture.

    Args:
        title: what was measured.
        dots: the work; each series has a colour, in order of appearance.
        read_bytes_per_s: the sloping roof.
        peaks: the level roofs: name and operations per second.
    """
    series = list(dict.fromkeys(dot.series for dot in dots))
    colours = {name: svg.COLOURS[i % len(svg.COLOURS)] for i, name in enumerate(series)}
    ridges = [peak / read_bytes_per_s for peak in peaks.values()]
    xs = [*(dot.ops_per_byte for dot in dots), min(ridges) / 3, max(ridges) * 8]
    ys = [one / 1e9 for one in (*(dot.ops_per_s for dot in dots), *peaks.values())]
    across = svg.Axis("operations per byte read", min(xs) / 2, max(xs) * 2)
    up = svg.Axis("GOP/s", min(ys) / 2.5, max(ys) * 1.8)
    chart = svg.Chart(across, up, height=560, margin=128)
    low = max(across.low, up.low * 1e9 / read_bytes_per_s)  # where the slope comes in
    chart.parts += _slope(chart, low, max(ridges), read_bytes_per_s)
    for name, peak in peaks.items():
        y, begin = chart.y(peak / 1e9), chart.x(peak / read_bytes_per_s)
        label = f"{name}, {peak / 1e9:,.0f} GOP/s"
        chart.parts += [
            svg.line(begin, y, chart.right, y, svg.FAINT, 2),
            svg.text(chart.right + 8, y + 4, label, size=svg.SMALL, fill=svg.FAINT),
        ]
    for dot in dots:
        chart.dot(dot.ops_per_byte, dot.ops_per_s / 1e9, colours[dot.series])
    for dot in dots:
        chart.name(dot.ops_per_byte, dot.ops_per_s / 1e9, dot.label, colours[dot.series])
    return chart.picture(title, colours)


def _slope(chart: svg.Chart, low: float, ridge: float, read_bytes_per_s: float) -> Iterator[str]:
    """Draw the sloping roof between two numbers of operations per byte, with its name along it."""
    (x1, y1), (x2, y2) = (
        (chart.x(one), chart.y(one * read_bytes_per_s / 1e9)) for one in (low, ridge)
    )
    yield svg.line(x1, y1, x2, y2, svg.FAINT, 2)
    x, y = x1 + 0.6 * (x2 - x1) - 6, y1 + 0.6 * (y2 - y1) - 8
    turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
    label = f"memory, {read_bytes_per_s / 1e9:,.0f} GB/s"
    yield svg.text(x, y, label, size=svg.SMALL, fill=svg.FAINT, turn=turn)
