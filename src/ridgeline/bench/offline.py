"""The offline benchmark: prefill and decode rates at fixed shapes, through the whole engine.

Every prompt is its own random token ids, so no prefix is shared. Rates come from the engine's step
records: prefill is the time until the last first token, decode the time after it while all run.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.progress import count_bar
from ridgeline.engine.setup.terminal import table_of_numbers

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
    table = table_of_numbers(
        "shape", "streams", "prompt", "new", "prefill tok/s", "decode tok/s", "ms/step",
        "total tok/s",
    )  # fmt: skip
    for shape in shapes:
        row = results[shape.name]
        table.add_row(
            shape.name,
            str(shape.num_streams),
            str(shape.prompt_tokens),
            str(shape.new_tokens),
            *(f"{value:,.1f}" for value in row.values()),
        )
    Console(file=sys.stdout, width=100).print(table)
