"""Drawings of real runs: of recordings, and of the program's scheduler under a virtual clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drawing import WIDTH, arrow, box, colour_of, heading, light, word

from ridgeline.core.decoding.search import Beams
from ridgeline.core.engine import Engine, new_scheduler
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord
from ridgeline.core.step import SeqId, Step, StepOutput
from ridgeline.engine.setup.home import stores
from ridgeline.foresight.simulator.run import (
    Clock,
    ClockHooks,
    Replica,
    SimRequest,
    TimeModel,
    VirtualRunner,
    serve,
)
from ridgeline.planner import PlanFlags
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.single_device import on_device
from ridgeline.system import svg

BLOCK = 16  # tokens
NUM_BLOCKS = 48  # of the small cache in which requests are drawn
LONGEST = 112  # tokens of an answer, as far as its client allows
WORDS_SHOWN = 6  # steps of a beam search that are drawn


class Seen(NamedTuple):
    """A step of a run: when it began and ended, in seconds, and what was computed."""

    begin_s: float
    end_s: float
    step: Step


class NotingRunner(VirtualRunner):
    """A runner that keeps all steps.

    Attributes:
        seen: in order.
    """

    def __init__(self, clock: Clock, times: TimeModel, end: int) -> None:
        """Begin without any."""
        super().__init__(clock, times, end)
        self._now_s, self.seen = clock, list[Seen]()

    def execute(self, step: Step) -> StepOutput:
        """Let the step's time pass, and keep the step."""
        begin_s = self._now_s()
        output = super().execute(step)
        self.seen.append(Seen(begin_s, self._now_s(), step))
        return output


def run(load: Sequence[SimRequest], policy: str, **settings: Any) -> list[Seen]:
    """Serve a load with Llama 3.1 8B on an L4, as far as it can be known; return all steps."""
    replica = on_device(read_model_spec("llama-3.1-8b.json", stores()), PlanFlags(on="l4"))
    usual: dict[str, Any] = {
        "block_size": BLOCK, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 2048,
        "max_num_seqs": 16, "max_model_len": 2048, "enable_prefix_caching": False, "seed": 0,
        "eos_ids": (-1,),
    }  # fmt: skip
    engine_record = EngineRecord(policy=policy, **usual | settings)
    clock = Clock()
    runner = NotingRunner(clock, replica.latency_model.times, -1)
    engine = Engine(
        new_scheduler(engine_record), runner, clock,
        max_model_len=engine_record.max_model_len, eos_ids=(-1,), seed=0,
    )  # fmt: skip
    serve(Replica(engine, runner.note), load, ClockHooks(clock, clock.wait_until))
    return runner.seen


def _asked(num_prompt: int, num_new: int, at_s: float = 0.0, word_of: int = 1) -> SimRequest:
    """Return a request whose prompt is of one word; equal ones are never shared here."""
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST)
    prompt = (word_of,) * num_prompt
    return SimRequest(prompt=prompt, num_new=(num_new,), arrival_s=at_s, params=params)


# Ten requests: short prompts, answers of many lengths; one comes later, with a long prompt.
LOAD = [
    *(_asked(16, num_new) for num_new in (6, 30, 10, 22, 8, 28, 12, 18)),
    _asked(480, 6, at_s=0.6),
    _asked(16, 14, at_s=0.6),
]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("static", {"max_num_seqs": 4, "reserve_full": True}),
    "after each step": ("orca", {"reserve_full": True}),
    "and in blocks": ("orca", {"reserve_full": False}),
    "and in pieces": ("splitfuse", {"max_num_batched_tokens": 96}),
}


def slots() -> tuple[list[str], str]:
    """Draw who has which slot, in which step, in four ways of batching."""
    runs = {name: run(LOAD, policy, **given) for name, (policy, given) in WAYS.items()}
    lines = [f"{'way':18} steps    all, s   in a step   longest step, ms"]
    for name, seen in runs.items():
        mean = sum(len(one.step.work) for one in seen) / len(seen)
        longest = max(one.end_s - one.begin_s for one in seen)
        lines.append(
            f"{name:18} {len(seen):5} {seen[-1].end_s:9.2f} {mean:11.1f} {1e3 * longest:18.0f}"
        )
    note = "A row is a slot, a box a step: dark for a prompt, light for an answer. Grey is empty."
    parts, y = heading("Who has a slot in which step", note), 84.0
    most_s = max(seen[-1].end_s for seen in runs.values())
    for name, seen in runs.items():
        y = _slots_of(name, seen, y, (WIDTH - 190) / most_s, parts)
    for tick in range(int(most_s) + 1):
        x = 160 + tick * (WIDTH - 190) / most_s
        parts.append(svg.text(x, y + 10, f"{tick} s", size=svg.SMALL, anchor="middle"))
    return lines, svg.picture(WIDTH, int(y) + 28, parts)


