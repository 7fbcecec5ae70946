"""Attention, and the heads that it attends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.attention import heads_inputs, texts
from ridgeline.backends.cuda.measure.part import Case, Part

Heads = tuple[int, int, int]

# A prompt, a long text's next token, a piece of a prompt, tokens at borders of blocks.
MIXED = [(0, 70), (300, 301), (40, 75), (5, 6), (127, 129), (0, 1)]
_SINGLES = [(300, 301), (15, 16), (256, 257), (0, 1)]
_LONGER = 400  # tokens before the second text of the first list, and the first one of the second
# Query heads, key heads and channels, and what is beside them: of models, and small.
_OF_MODELS: tuple[tuple[Heads, dict[str, Any]], ...] = (
    ((32, 8, 128), {}),
    ((32, 8, 128), {"window": 70}),
    ((32, 8, 128), {"softcap": 30.0}),
    ((32, 8, 128), {"has_slopes": True}),
    ((64, 8, 64), {"has_sinks": True, "window": 128}),
    ((28, 4, 128), {}),
    ((32, 32, 64), {}),
    ((9, 3, 64), {}),
    ((8, 1, 256), {}),
    ((8, 1, 512), {"window": 128}),
    ((16, 1, 576), {"value_at": 64}),
    ((128, 1, 576), {"value_at": 64}),
)
SMALL: tuple[tuple[Heads, dict[str, Any]], ...] = (
    ((4, 2, 16), {}),
    ((4, 2, 16), {"window": 33}),
    ((4, 2, 16), {"softcap": 2.0}),
    ((4, 2, 16), {"has_sinks": True, "window": 70}),
    ((4, 2, 16), {"has_slopes": True}),
    ((4, 2, 16), {"has_slopes": True, "softcap": 5.0}),
    ((9, 3, 8), {}),  # three query heads of a key head: a row of a program is unused
    ((2, 2, 24), {}),  # channels that are no power of two
    ((2, 1, 16), {"block_size": 5}),  # a block that divides no tile
    ((2, 1, 16), {"block_size": 32}),
    ((32, 1, 24), {"value_at": 8}),  # a latent, and two programs for its heads
    ((6, 1, 40), {"value_at": 20, "window": 33}),
)
_SPEC: dict[str, Any] = {"H": 4, "K": 2, "D": 12, "half": 6, "scale": 1.0}
_LARGE: dict[str, Any] = {"H": 32, "K": 8, "D": 128, "half": 64, "scale": 1.0}
_LATENT: dict[str, Any] = {"K": 1, "half": 2, "value_at": 4}
_LARGE_LATENT: dict[str, Any] = {"H": 128, "K": 1, "D": 576, "half": 32, "value_at": 64}


def attends(part: Part) -> Iterator[Case]:
    """Yield attention of mixed lengths, and of single tokens, whose contexts are shared out."""
    longer = 0 if part.is_tiny else _LONGER
    mixed = [(a + longer, b + longer) if i == 1 else (a, b) for i, (a, b) in enumerate(MIXED)]
    singles = [(a + longer, b + longer) if not i else (a, b) for i, (a, b) in enumerate(_SINGLES)]
    for what, heads, how in kinds_of_heads(part):
        for of, pieces in (("mixed", mixed), ("single tokens", singles)):
            name = f"{what}, {of}"
            yield name, partial(_attend, part, name, heads, pieces, how)


def kinds_of_heads(part: Part) -> Iterator[tuple[str, Heads, dict[str, Any]]]:
    """Yield a name, heads, and what is beside them (arguments of ``texts``)."""
    for heads, how in SMALL if part.is_tiny else _OF_MODELS:
        named = " ".join([f"{name} {value}" for name, value in how.items()])
        yield f"attend {named_heads(heads)} {named}".rstrip(), heads, how


def named_heads(heads: Heads) -> str:
    """Return query heads, key heads and channels in short."""
    return "{}/{} x {}".format(*heads)


def _attend(part: Part, name: str, heads: Heads, pieces: Any, how: dict[str, Any]) -> None:
    of = texts(part, heads, pieces, **how)
    part.near(name, part.ops.attend(*of.given()), of.exact())


def ropes(part: Part) -> Iterator[Case]:
    """Yield heads normed and turned in every way, and kept."""
    facts = _SPEC if part.is_tiny else _LARGE
    half = facts["half"]
    ways: list[dict[str, Any]] = [
        {}, {"v_norm": True}, {"v_is_k": True}, {"half": half - 2}, {"half": 0}, {"own": False},
        _LATENT if part.is_tiny else _LARGE_LATENT,
    ]  # fmt: skip
    for way in ways:
        for qk_norm in (0, 1, 2):
            spec = HeadSpec(**facts | way | {"qk_norm": qk_norm})
            named = ", ".join(f"{name} {value}" for name, value in way.items())
            what = f"rope {named_heads((spec.H, spec.K, spec.D))} norm {qk_norm} {named}".rstrip()
            yield what, partial(_rope, part, what, spec)


def _rope(part: Part, what: str, spec: HeadSpec) -> None:
    ours = heads_inputs(part, spec)
    exact = {
        name: given.clone() if torch.is_tensor(given) else given for name, given in ours.items()
    }
    exact |= {"qkv": ours["qkv"].double(), "cache": ours["cache"].double()}
    q, q_exact = part.ops.rope_and_cache(**ours), twins.rope_and_cache(**exact)
    live = (ours["table_rows"] >= 0) & (ours["poison"] == 0)  # all others may be anything
    part.near(f"{what}, queries", q[live], q_exact[live])
    part.near(f"{what}, cache", ours["cache"], exact["cache"])
    is_same = bool(torch.equal(ours["poison"], exact["poison"]))
    part.say(f"{what}, poison", ok=is_same and int(ours["poison"].sum()) == spec.own)


CASES = {"attend": attends, "rope_and_cache": ropes}
