"""What prompt lookup brings, in Ridgeline and in its peers, and how many answers it changes.

    python -m peers.drafts [--prompts FILE.jsonl] [--per-kind 5] [--model smollm2]
                           [--without vllm] [--rounds 3] [--quick] [--anyway]

Every engine is compared with itself: one stream, greedy, without drafts and with its own prompt
lookup, a process each, in turn. The prompts are code edits and, with a file of JSON lines that
have ``category`` and ``turns``, the first ones of each category, in the model's own chat template.
A rate is of decoding alone, past any end of text. Printed is a markdown table of rates, of the
medians of the ratios, prompt by prompt, and of the answers that drafts changed; the last line on
standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers import machine
from peers.__main__ import Contest, model_file, printer, wait_until_quiet
from peers.engines import OURS, Engine, Format, LeftOut, chosen
from peers.flags import add_common
from peers.report import engine_of
from peers.shapes import Job, Shape
from ridgeline.bench.speculation import prompts_by_kind

_NEW_TOKENS = 96
_FASTEST = {"llama.cpp": "file", "openvino": "int4", "vllm": "int8"}
_DRAFTS = " with drafts"
TRANSFORMERS = Engine(
    "transformers",
    "transformers",
    (Format("f32", "hf-bf16"),),
    ("transformers==5.23.0", "torch==2.13.0"),
    hint="it wants torch 2.13.0+cpu: name an index that has it in PIP_EXTRA_INDEX_URL",
)


@dataclass(slots=True)
class Kind:
    """What was measured of one engine with one kind of prompt."""

    off_tokens_per_s: list[float] = field(default_factory=list)
    on_tokens_per_s: list[float] = field(default_factory=list)
    num_answers: int = 0
    num_changed: int = 0

    def add(self, name: str, off: Mapping[str, Any], on: Mapping[str, Any]) -> None:
        """Add a prompt's shape as two processes measured it."""
        if off["samples"][name] and on["samples"][name]:
            self.off_tokens_per_s += off["samples"][name]
            self.on_tokens_per_s += on["samples"][name]
        self.num_answers += 1
        self.num_changed += off["answers"][name] != on["answers"][name]

    def summary(self) -> dict[str, float]:
        """Return the medians of both rates and of the ratios, and what changed."""
        pairs = zip(self.on_tokens_per_s, self.off_tokens_per_s, strict=True)
        ratios = [on / off for on, off in pairs]
        return {
            "off": round(statistics.median(self.off_tokens_per_s), 1),
            "on": round(statistics.median(self.on_tokens_per_s), 1),
            "ratio": round(statistics.median(ratios), 3),
            "answers": self.num_answers,
            "changed": self.num_changed,
        }


def engines(without: Sequence[str]) -> list[Engine]:
    """Return who takes part, each in one format, without drafts and with them.

    Raises:
        ValueError: an excluded name is no peer.
    """
    extra = [] if TRANSFORMERS.name in without else [TRANSFORMERS]
    peers = chosen([name for name in without if name != TRANSFORMERS.name])
    fast = [(p, next(f for f in p.formats if f.name == _FASTEST[p.name])) for p in peers]
    pairs = [(OURS, Format("file")), *fast, *((p, p.formats[0]) for p in extra)]
    return [
        replace(engine, formats=(form, replace(form, name=form.name + _DRAFTS, drafts=True)))
        for engine, form in pairs
    ]


def shapes_of(kinds: Mapping[str, Sequence[Sequence[int]]], new_tokens: int) -> dict[str, Shape]:
    """Return a shape for each prompt, as "kind, number"; the texts are those of all kinds."""
    named = [
        (f"{kind}, {i}", text) for kind, texts in kinds.items() for i, text in enumerate(texts, 1)
    ]
    return {
        name: Shape(name, "decode", 1, len(text), new_tokens, first_text=i)
        for i, (name, text) in enumerate(named)
    }


def encoded(source: Path, kinds: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[int, ...]]]:
    """Return the prompts as token ids of a conversation with the model."""
    from ridgeline.engine.text_processor import TextProcessor
    from ridgeline.model.files.checkpoint import load_checkpoint

    side = TextProcessor(load_checkpoint(source), {})
    render = side.chat_template.render_ids
    try:
        return {
            kind: [tuple(render([{"role": "user", "content": text}])) for text in texts]
            for kind, texts in kinds.items()
        }
    finally:
        side.close()


