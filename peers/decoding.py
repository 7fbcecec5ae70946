"""What a schema and what a beam search cost, in Ridgeline and in its peers.

    python -m peers.decoding schema|beams [--model smollm2] [--without vllm] [--rounds 3]
                             [--quick] [--anyway]

Every engine is compared with itself, in one process: answers that follow a JSON schema with free
ones of the same prompts, or a beam search with a batch of as many equal prompts. Prompts are
conversations in the model's own chat template; other ones in each round. The schema is a list of at
least forty objects, so no answer ends before it is cut, and every object that an answer has
finished is checked against it. Ridgeline runs with drafts, as it does unless told, and without; of
each peer the format that is the fastest of its formats. Printed is a markdown table with the
medians of the rounds' ratios; the last line on standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]

from peers import machine
from peers.__main__ import Contest, model_file, printer, wait_until_quiet
from peers.engines import OURS, Engine, Format, LeftOut, chosen
from peers.flags import add_common
from peers.report import engine_of
from peers.shapes import Job, Shape

_FASTEST = {"llama.cpp": "Q4_0", "openvino": "int4", "vllm": "int8"}
_NEW_TOKENS, _MANY, _BEAMS = 96, 64, 4
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "trade": {"enum": ["baker", "carpenter", "doctor", "farmer", "teacher"]},
        "languages": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 16},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "trade", "languages"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _PERSON, "minItems": 40}
_PLACES = ("village", "harbour town", "market town", "mountain hut", "monastery", "ship", "school")
_NAMES = (
    "Elmbrook", "Harrow", "Saltwick", "Marden", "Oakhurst", "Thornby", "Westmere", "Yarrow",
    "Langdale", "Foxley", "Greyfell", "Ravensby", "Stonebeck", "Winterley", "Ashcombe", "Brackley",
)  # fmt: skip


class Pair(NamedTuple):
    """Two shapes of one process, and how they stand in the table."""

    title: str
    plain: Shape
    changed: Shape


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one table compares.

    Attributes:
        pairs: of shapes.
        unit: of the numbers in the table: tokens per second of all streams, or ms per step.
        columns: the names of a pair's two numbers.
        equal_prompts: whether the prompts of a round are all the same one.
    """

    pairs: tuple[Pair, ...]
    unit: str
    columns: tuple[str, str]
    equal_prompts: bool

    @property
    def job_shapes(self) -> tuple[Shape, ...]:
        """The shapes in the order of measuring: the two of a pair in turn."""
        return tuple(
            replace(shape, samples=1)
            for pair in self.pairs
            for _ in range(pair.plain.samples)
            for shape in (pair.plain, pair.changed)
        )

    def number(self, shape: Shape, rate: float) -> float:
        """Return the table's number for a rate, tokens per second."""
        return rate if self.unit == "tokens/s" else 1e3 * shape.counted_tokens / (
            shape.new_tokens * rate
        )  # fmt: skip


def comparison(part: str, longest: int, *, quick: bool = False) -> Comparison:
    """Return what ``part``, "schema" or "beams", compares, for prompts of up to ``longest``."""
    many = 4 if quick else _MANY
    if part == "schema":
        one = Shape("single_free", "decode", 1, longest, _NEW_TOKENS, samples=1 if quick else 3)
        all_ = replace(one, name=f"batch{many}_free", num_streams=many, samples=1)
        schema = json.dumps(SCHEMA)
        pairs = (
            Pair("1 stream", one, replace(one, name="single_schema", schema=schema)),
            Pair(f"{many} streams", all_, replace(all_, name=f"batch{many}_schema", schema=schema)),
        )
        return Comparison(pairs, "tokens/s", ("free", "constrained"), equal_prompts=False)
    batch = Shape("batch", "decode", _BEAMS, longest, _NEW_TOKENS, samples=1 if quick else 3)
    beams = replace(batch, name="beams", num_streams=1, beams=_BEAMS)
    pair = Pair(f"width {_BEAMS}", batch, beams)
    return Comparison((pair,), "ms per step", (f"batch of {_BEAMS}", "beams"), equal_prompts=True)


