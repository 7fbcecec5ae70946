"""A liar changes one field of a receipt: it is found, or the answer is that of the change, too."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.foresight.structure import params_from
from ridgeline.text.messages.tools import Tool, ToolUse
from tests.serve.serving import serving
from tests.trust.receipts.requests import (
    REQUESTS,
    SMALL,
    Verifier,
    receipt_of,
    statement_of,
    stating,
)

SOME, ALL = 25, 500
OF = (
    *("a chat of three answers, streamed", "a chat with logprobs", "a call", "an expression"),
    *("two prompts of ids", "penalties", "samplers", "DRY and XTC", "biases", "some ids"),
    *("stop strings", "beams"),
)
# What a server only tells: nothing is computed from it, and the signature alone protects it.
TOLD = ("predicate.time", "predicate.request", "predicate.model.name", "subject")


@pytest.fixture(scope="module")
def receipts(roomy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    key = tmp_path_factory.mktemp("keys") / "receipt.key"
    with serving(roomy, receipt_key=key) as served:
        return [receipt_of(served, *REQUESTS[name]) for name in OF]


@pytest.fixture(scope="module")
def verifier(roomy: Path) -> Iterator[Verifier]:
    found = Verifier(roomy)
    yield found
    found.close()


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield where values stand, also whole objects and lists."""
    if at:
        yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in items:
            yield from places(one, (*at, name))


def other(value: Any, rng: random.Random) -> Any:
    """Return another value of about the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 1 << 20))
    if isinstance(value, float):
        return value * rng.choice((0.5, 1.0000001, 1.5)) + rng.choice((0.0, 1e-9))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice("0123456789abcdefé") + value[at + rng.randrange(2) :]
    if isinstance(value, list):
        drawn = rng.randrange(len(value) + 1)
        return value[:drawn] + value[drawn + 1 :] if rng.random() < 0.5 else [*value, *value[:1], 3]
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if rng.random() < 0.7} | {"odd": 1}
    return rng.choice((0, "", True, []))


def changed(statement: Any, rng: random.Random) -> tuple[str, Any]:
    """Change one place of a statement; return which one, and the statement."""
    while True:
        made = deepcopy(statement)
        at = rng.choice(list(places(made)))
        holder = made
        for name in at[:-1]:
            holder = holder[name]
        holder[at[-1]] = other(holder[at[-1]], rng)
        if json.dumps(made) != json.dumps(statement):
            return ".".join(map(str, at)), made


def proved_the_same(at: str, statement: Any, llm: LLM) -> bool:
    """Whether the receipt's tokens are also those of what it says now, computed without drafts."""
    if at.startswith(TOLD):
        return True
    for prompt in statement["predicate"]["prompts"]:
        if answered(llm, statement["predicate"], prompt) != [
            one["tokens"]["ids"] for one in prompt["answers"]
        ]:
            return False
    return True


def answered(llm: LLM, said: Any, prompt: Any) -> list[list[int]]:
    """Return the tokens of each answer to a prompt: as ``LLM`` answers it, or with its tools."""
    ids, params = prompt["tokens"]["ids"], params_from(said["params"] | {"seed": prompt["seed"]})
    if said["form"] is None:
        (output,) = llm.generate([ids], params, progress=False)
        return [list(one.token_ids) for one in output.outputs]
    tools = said["form"]["tools"]
    each = tuple(Tool(**one) for one in tools["tools"])
    use = ToolUse(each, tools["is_required"], tools["is_parallel"])
    form = llm.text.message_form(ids, use, continues=False)
    llm.engine.add(
        tuple(ids),
        params,
        new_text=lambda: llm.text.new_answer(tuple(ids), params, form),
        new_constraint=llm.text.new_constraint(params, form),
    )
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    while llm.engine.has_work():
        for event in llm.engine.step():
            tokens[event.seq_id[1]] += [] if event.token is None else [event.token]
    return tokens


@pytest.mark.parametrize("num", [SOME, pytest.param(ALL, marks=pytest.mark.full)])
def test_a_change_is_found_or_the_answer_is_the_same(
    receipts: list[dict[str, Any]], verifier: Verifier, roomy: Path, num: int
) -> None:
    rng, num_found = random.Random(f"changes {num}"), 0
    with LLM(roomy, **SMALL) as plain:
        for i in range(num):
            receipt = receipts[i % len(receipts)]
            at, statement = changed(statement_of(receipt), rng)
            try:
                found = verifier.wrong(stating(receipt, statement))
            except ValueError as error:
                found = [str(error)]
            num_found += bool(found)
            assert found or proved_the_same(at, statement, plain), (OF[i % len(OF)], at)
    print(f"{num_found} of {num} found, the others change no token")
    assert num_found > num / 2