def compare(
    contest: Contest, shapes: Mapping[str, Shape], rounds: int
) -> dict[str, dict[str, Kind]]:
    """Measure round after round; return what was measured by label and kind of prompt."""
    table: dict[str, dict[str, Kind]] = {}
    for number in range(1, rounds + 1):
        wait_until_quiet(contest, f"before round {number}")
        for label in [label for label in contest.running if not label.endswith(_DRAFTS)]:
            contest.say(f"Round {number} of {rounds}: {label}")
            before = machine.read_stat()
            try:
                off, on = (contest.process(who, tuple(shapes.values()))[1] for who in _both(label))
            except LeftOut as error:
                for who in _both(label):
                    contest.leave_out(who, str(error))
                table.pop(label, None)
                continue
            contest.note_stolen(number, label, machine.stolen_share(before, machine.read_stat()))
            contest.versions[engine_of(label)] = on["version"]
            for name in shapes:
                kind = name.rpartition(", ")[0]
                table.setdefault(label, {}).setdefault(kind, Kind()).add(name, off, on)
    return table


def _both(label: str) -> Iterator[str]:
    yield label
    yield label + _DRAFTS


def markdown(table: Mapping[str, Mapping[str, Mapping[str, float]]], kinds: Sequence[str]) -> str:
    """Return the table: rates off and on, their ratio, and the answers that changed."""
    head = ["tokens/s off, on: ratio", *kinds, "answers changed"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, row in table.items():
        cells = [
            f"{row[kind]['off']:.0f}, {row[kind]['on']:.0f}: **{row[kind]['ratio']:.2f}**"
            for kind in kinds
        ]
        changed = sum(row[kind]["changed"] for kind in kinds)
        answers = sum(row[kind]["answers"] for kind in kinds)
        lines.append(f"| {label} | " + " | ".join(cells) + f" | {changed} of {answers} |")
    return "\n".join(lines)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers.drafts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines, by category")
    parser.add_argument("--kind", action="append", default=[], help="only these categories")
    parser.add_argument("--per-kind", type=int, default=5, metavar="N", help="prompts of each kind")
    add_common(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison.

    Raises:
        SystemExit: the machine is busy, an argument is wrong, or Ridgeline itself fails.
    """
    flags = _arguments(argv)
    try:
        taking_part = engines(flags.without)
        texts = prompts_by_kind(flags.prompts)
        if unknown := [kind for kind in flags.kind if kind not in texts]:
            raise ValueError(f"--kind {unknown[0]}: the kinds are {', '.join(texts)}")
        source, vocab_size = model_file(flags.model)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    if not flags.anyway and (reason := machine.refusal(machine.sample_busy_cores())):
        raise SystemExit(reason)
    chosen_kinds = {kind: texts[kind][: flags.per_kind] for kind in flags.kind or texts}
    ids = encoded(source, chosen_kinds)
    job = Job(
        "", flags.threads, vocab_size, 0, (), texts=tuple(t for all_ in ids.values() for t in all_)
    )
    contest = Contest(job, printer())
    for engine in taking_part:
        contest.enter(engine, source)
    measured = compare(contest, shapes_of(ids, 8 if flags.quick else _NEW_TOKENS), flags.rounds)
    if flags.quick:
        contest.notes.append("--quick: few tokens, these numbers mean nothing")
    table = {
        label: {kind: row.summary() for kind, row in rows.items() if row.off_tokens_per_s}
        for label, rows in measured.items()
    }
    print(markdown(table, [kind for kind in ids if all(kind in row for row in table.values())]))
    left_out = [f"Left out: {who}: {why}" for who, why in contest.left_out.items()]
    for note in left_out + contest.notes:
        print(f"\n{note}")
    result = {
        "results": table,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "peers.drafts", *(argv or sys.argv[1:])]),
        "model": source.name,
        "rounds": flags.rounds,
        "machine": machine.description(),
        "versions": contest.versions,
        "stolen": contest.stolen,
        "left_out": contest.left_out,
        "notes": contest.notes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