def conversations() -> list[str]:
    """Return what the prompts ask, all different."""
    ask = "Invent the people of a {} called {}. List at least forty of them as JSON, each with "
    ask += "name, age, trade and languages."
    return [ask.format(place, name) for place in _PLACES for name in _NAMES]


def num_objects(text: str) -> int:
    """Return how many objects an answer finished before it was cut.

    Raises:
        ValueError: the text does not begin as the schema has it, or an object breaks the schema.
    """
    text = text.lstrip()
    if not text.startswith("["):
        raise ValueError(f"no list: {text:.60}")
    decoder, check, count = json.JSONDecoder(), jsonschema.Draft202012Validator(_PERSON), 0
    unread = text[1:].lstrip()
    while True:
        try:
            person, end = decoder.raw_decode(unread)
        except ValueError:  # cut here
            if unread and not unread.startswith("{"):
                raise ValueError(f"no object: {unread:.60}") from None
            return count
        if error := next(check.iter_errors(person), None):
            raise ValueError(f"object {count}: {error.message}")
        count += 1
        unread = unread[end:].lstrip()
        if unread and not unread.startswith(","):
            raise ValueError(f"after object {count}: {unread:.60}")
        unread = unread[1:].lstrip()


def engines(part: str, without: Sequence[str]) -> list[Engine]:
    """Return who takes part, each in the formats that are compared.

    Raises:
        ValueError: an excluded name is no peer.
    """
    formats: tuple[Format, ...] = (Format("file"),)  # a beam search has no drafts
    if part == "schema":
        formats = (Format("file", drafts=True), Format("file without drafts"))
    # llama.cpp has no beam search.
    peers = [p for p in chosen(without) if part == "schema" or p.name != "llama.cpp"]
    fastest = [
        replace(p, formats=tuple(f for f in p.formats if f.name == _FASTEST[p.name])) for p in peers
    ]
    return [replace(OURS, formats=formats), *fastest]


Rounds = list[dict[str, list[float]]]  # of one label: rates by shape
Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Held:
    """Constrained answers that were checked, the objects that they finished, those without any."""

    answers: int = 0
    objects: int = 0
    without_objects: int = 0

    def check(self, texts: Iterable[str]) -> None:
        """Count what answers hold. Raises ValueError if one breaks the schema."""
        for text in texts:
            objects = num_objects(text)
            self.answers += 1
            self.objects += objects
            self.without_objects += not objects

    def __str__(self) -> str:
        return (
            f"{self.answers} answers follow the schema, {self.objects} objects finished, "
            f"{self.without_objects} answers without one"
        )


def summarise(asked: Comparison, rounds: Mapping[str, Rounds]) -> dict[str, dict[str, Any]]:
    """Return by label and pair the medians of both numbers, and of the ratios of the rounds.

    A ratio is that of a round's medians, the changed number over the plain one. A pair that a
    neighbour spoilt in every round is missing.
    """
    table: dict[str, dict[str, Any]] = {}
    for label, measured in rounds.items():
        row = table.setdefault(label, {})
        for pair in asked.pairs:
            both = [
                tuple(asked.number(shape, statistics.median(one[shape.name])) for shape in pair[1:])
                for one in measured
                if one.get(pair.plain.name) and one.get(pair.changed.name)
            ]
            if both:
                ratios = [changed / plain for plain, changed in both]
                row[pair.title] = {
                    "plain": round(statistics.median(plain for plain, _ in both), 2),
                    "changed": round(statistics.median(changed for _, changed in both), 2),
                    "ratio": round(statistics.median(ratios), 3),
                    "min": round(min(ratios), 3),
                    "max": round(max(ratios), 3),
                    "n": len(both),
                }
    return table


