"""A file shows what its receipt states and what the receipt's tokens say, no more and no less.

A liar adds, removes or exchanges something in an answer, with the signature left or with a receipt
that is made to fit: it is found, in each API, streamed and whole.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ridgeline.trust.receipts.compare import Answers, wrong_in_answer, wrong_in_file
from ridgeline.trust.receipts.reading import Signed, read
from ridgeline.trust.receipts.verify import compute
from tests.serve.serving import serving
from tests.trust.receipts.requests import APIS, CHAT, HELLO, LONG, REQUESTS, TEXT, TOOL, Verifier

SOME, ALL = 300, 10_000
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat of three": (CHAT, HELLO | {"n": 3, "stream_options": {"include_usage": True}}),
    "a chat's call": REQUESTS["a call"],
    "a chat with logprobs": REQUESTS["a chat with logprobs"],
    "ids": (TEXT, LONG | {"n": 2, "return_token_ids": True, "prompt": ["The cat", "A dog"]}),
    "stopped": (TEXT, LONG | {"max_tokens": 80, "stop": ["e", "a"]}),
    "Ollama's call": ("/api/chat", {"model": "tiny", "tools": [TOOL], "tool_choice": "required"}),
}
ASKED = {name: (path, body) for name, (path, body, _) in APIS.items()} | MORE
ASKED["Ollama's call"] = APIS["Ollama's call"][:2]
BEGUN = "a response", True
Made = tuple[str, bool, bytes]  # of which answer, whether streamed, and its file


@pytest.fixture(scope="module")
def answers(roomy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    key = tmp_path_factory.mktemp("keys") / "receipt.key"
    found = []
    with serving(roomy, receipt_key=key) as served:
        for name, (path, body) in ASKED.items():
            for is_streamed in (False, True):
                if is_streamed and "best_of" in body:
                    continue
                asked = body | {"receipt": True, "stream": is_streamed}
                if not is_streamed:
                    asked.pop("stream_options", None)
                status, answer, _ = served.call(path, asked)
                assert status == 200, answer
                data = answer if is_streamed else json.dumps(answer).encode()
                found.append((name, is_streamed, data))
    return found


class Computing:
    """Computes each receipt once."""

    def __init__(self, model: Path) -> None:
        self._verifier = Verifier(model)
        self._known: dict[str, tuple[list[str], Answers]] = {}

    def wrong(self, data: bytes) -> list[str]:
        """Return what is wrong with a file. Raises ValueError for one that cannot be read."""
        signed = read(data)
        assert signed.shown is not None
        found = list(wrong_in_file(signed.receipt, signed.subject, signed.shown))
        return found + self.computed(signed)

    def computed(self, signed: Signed) -> list[str]:
        """Return what is wrong with a receipt, and with the answer that it stands in."""
        receipt = signed.receipt
        key = receipt.model_dump_json()
        if key not in self._known:
            prompts = [list(one.tokens.ids or ()) for one in receipt.prompts]
            self._known[key] = compute(receipt, self._verifier.llm(signed), prompts)
        wrong, answers = self._known[key]
        return wrong or list(wrong_in_answer(receipt, signed.subject, signed.shown, answers))

    def close(self) -> None:
        self._verifier.close()


@pytest.fixture(scope="module")
def computing(roomy: Path) -> Iterator[Computing]:
    found = Computing(roomy)
    yield found
    found.close()


def test_each_answer_is_that_of_its_receipt(answers: list[Made], computing: Computing) -> None:
    found = {(name, is_streamed): computing.wrong(data) for name, is_streamed, data in answers}
    assert not any(found.values()), [one for one in found.items() if one[1]]


def test_an_answer_that_has_just_begun_shows_nothing(
    answers: list[Made], computing: Computing
) -> None:
    """As some programs show what an event says of the whole answer so far."""
    (data,) = [data for name, is_streamed, data in answers if (name, is_streamed) == BEGUN]
    values = objects_of(data, is_streamed=True)
    values[0]["response"]["output"] = deepcopy(ADDED["output"])
    wrong = computing.wrong(file_of(values, is_streamed=True))
    assert wrong == ["event 0.response.output is not in the receipt"]


# --- changes --------------------------------------------------------------------------------------

TEXTS = ("content", "text", "reasoning_content", "thinking", "response", "arguments", "name")
TEXTS += ("partial_json", "delta")
ENDS = ("finish_reason", "stop_reason", "stop_sequence", "done_reason", "stop_type")
LISTS = ("choices", "content", "output", "tool_calls")
ADDED: dict[str, Any] = {
    "content": "Pay Eve.",
    "reasoning_content": "It is so.",
    "thinking": "It is so.",
    "refusal": "No.",
    "text": "Pay Eve.",
    "answer": "Berlin",
    "tool_calls": [
        {"index": 0, "id": "c", "type": "function", "function": {"name": "pay", "arguments": "{}"}}
    ],
    "output": [{"type": "function_call", "name": "pay", "arguments": "{}"}],
    "function": {"name": "pay", "arguments": "{}"},
}


def objects_of(data: bytes, is_streamed: bool) -> list[Any]:
    """Return the objects of a file."""
    if not is_streamed:
        return [json.loads(data)]
    lines = [line.removeprefix(b"data:").strip() for line in data.splitlines()]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def file_of(values: list[Any], is_streamed: bool) -> bytes:
    """Return a file with these objects, as a stream of events or lines."""
    form = "data: {}\n\n" if is_streamed else "{}"
    return "".join(form.format(json.dumps(one)) for one in values).encode()


Place = tuple[Any, Any]  # an object or list, and a name or index in it


def places(value: Any, told: Collection[str], at: str = "") -> Iterator[Place]:
    """Yield where something stands that is not only ``told``, whole objects and lists too."""
    for name, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
        inner = f"{at}.{name}".removeprefix(".") if isinstance(value, dict) else f"{at}[{name}]"
        if name != "receipt" and inner not in told:
            yield value, name
            if isinstance(one, dict | list):
                yield from places(one, told, inner)


def all_places(values: list[Any], told: Collection[str], is_streamed: bool) -> list[Place]:
    """Return the places of a file, which are called as the reader of files calls them."""
    found = [(values, i) for i in range(len(values))] if is_streamed else []
    for i, one in enumerate(values):
        found += places(one, told, f"event {i}" if is_streamed else "")
    return found


def has_text(value: Any) -> bool:
    """Whether something shows a text, or a name of a call."""
    if isinstance(value, dict):
        return any(
            (name in TEXTS and isinstance(one, str) and one)
            or (name != "receipt" and has_text(one))
            for name, one in value.items()
        )
    return isinstance(value, list) and any(map(has_text, value))


def add(values: list[Any], found: list[Place], rng: random.Random) -> str | None:
    holder, name = rng.choice(found)
    one = holder[name]
    if isinstance(one, dict):
        new = rng.choice([*ADDED])
        if one.get(new):
            return None
        one[new] = deepcopy(ADDED[new])
        return f"{new} in {name}"
    if isinstance(one, list) and name in LISTS and has_text(one):
        one.insert(rng.randrange(len(one) + 1), deepcopy(rng.choice(list(filter(has_text, one)))))
        return f"one more of {name}"
    return None


def remove(values: list[Any], found: list[Place], rng: random.Random) -> str | None:
    found = [
        (holder, name)
        for holder, name in found
        if (name in (*TEXTS, *ENDS[:-1]) and holder[name] and isinstance(holder[name], str))
        or (name in LISTS and has_text(holder[name]))
        or (isinstance(name, int) and holder is not values and has_text(holder[name]))
    ]
    if not found:
        return None
    holder, name = rng.choice(found)
    del holder[name]
    return f"{name} removed"


def exchange(values: list[Any], found: list[Place], rng: random.Random) -> str | None:
    """Exchange two values, or have another one."""
    found = [
        (holder, name)
        for holder, name in found
        if isinstance(holder[name], str | int | float) or (name in LISTS and has_text(holder[name]))
    ]
    (one, at), (other, there) = (rng.choice(found) for _ in range(2))
    both = one[at], other[there]
    if all(isinstance(each, list) for each in both) and nameless(both[0]) == nameless(both[1]):
        return None
    if rng.random() < 0.5 and not isinstance(one[at], list):
        was = one[at]
        another = {bool: lambda: not was, int: lambda: was + rng.choice((-1, 1, 7))}
        one[at] = another.get(type(was), lambda: f"{was}{rng.choice(('!', ' ', 'é'))}")()
        return f"{at}, which was {was!r:.30}"
    if type(one[at]) is not type(other[there]) or one[at] == other[there] or is_within(one, other):
        return None
    one[at], other[there] = other[there], one[at]
    return f"{at} and {there}"


def nameless(values: list[Any]) -> list[Any]:
    """Return calls without their ids, which only the server says."""
    return [{k: v for k, v in one.items() if k != "id"} for one in values if isinstance(one, dict)]


def is_within(one: Any, other: Any) -> bool:
    """Whether one of two holders holds the other."""
    return any(
        inner is wanted
        for outer, wanted in ((one, other), (other, one))
        for holder, name in places(outer, ())
        for inner in [holder[name]]
    )


KINDS = {"added": add, "removed": remove, "exchanged": exchange}


@pytest.mark.parametrize("num", [SOME, pytest.param(ALL, marks=pytest.mark.full)])
def test_a_change_of_an_answer_is_found(
    answers: list[Made], computing: Computing, num: int
) -> None:
    rng, counts, equal = random.Random(f"answers {num}"), Counter[str](), []
    while counts.total() < num:
        name, is_streamed, data = answers[counts.total() % len(answers)]
        kind = rng.choice([*KINDS])
        values = objects_of(data, is_streamed)
        before = deepcopy(values)
        shown = read(data).shown
        assert shown is not None
        what = KINDS[kind](values, all_places(values, shown.claims, is_streamed), rng)
        if what is None or values == before:
            continue
        counts[kind] += 1
        try:
            found = computing.wrong(file_of(values, is_streamed))
        except ValueError as error:
            found = [str(error)]
        if not found:
            equal.append((name, is_streamed, kind, what))
    print(counts, len(answers))
    assert not equal, sorted({str(one) for one in equal})
    assert min(counts.values()) > num / 20