def _slots_of(name: str, seen: list[Seen], y: float, per_s: float, parts: list[str]) -> float:
    """Draw one way from ``y`` on; return where the next may begin."""
    places: dict[SeqId, int] = {}
    most = max(len(one.step.work) for one in seen)
    wide = seen[-1].end_s * per_s
    parts += [box(160, y + 12 * place, wide, 12, "#eaeef2", "empty") for place in range(most)]
    for one in seen:
        now = [work.seq_id for work in one.step.work]
        places = {seq: place for seq, place in places.items() if seq in now}
        for work in one.step.work:
            free = (i for i in range(99) if i not in places.values())
            place = places.setdefault(work.seq_id, next(free))
            is_prompt = work.start < work.sampling.prompt_len
            colour = colour_of(work.seq_id[0])
            title = f"request {work.seq_id[0]}: {len(work.tokens)} tokens"
            parts.append(box(160 + one.begin_s * per_s, y + 12 * place,
                             (one.end_s - one.begin_s) * per_s, 12,
                             colour if is_prompt else light(colour, 0.5), title))  # fmt: skip
    parts.append(svg.text(24, y + 14, name))
    parts.append(svg.text(24, y + 30, f"{len(seen)} steps", size=svg.SMALL, fill=svg.FAINT))
    end = 160 + seen[-1].end_s * per_s
    parts.append(svg.line(end, y - 2, end, y + 12 * most + 2, svg.INK, 1.5))
    return y + max(12 * most, 36) + 22


def memory_blocks() -> tuple[list[str], str]:
    """Draw the same small cache with room reserved, and with blocks that are given when needed."""
    lines, parts = [f"{'':20} requests   blocks taken   tokens in them   of the room"], heading(
        f"A cache of {NUM_BLOCKS} blocks, each with room for {BLOCK} tokens",
        "A colour is a request. Dark is what it has filled, light what it keeps for later.",
    )  # fmt: skip
    load = [_asked(16, num_new) for num_new in (60, 40, 72, 50, 64, 44, 70, 56, 48, 66, 52, 58)]
    for i, (name, is_reserved) in enumerate((("reserved", True), ("when needed", False))):
        seen = run(load, "orca", reserve_full=is_reserved)
        one = seen[36]
        held = {w.seq_id[0]: (w.table, w.start + len(w.tokens)) for w in one.step.work}
        blocks = sum(len(table) for table, _ in held.values())
        tokens = sum(count for _, count in held.values())
        share = tokens / (blocks * BLOCK)
        lines.append(f"{name:20} {len(held):8} {blocks:14} {tokens:16,} {share:13.0%}")
        left = 24 + i * 446
        said = f"{name}: {len(held)} requests, {share:.0%} of what they hold is filled"
        parts.append(svg.text(left, 88, said))
        parts += _pool(held, left, 102)
    return lines, svg.picture(WIDTH, 330, parts)


def _pool(held: Mapping[int, tuple[Sequence[int], int]], left: float, top: float) -> list[str]:
    """Return the blocks of a cache, those that are taken in the colours of their requests."""
    owner = {
        block: (request, place)
        for request, (table, _) in held.items()
        for place, block in enumerate(table)
    }
    parts, side = [], 50
    for block in range(NUM_BLOCKS):
        x, y = left + block % 8 * side, top + block // 8 * 34
        if block not in owner:
            parts.append(box(x, y, side, 34, "#f6f8fa", f"block {block} is free", svg.GRID))
            continue
        request, place = owner[block]
        filled = min(BLOCK, max(0, held[request][1] - place * BLOCK)) / BLOCK
        colour, title = colour_of(request), f"block {block}: request {request}, {filled:.0%} full"
        parts.append(box(x, y, side, 34, light(colour, 0.75), title))
        if filled:
            parts.append(box(x, y, side * filled, 34, colour, title))
    return parts