def markdown(asked: Comparison, table: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table."""
    plain, changed = asked.columns
    head = [asked.unit]
    for pair in asked.pairs:
        head += [f"{pair.title}: {plain}", changed, "ratio (rounds)"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, row in table.items():
        cells = [label]
        for pair in asked.pairs:
            cell = row.get(pair.title)
            cells += ["-"] * 3 if cell is None else [
                f"{cell['plain']:.1f}",
                f"{cell['changed']:.1f}",
                f"**{cell['ratio']:.2f}** ({cell['min']:.2f} to {cell['max']:.2f})",
            ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def prompts_of(source: Path) -> tuple[list[tuple[int, ...]], Decode]:
    """Return every conversation as the model's token ids, and what turns ids into text."""
    from ridgeline.engine.text_processor import TextProcessor
    from ridgeline.model.files.checkpoint import load_checkpoint

    side = TextProcessor(load_checkpoint(source), {})
    render = side.chat_template.render_ids
    try:
        ids = [tuple(render([{"role": "user", "content": text}])) for text in conversations()]
    finally:
        side.close()
    return ids, side.tokenizer.decode


def compare(
    contest: Contest, asked: Comparison, rounds: int, ids: Sequence[tuple[int, ...]], decode: Decode
) -> tuple[dict[str, Rounds], dict[str, Held]]:
    """Measure round after round; return the rates, and what constrained answers held.

    An engine whose answer breaks the schema is left out.
    """
    rng = random.Random()
    rates: dict[str, Rounds] = {}
    held: dict[str, Held] = {}
    streams = max(shape.num_streams for shape in asked.job_shapes)
    for number in range(1, rounds + 1):
        wait_until_quiet(contest, f"before round {number}")
        prompts = [rng.choice(ids)] * streams if asked.equal_prompts else rng.sample(ids, streams)
        contest.job = replace(contest.job, texts=tuple(prompts))
        for label in list(contest.running):
            contest.say(f"Round {number} of {rounds}: {label}")
            before = machine.read_stat()
            try:
                _, measured = contest.process(label, asked.job_shapes)
                for pair in asked.pairs:
                    if pair.changed.schema:
                        texts = map(decode, measured["answers"][pair.changed.name])
                        held.setdefault(label, Held()).check(texts)
            except (LeftOut, ValueError) as error:
                contest.leave_out(label, str(error))
                rates.pop(label, None)
                held.pop(label, None)
                continue
            share = machine.stolen_share(before, machine.read_stat())
            contest.note_stolen(number, label, share)
            contest.versions[engine_of(label)] = measured["version"]
            rates.setdefault(label, []).append(measured["samples"])
    return rates, held


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers.decoding", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", choices=("schema", "beams"))
    add_common(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison.

    Raises:
        SystemExit: the machine is busy, an argument is wrong, or Ridgeline itself fails.
    """
    flags = _arguments(argv)
    try:
        taking_part = engines(flags.part, flags.without)
        source, vocab_size = model_file(flags.model)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not flags.anyway and (reason := machine.refusal(machine.sample_busy_cores())):
        raise SystemExit(reason)
    contest = Contest(Job("", flags.threads, vocab_size, 0, ()), printer())
    for engine in taking_part:
        contest.enter(engine, source)
    ids, decode = prompts_of(source)
    asked = comparison(flags.part, max(map(len, ids)), quick=flags.quick)
    rates, held = compare(contest, asked, flags.rounds, ids, decode)
    if flags.quick:
        contest.notes.append("--quick: few streams, these numbers mean nothing")
    table = summarise(asked, rates)
    print(markdown(asked, table))
    for label, counts in held.items():
        print(f"\n{label}: {counts}")
    for note in [
        f"Left out: {who}: {why}" for who, why in contest.left_out.items()
    ] + contest.notes:
        print(f"\n{note}")
    result = {
        "results": table,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "peers.decoding", *(argv or sys.argv[1:])]),
        "model": source.name,
        "rounds": flags.rounds,
        "prompt_tokens": [min(map(len, ids)), max(map(len, ids))],
        "machine": machine.description(),
        "versions": contest.versions,
        "held": {label: asdict(counts) for label, counts in held.items()},
        "stolen": contest.stolen,
        "left_out": contest.left_out,
        "notes": contest.notes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
