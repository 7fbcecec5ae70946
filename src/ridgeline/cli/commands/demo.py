"""The demo: prompts of different kinds answered at once, streaming side by side, then a table.

    python -m ridgeline.cli.commands.demo [MODEL]        (PROMPT=... asks one more)

It uses the public API only, except for the numbers of the table, which are the engine's records.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cpu import measure_read
from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.engine.text_processor import Message
from ridgeline.system.report import Row, Table, bold
from ridgeline.system.terminal import drawn

_COMPLETIONS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, a lighthouse keeper",
)
_QUESTIONS = (
    "Name the three primary colours.",
    "Write one sentence about the sea.",
    "What is the opposite of 'cold'?",
)
_MAX_TOKENS = 48
_PANEL_WIDTH = 38


@dataclass
class _Panel:
    """A prompt and its answer so far."""

    title: str
    prompt: str | list[Message]
    text: str = ""
    is_done: bool = False


@dataclass
class _Log:
    """The engine's records of this run."""

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def __call__(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self.requests.append(record)
        elif isinstance(record, StepRecord):
            self.steps.append(record)


def main() -> None:
    """Load the model, answer everything at once, print the table."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    start_s = time.monotonic()
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model) as llm:
        console.print(f"[dim]{llm.path.name} loaded in {time.monotonic() - start_s:.1f} s[/]")
        log = _Log()
        llm.engine.listeners.append(log)
        answers = _prompts(llm.text.can_chat)
        _stream(llm, answers, console)
        console.print(drawn(_table(answers, log)))
        used = max(step.blocks_used for step in log.steps)
        blocks = f"KV cache: at most {used} of {llm.config.num_blocks} blocks used"
        console.print(Text(blocks, style="dim italic"))
        console.print(_share_of_roof(llm, log.steps))
    console.print("[dim]Next: ridgeline run smollm2, or examples/[/]")


def _prompts(can_chat: bool) -> list[_Panel]:
    extra = [os.environ["PROMPT"]] if os.environ.get("PROMPT") else []
    answers = [_Panel(text, text) for text in _COMPLETIONS]
    for text in (*extra, *_QUESTIONS):
        chat: list[Message] = [{"role": "user", "content": text}]
        answers.append(_Panel(text, chat if can_chat else text))
    return answers


def _stream(llm: LLM, answers: list[_Panel], console: Console) -> None:
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    with Live(_panels(answers), console=console, refresh_per_second=12) as live:
        for chunk in llm.stream_many([answer.prompt for answer in answers], params):
            answer = answers[chunk.prompt_index]
            answer.text += chunk.text
            answer.is_done = chunk.finish_reason is not None
            live.update(_panels(answers))
    if not console.is_terminal:  # there the last frame does not end its line
        console.print()


def _panels(answers: list[_Panel]) -> Columns:
    panels = []
    for answer in answers:
        continued = isinstance(answer.prompt, str)
        text = Text(answer.prompt if isinstance(answer.prompt, str) else "", style="dim")
        text.append(answer.text if continued else answer.text.lstrip(), style="default not dim")
        style = "green" if answer.is_done else "yellow"
        title = "completion" if continued else answer.title
        panels.append(Panel(text, title=title, border_style=style, width=_PANEL_WIDTH, height=11))
    return Columns(panels)


def _table(answers: list[_Panel], log: _Log) -> Table:
    heads = ("prompt", "prompt tokens", "output tokens", "first token s", "tok/s")
    rows: list[Row] = []
    for answer, record in zip(answers, sorted(log.requests, key=_number), strict=True):
        first_s = record.first_token_s or record.finish_s
        generated = sum(record.num_generated)
        answering_s = record.finish_s - first_s
        rows.append(
            (
                answer.title,
                str(len(record.prompt_token_ids)),
                str(generated),
                f"{first_s - record.arrival_s:.2f}",
                f"{(generated - 1) / answering_s:.1f}" if answering_s > 0 else "-",
            )
        )
    records = log.requests
    span_s = max(r.finish_s for r in records) - min(r.arrival_s for r in records)
    total = sum(sum(record.num_generated) for record in records)
    rows.append(
        bold(
            f"together, in {len(log.steps)} steps",
            str(sum(len(record.prompt_token_ids) for record in records)),
            str(total),
            f"{span_s:.2f} in all",
            f"{total / span_s:.1f}",
        )
    )
    return Table(heads, rows)


def _share_of_roof(llm: LLM, steps: list[StepRecord]) -> Text:
    """Say how much of the available memory bandwidth decoding used."""
    decodes = [step for step in steps if not step.num_prompt_tokens]
    traffic = [kind for step in decodes for kind in llm.runner.traffic(step).values()]
    if not traffic:
        return Text("")
    read_bytes = sum(kind.read_bytes for kind in traffic)
    span_s = sum(step.duration_s for step in decodes)
    rate, roof = read_bytes / span_s, measure_read(llm.config.threads)
    return Text(
        f"Decoding read {rate / 1e9:.1f} GB/s: {rate / roof:.0%} of the {roof / 1e9:.1f} GB/s that "
        "this machine's memory just gave",
        style="dim italic",
    )


def _number(record: RequestRecord) -> int:
    return record.request_id


if __name__ == "__main__":
    main()