def block_table() -> tuple[list[str], str]:
    """Draw the tables of three requests, of which two begin alike, and where their blocks lie."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    same, words = tuple(range(100, 132)), ("first", "second", "third")
    load = [
        SimRequest(prompt=prompt, num_new=(30,), arrival_s=at_s, params=params)
        for prompt, at_s in (
            ((*same, *range(200, 208)), 0.0),
            ((*same, *range(300, 310)), 0.5),
            (tuple(range(400, 420)), 0.5),
        )
    ]
    seen = run(load, "splitfuse", enable_prefix_caching=True)
    three = [one.step for one in seen if len(one.step.work) == 3]
    tables = {w.seq_id[0]: (w.table, w.start + len(w.tokens)) for w in three[12].work}
    shared = Counter(block for table, _ in tables.values() for block in table)
    lines = [f"{'request':8} tokens   blocks of its table"]
    lines += [f"{words[request]:8} {count:6}   {', '.join(map(str, table))}"
              for request, (table, count) in sorted(tables.items())]  # fmt: skip
    note = f"A block has room for {BLOCK} tokens. Light: room that is left. Two colours: shared."
    parts = heading("A table says where the blocks of each request are", note)
    used = sorted(shared)
    place = {block: (470 + i % 4 * 96, 110 + i // 4 * 64) for i, block in enumerate(used)}
    for request, (table, count) in sorted(tables.items()):
        y = 110 + request * 64
        parts.append(svg.text(24, y + 20, words[request]))
        parts.append(svg.text(24, y + 36, f"{count} tokens", size=svg.SMALL, fill=svg.FAINT))
        for i, block in enumerate(table):
            x, fill = 110 + i * 52, light(colour_of(request), 0.6)
            parts += [box(x, y, 50, 40, fill), word(x + 25, y + 25, str(block), size=14)]
    parts.append(svg.text(110, 96, "table", size=svg.SMALL))
    parts.append(svg.text(470, 96, "memory", size=svg.SMALL))
    for block, (x, y) in place.items():
        owners = [request for request, (table, _) in sorted(tables.items()) if block in table]
        for i, request in enumerate(owners):
            part, (table, count) = 92 / len(owners), tables[request]
            filled = min(BLOCK, count - table.index(block) * BLOCK) / BLOCK
            for share, white in ((1.0, 0.8), (filled, 0.3)):
                fill = light(colour_of(request), white)
                parts.append(box(x + i * part, y, part * share, 40, fill, "", fill))
        parts.append(word(x + 46, y + 25, f"block {block}", size=14))
    return lines, svg.picture(WIDTH, 320, parts)


def _records(name: str, kind: str) -> Iterator[dict[str, Any]]:
    for line in Path(name).read_text(encoding="utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        if record["type"] == kind:
            yield record


def _words() -> dict[int, str]:
    """Return the texts of tokens that the drawings show."""
    found = json.loads(Path("words.json").read_text(encoding="utf-8"))
    return {int(token): text for token, text in found.items()}


def cache_grows() -> tuple[list[str], str]:
    """Draw how many tokens of each request are in the cache, over the steps of a recording."""
    steps = list(_records("busy.jsonl", "step"))
    begin_s = steps[0]["start_s"]
    prompts = {one["request_id"]: len(one["prompt_token_ids"])
               for one in _records("busy.jsonl", "request")}  # fmt: skip
    kept: list[tuple[float, dict[int, int]]] = []
    for one in steps:
        now = {seq[0]: start + count for seq, start, count in one["work"]}
        kept.append((one["start_s"] - begin_s, now))
    longest = max(prompts, key=lambda request: prompts[request])
    sizes = [now[longest] for _, now in kept if longest in now]
    most_s, most = max(kept, key=lambda one: sum(one[1].values()))
    lines = [
        f"request {longest}: its prompt has {prompts[longest]} tokens, and in the end "
        f"{sizes[-1]} are in the cache",
        f"after {most_s:.2f} s the cache holds most: {sum(most.values()):,} tokens of "
        f"{len(most)} requests",
    ]
    top = sum(most.values())
    chart = svg.Chart(
        svg.Axis("seconds", 0, kept[-1][0], is_log=False),
        svg.Axis("tokens in the cache", 0, top * 1.05, is_log=False), height=440,
    )  # fmt: skip
    for i, (at_s, now) in enumerate(kept):
        end_s = kept[i + 1][0] if i + 1 < len(kept) else at_s + 0.005
        below = 0
        for request, count in sorted(now.items()):
            x, y = chart.x(at_s), chart.y(below + count)
            chart.parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{chart.x(end_s) - x + 0.3:.1f}" '
                f'height="{chart.y(below) - y:.1f}" fill="{light(colour_of(request), 0.25)}"/>'
            )
            below += count
    note = "A colour is a request. It grows with each token, and goes when its answer is complete."
    return lines, chart.picture("The cache of a busy server grows, and gives back", {}, note)


def beam_tree() -> tuple[list[str], str]:
    """Draw the first steps of a recorded beam search as a tree."""
    words, search = _words(), Beams(4, 8, frozenset())
    ids, scores = [0], [0.0]
    levels: list[list[tuple[int, int, float]]] = []  # parent, token, score
    for record in _records("beams.jsonl", "step"):
        ranked = {index: candidates for (_, index), candidates in record["ranked"]}
        if not ranked:
            continue
        candidates = [tuple((t, p) for t, p in ranked[index]) for index in ids]
        moves = search.advance(candidates)
        if len(levels) == WORDS_SHOWN or not moves:
            break
        likely = [dict(one) for one in candidates]
        scores = [scores[parent] + likely[parent][token] for parent, token in moves]
        levels.append([(p, t, s) for (p, t), s in zip(moves, scores, strict=True)])
        ids = _next_ids(ids, [parent for parent, _ in moves])
    lines = ["step   four beginnings that are kept: the last token, and the score so far"]
    for number, level in enumerate(levels, start=1):
        shown = "   ".join(f"{words[token]!r:>10} {score:6.2f}" for _, token, score in level)
        lines.append(f"{number:4}   {shown}")
    return lines, svg.picture(WIDTH, 380, _tree(levels, words))


def _next_ids(ids: list[int], parents: list[int]) -> list[int]:
    """Return the numbers of the next beams: the first to continue a beam keeps its number."""
    kept, given = {ids[parent] for parent in parents}, list[int]()
    for parent in parents:
        if ids[parent] not in given:
            given.append(ids[parent])
        else:
            given.append(next(i for i in range(99) if i not in kept and i not in given))
    return given


def _tree(levels: list[list[tuple[int, int, float]]], words: Mapping[int, str]) -> list[str]:
    note = "Best first, from the top. A path that nothing continues is given up (grey)."
    parts = heading("Four beginnings, step by step", note)
    alive = [{parent for parent, _, _ in level} for level in levels[1:]] + [{0, 1, 2, 3}]
    for column, level in enumerate(levels):
        x = 130 + column * 126
        parts.append(svg.text(x + 48, 88, f"step {column + 1}", size=svg.SMALL, anchor="middle"))
        for place, (parent, token, score) in enumerate(level):
            y = 104 + place * 66
            colour = colour_of(0) if place in alive[column] else "#8c959f"
            from_y = 104 + (parent * 66 if column else 99) + 20
            parts.append(svg.line(x - 30 if column else 96, from_y, x, y + 20, colour, 1.5))
            parts.append(box(x, y, 96, 40, light(colour, 0.8), f"score {score:.2f}", colour))
            parts.append(word(x + 48, y + 18, f"{words[token]!r}"))
            parts.append(word(x + 48, y + 33, f"{score:.2f}", size=11, fill=svg.FAINT))
    parts.append(box(24, 203, 72, 40, "#f6f8fa", "", svg.FAINT))
    parts.append(word(60, 228, "prompt"))
    return parts


def drafts_check() -> tuple[list[str], str]:
    """Draw recorded steps with guesses, which the model checked in one pass each."""
    words = _words()
    steps = [one for one in _records("guesses.jsonl", "step") if one["work"]][4:12]
    before = [one["sampled"][0][-1] for one in _records("guesses.jsonl", "step")]
    lines = [f"{'step':4}   guesses, right ones of them   what the step added"]
    note = "Grey is what the model had; a guess is green where it is right, and red where not."
    parts = heading("Guesses that were checked in one pass each", note)
    for row, one in enumerate(steps):
        guesses = one["drafts"][0][1] if one["drafts"] else []
        added, y = one["sampled"][0], 92 + row * 42
        right = len(added) - 1
        said = f"{len(guesses)}, {right} right" if guesses else "none"
        lines.append(f"{one['number']:4}   {said:28}  {_text(added, words)!r}")
        parts.append(svg.text(24, y + 20, f"step {one['number']}", size=svg.SMALL))
        tokens = [before[one["number"] - 1], *guesses]
        for i, token in enumerate(tokens):
            colour = "#8c959f" if not i else colour_of(2) if i <= right else colour_of(5)
            x = 84 + i * 84
            parts.append(box(x, y, 82, 30, light(colour, 0.65), "", colour))
            parts.append(word(x + 41, y + 20, f"{words[token]!r}"))
        parts.append(arrow(432, y + 15, 464, y + 15))
        for i, token in enumerate(added):
            x = 474 + i * 84
            parts.append(box(x, y, 82, 30, light(colour_of(0), 0.75), "", colour_of(0)))
            parts.append(word(x + 41, y + 20, f"{words[token]!r}"))
    num_added = sum(len(one["sampled"][0]) for one in steps)
    lines.append(f"{len(steps)} steps added {num_added} tokens")
    parts.append(svg.text(84, 84, "computed in one pass", size=svg.SMALL, fill=svg.FAINT))
    parts.append(svg.text(474, 84, "added: right guesses, and one token of the model's own",
                          size=svg.SMALL, fill=svg.FAINT))  # fmt: skip
    return lines, svg.picture(WIDTH, 92 + len(steps) * 42 + 16, parts)


def _text(tokens: Sequence[int], words: Mapping[int, str]) -> str:
    return "".join(words[token] for token in tokens)
