"""Drawings of what is in a layer: attention, at once and in blocks, groups of heads, experts."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import NamedTuple

from drawing import WIDTH, box, colour_of, heading, light, word
from estimate import Estimate

from ridgeline.engine.setup.home import stores
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.system import svg

WORDS = ("the", "cat", "sat", "on", "the", "mat")
# Made up, two numbers for each word; a model has learnt how to make them, and more of them.
QUERIES = ((1.0, 0.0), (0.5, 1.5), (2.0, 1.0), (0.0, 1.0), (1.0, 0.5), (1.5, 2.0))
KEYS = ((0.5, 0.0), (1.5, 1.0), (0.5, 2.0), (0.0, 0.5), (0.5, 0.0), (1.0, 1.5))
VALUES = ((1.0, 0.0), (0.0, 4.0), (2.0, 2.0), (0.0, 1.0), (1.0, 0.0), (3.0, 1.0))
BLOCK = 2

Row = tuple[float, ...]


def weights_of(query: Row, keys: tuple[Row, ...]) -> Row:
    """Return softmax(q k / sqrt(d)) over the keys: parts that add up to 1."""
    scores = [_dot(query, key) / math.sqrt(len(query)) for key in keys]
    parts = [math.exp(score - max(scores)) for score in scores]
    return tuple(part / sum(parts) for part in parts)


def in_blocks(query: Row, keys: tuple[Row, ...], values: tuple[Row, ...]) -> Row:
    """Return what attention takes from the values, with no more than a block of scores at a time.

    What is kept is the largest score so far, the sum of all parts, and the mix of values.
    """
    most, total, mix = -math.inf, 0.0, [0.0] * len(values[0])
    for at in range(0, len(keys), BLOCK):
        scores = [_dot(query, key) / math.sqrt(len(query)) for key in keys[at : at + BLOCK]]
        new_most = max(most, *scores)
        shrink = math.exp(most - new_most)
        parts = [math.exp(score - new_most) for score in scores]
        total = total * shrink + sum(parts)
        mix = [
            old * shrink + _dot(tuple(parts), tuple(v[i] for v in values[at : at + BLOCK]))
            for i, old in enumerate(mix)
        ]
        most = new_most
    return tuple(one / total for one in mix)


def attention() -> tuple[list[str], str]:
    """Draw the weights of six words, all at once and in the order of blocks."""
    rows = [weights_of(q, KEYS[: i + 1]) for i, q in enumerate(QUERIES)]
    whole = [
        tuple(_dot(row, column) for column in zip(*VALUES[: i + 1], strict=True))
        for i, row in enumerate(rows)
    ]
    blocks = [in_blocks(q, KEYS[: i + 1], VALUES[: i + 1]) for i, q in enumerate(QUERIES)]
    pairs = [pair for both in zip(whole, blocks, strict=True) for pair in zip(*both, strict=True)]
    gap = max(abs(one - other) for one, other in pairs)
    lines = [f"{'':6}" + "".join(f"{one:>7}" for one in WORDS) + "    takes"]
    for name, row, mix in zip(WORDS, rows, whole, strict=True):
        cells = "".join(f"{one:7.2f}" for one in row) + " " * 7 * (len(WORDS) - len(row))
        lines.append(f"{name:6}{cells}    ({', '.join(f'{one:.2f}' for one in mix)})")
    lines += [f"in blocks of {BLOCK} x {BLOCK}: the same, within {gap:.0e}", ""]
    lines.append("    tokens         scores   kept at once, whole   in blocks of 128")
    for count in (1000, 2000, 4000, 128000):
        scores = count * (count + 1) // 2
        lines.append(f"{count:10,} {scores:14,} {count * count:21,} {128 * 128:18,}")
    return lines, svg.picture(WIDTH, 400, _matrices(rows))


def _matrices(rows: list[Row]) -> list[str]:
    note = "A row is a word that looks back, a column a word that it sees. A row adds up to 1."
    parts = heading("Who looks at whom, and in which order blocks are computed", note)
    side, top = 46.0, 106.0
    for left, is_whole in ((84, True), (560, False)):
        parts.append(svg.text(left, 82, "all scores at once" if is_whole else "block by block",
                              weight=600))  # fmt: skip
        for i, row in enumerate(rows):
            y = top + i * side
            parts.append(svg.text(left - 8, y + 28, WORDS[i], size=svg.SMALL, anchor="end"))
            for j, weight in enumerate(row):
                number = _number_of_block(i, j)
                fill = light(colour_of(0 if is_whole else number), 1 - 0.85 * weight - 0.05)
                said = f"{weight:.2f}" if is_whole else str(number + 1)
                x = left + j * side
                title = f"{WORDS[i]} takes {weight:.0%} from {WORDS[j]}"
                if not is_whole:
                    fill = light(colour_of(number), 0.7)
                ink = "#ffffff" if is_whole and weight > 0.6 else svg.INK
                parts += [box(x, y, side, side, fill, title), word(x + 23, y + 28, said, fill=ink)]
        for j, name in enumerate(WORDS):
            x = left + j * side + side / 2
            parts.append(svg.text(x, top - 8, name, size=svg.SMALL, anchor="middle"))
    parts.append(svg.text(372, 180, "the upper half is", size=svg.SMALL, fill=svg.FAINT))
    parts.append(svg.text(372, 196, "never looked at", size=svg.SMALL, fill=svg.FAINT))
    return parts


def _number_of_block(row: int, column: int) -> int:
    """Return which block of scores comes when, row by row."""
    across, down = column // BLOCK, row // BLOCK
    return down * (down + 1) // 2 + across


class Group(NamedTuple):
    """A way to share keys and values among query heads.

    Attributes:
        name: what the field calls it.
        kept: pairs of a key and a value that a layer keeps of a token; 0: one latent vector.
        values: numbers that it keeps.
    """

    name: str
    kept: int
    values: int


def heads() -> tuple[list[str], str]:
    """Draw four ways to share keys and values, with what a token takes of the cache."""
    shape = read_model_spec("llama-3.1-8b.json", stores()).shape
    cache, num_layers = shape.layers[0].cache, len(shape.layers)
    latent = read_model_spec("deepseek-v3.json", stores()).shape.layers[0].cache
    all_heads = shape.num_heads * cache.values_per_head
    groups = [
        Group("MHA: each its own", shape.num_heads, all_heads),
        Group(f"GQA: {cache.num_heads} groups", cache.num_heads, cache.values_per_token()),
        Group("MQA: one for all", 1, cache.values_per_head),
        Group("MLA: one latent", 0, latent.values_per_token()),
    ]
    lines = [f"{'':20} numbers a layer   bytes a token, {num_layers} layers   of MHA"]
    for one in groups:
        size = 2 * num_layers * one.values
        lines.append(f"{one.name:20} {one.values:15,} {size:27,} {one.values / all_heads:8.1%}")
    channels = cache.values_per_head // 2
    lines.append(
        f"n tokens of Llama 3.1 8B: in and out n x {shape.hidden_size:,}, queries n x "
        f"{shape.num_heads} x {channels}, keys n x {cache.num_heads} x {channels}"
    )
    return lines, svg.picture(WIDTH, 440, _heads(groups, shape.num_heads))


def _heads(groups: list[Group], num_heads: int) -> list[str]:
    note = "Above, the 32 query heads of a layer of Llama 3.1 8B; below, what is kept of a token."
    parts, gap, left = heading("Heads that share keys and values", note), 20.5, 200
    width = gap * num_heads
    for row, one in enumerate(groups):
        y = 92 + row * 86
        parts.append(svg.text(24, y + 12, one.name))
        said = f"{one.values:,} numbers"
        parts.append(svg.text(24, y + 30, said, size=svg.SMALL, fill=svg.FAINT))
        kept = max(1, one.kept)
        for i in range(num_heads):
            group, x = i * kept // num_heads, left + (i + 0.5) * gap
            at = left + (group + 0.5) * width / kept
            parts.append(svg.line(x, y + 16, at, y + 38, svg.GRID, 1.5))
            parts.append(box(x - 7, y, 14, 16, light(colour_of(0), 0.3), "a query head"))
        for group in range(kept):
            place = left + (group + 0.5) * width / kept
            half = 7 if one.kept else 22
            name = "a key and a value" if one.kept else "a latent vector, of which both are made"
            parts.append(box(place - half, y + 38, 2 * half, 16, colour_of(2), name))
    return parts


def chosen(num_tokens: int, used: int, count: int) -> Counter[int]:
    """Return how many tokens each expert gets, if each token takes ``used`` of ``count`` by chance.

    The same every time.
    """
    by_chance = random.Random(num_tokens)
    return Counter(i for _ in range(num_tokens) for i in by_chance.sample(range(count), used))


def experts() -> tuple[list[str], str]:
    """Draw which experts of a layer are met by the tokens of a step, for steps of four sizes."""
    shape = read_model_spec("gpt-oss-20b.json", stores()).shape
    used, count = Estimate(shape, devices()["rtx4090"]).num_experts
    lines = [f"tokens   experts met, of {count}   on average   tokens of each that is met"]
    note = "A box is an expert; its number is how many tokens chose it. White ones are not read."
    parts = heading(f"A layer of {count} experts, of which a token meets {used}", note)
    for row, tokens in enumerate((1, 4, 16, 64)):
        got, y, side = chosen(tokens, used, count), 84 + row * 44, 23
        average = count * (1 - (1 - used / count) ** tokens)
        each = tokens * used / len(got)
        lines.append(f"{tokens:6} {len(got):17} {average:14.1f} {each:28.1f}")
        parts.append(svg.text(24, y + 20, f"{tokens} token{'s' if tokens > 1 else ''}"))
        for i in range(count):
            share = min(1.0, got[i] / 8)
            fill = light(colour_of(0), 0.8 - 0.5 * share) if got[i] else "#ffffff"
            x = 120 + i * side
            parts.append(box(x, y, side, 30, fill, f"expert {i}: {got[i]} tokens", svg.GRID))
            if got[i]:
                parts.append(word(x + side / 2, y + 20, str(got[i])))
    return lines, svg.picture(WIDTH, 84 + 4 * 44 + 8, parts)


def _dot(one: Row, other: Row) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
