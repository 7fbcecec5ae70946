"""What drafts bring: the same answers with and without them, in turn, by kind of prompt.

Rates are of decoding alone: tokens over the time of the steps that compute no prompt. Both ways
run in one process, on one model, in alternating order, so a drift of the machine meets both.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import shlex
import statistics
import string
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.engine.llm import LLM
from ridgeline.engine.outputs import RequestOutput
from ridgeline.engine.setup.progress import count_bar
from ridgeline.system.report import Table
from ridgeline.system.terminal import console, drawn

# Functions of the standard library, which every reader of this has.
_CODE: tuple[Callable[..., Any], ...] = (
    textwrap.dedent, shlex.join, textwrap.indent, shlex.quote, inspect.cleandoc, string.capwords,
    fnmatch.filter, textwrap.shorten, statistics.fmean, shlex.split,
)  # fmt: skip
_EDIT = (
    "Here is a function:\n\n```python\n{code}```\n\nRename its first parameter to `value` and "
    "return the whole function, otherwise unchanged."
)


@dataclass
class DraftCounts:
    """What was measured of one kind of prompt."""

    off_tokens_per_s: list[float] = field(default_factory=list)
    on_tokens_per_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0  # of sequences, with drafts on
    num_drafts: int = 0
    num_accepted: int = 0
    num_changed: int = 0  # answers that drafts changed

    def summary(self) -> dict[str, float]:
        """Return the medians and means that the table shows."""
        ratios = [
            on / off for on, off in zip(self.on_tokens_per_s, self.off_tokens_per_s, strict=True)
        ]
        return {
            "off_tokens_per_s": round(statistics.median(self.off_tokens_per_s), 1),
            "on_tokens_per_s": round(statistics.median(self.on_tokens_per_s), 1),
            "speedup": round(statistics.median(ratios), 3),
            "least_speedup": round(min(ratios), 3),
            "tokens_per_step": round(self.num_tokens / max(self.num_steps, 1), 2),
            "drafts_per_step": round(self.num_drafts / max(self.num_steps, 1), 2),
            "accepted": round(self.num_accepted / max(self.num_drafts, 1), 2),
            "changed": self.num_changed,
        }


def bench_speculation(
    llm: LLM,
    *,
    prompts: Path | None,
    num_prompts: int,
    new_tokens: int,
    streams: Sequence[int],
    temperature: float,
) -> None:
    """Measure each kind of prompt at each number of streams; print a table, then JSON.

    Args:
        llm: with speculation.
        prompts: JSON lines with ``category`` and ``turns``, of which the first is asked; without a
            file only code edits are measured.
        num_prompts: of each category.
        new_tokens: most tokens of an answer.
        streams: how many prompts run at once.
        temperature: of all answers.

    Raises ValueError if a line of the file is something else.
    """
    kinds = prompts_by_kind(prompts)
    params = SamplingParams(temperature=temperature, max_tokens=new_tokens, seed=1)
    measured = {(kind, n): DraftCounts() for kind in kinds for n in streams}
    with count_bar("Measuring", note="runs") as report:
        for done, (kind, n) in enumerate(measured):
            report(done, len(measured))
            for batch in _batches(_encoded(llm, kinds[kind][:num_prompts], new_tokens), n):
                _compare(llm, batch, params, measured[kind, n])
    measured = {key: counts for key, counts in measured.items() if counts.on_tokens_per_s}
    _print(measured)
    config = {"model": llm.path.name, "threads": llm.config.threads, "temperature": temperature}
    result = {f"{kind}, {n}": counts.summary() for (kind, n), counts in measured.items()}
    print(json.dumps(config | {"results": result}))


def prompts_by_kind(path: Path | None) -> dict[str, list[str]]:
    """Return code edits, and the first turns of a file's lines by their category.

    Raises ValueError if a line of the file is something else.
    """
    return {"code edit": _code_edits()} | (_read(path) if path else {})


def _read(path: Path) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            kinds.setdefault(entry["category"], []).append(entry["turns"][0])
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{path}, line {number}: no JSON with category and turns") from None
    return kinds


def _code_edits() -> list[str]:
    return [_EDIT.format(code=inspect.getsource(function)) for function in _CODE]


def _encoded(llm: LLM, texts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Return the prompts that fit."""
    template = llm.text.chat_template
    ids = [
        template.render_ids([{"role": "user", "content": text}])
        if llm.text.can_chat
        else llm.text.encode(text)
        for text in texts
    ]
    return [prompt for prompt in ids if len(prompt) + new_tokens <= llm.config.max_model_len]


def _batches(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Yield whole batches; where there are too few prompts, some are in it twice."""
    if prompts:
        for begin in range(0, max(len(prompts) - size, 0) + 1, size):
            yield [prompts[i % len(prompts)] for i in range(begin, begin + size)]


def _compare(llm: LLM, batch: list[list[int]], params: SamplingParams, counts: DraftCounts) -> None:
    """Answer a batch without drafts and with them, the other way round next time."""
    speculation = llm.engine.scheduler.speculation
    rates: dict[bool, float] = {}
    texts: dict[bool, list[tuple[int, ...]]] = {}
    is_on_first = len(counts.on_tokens_per_s) % 2 == 1
    for is_on in (is_on_first, not is_on_first):
        llm.engine.scheduler.speculation = speculation if is_on else None
        steps: list[StepRecord] = []

        def keep(record: Record, steps: list[StepRecord] = steps) -> None:
            if isinstance(record, StepRecord) and not record.num_prompt_tokens:
                steps.append(record)

        llm.engine.listeners.append(keep)
        try:
            outputs = llm.generate(batch, params, progress=False)
        finally:
            llm.engine.listeners.remove(keep)
            llm.engine.scheduler.speculation = speculation
        num_tokens = sum(len(tokens) for step in steps for tokens in step.sampled)
        rates[is_on] = num_tokens / max(sum(step.duration_s for step in steps), 1e-9)
        texts[is_on] = [output.outputs[0].token_ids for output in outputs]
        if is_on:
            counts.num_tokens += num_tokens
            counts.num_steps += sum(len(step.work) for step in steps)
            _count(outputs, counts)
    counts.off_tokens_per_s.append(rates[False])
    counts.on_tokens_per_s.append(rates[True])
    counts.num_changed += sum(a != b for a, b in zip(texts[False], texts[True], strict=True))


def _count(outputs: list[RequestOutput], counts: DraftCounts) -> None:
    counts.num_drafts += sum(output.num_draft_tokens for output in outputs)
    counts.num_accepted += sum(output.num_accepted_tokens for output in outputs)


def _print(measured: dict[tuple[str, int], DraftCounts]) -> None:
    heads = (
        "prompts", "streams", "off tok/s", "on tok/s", "speed-up", "least", "tokens/step",
        "drafts/step", "right", "changed",
    )  # fmt: skip
    rows = [
        (kind, str(n), *(f"{value:g}" for value in counts.summary().values()))
        for (kind, n), counts in measured.items()
    ]
    console(100).print(drawn(Table(heads, rows), whole=(0,)))
