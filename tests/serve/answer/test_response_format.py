"""Structured output through the server: every name for it, no end, and a calm neighbour."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest

from tests.engine.test_llm import HELLO
from tests.engine.test_structured import BOMBS, PERSON
from tests.serve.serving import Served
from tests.waiting import eventually

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": HELLO, "seed": 3, "max_tokens": 100}
GO_ON: dict[str, Any] = {"prompt": "x", "seed": 3, "max_tokens": 100}
COMPACT = {"disable_any_whitespace": True}
PATTERN = "[a-d]{2}-[0-9]{3}"


def openai_schema(schema: Any = PERSON, **more: Any) -> dict[str, Any]:
    json_schema = {"name": "person", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


@pytest.mark.parametrize(
    "fields",
    [
        openai_schema(),
        openai_schema(strict=True, description="A person."),
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"json_schema": PERSON},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_every_name_of_a_schema_gives_the_same_answer(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    ask = ASK if path == CHAT else GO_ON
    answers = [served.call(path, ask | names)[1] for names in (openai_schema(), fields)]
    assert answers[0]["choices"] == answers[1]["choices"]
    choice = answers[0]["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": PATTERN}}, PATTERN),
        ({"guided_regex": PATTERN}, PATTERN),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        # as guidance sends it, for older and for newer servers:
        ({"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}}, "a"),
        ({"structured_outputs": {"json": {"const": [1, 2]}, **COMPACT}}, re.escape("[1,2]")),
        ({"guided_json": {"const": [1]}, "guided_whitespace_pattern": "_"}, "\\[_1_\\]|\\[1\\]|.*"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ],
    ids=str,
)
def test_other_kinds(served: Served, fields: dict[str, Any], pattern: str) -> None:
    status, body, _ = served.call(CHAT, ASK | fields)
    assert status == 200, body
    assert re.fullmatch(pattern, body["choices"][0]["message"]["content"])


def test_the_openai_client_parses_into_a_model(served: Served) -> None:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=99)

    answer = served.client().chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Person, seed=1, max_tokens=100
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)


def test_a_stream_adds_up(served: Served) -> None:
    whole = served.call(CHAT, ASK | openai_schema())[1]["choices"][0]["message"]["content"]
    client = served.client()
    chunks = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=3, max_tokens=100, stream=True, **openai_schema()
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


DEAD_END = 'start: "a" "b"? C\nC: /x/ & /y/'  # nothing can follow, which shows only there


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_an_answer_without_an_end_is_an_error(served: Served, path: str) -> None:
    ask = ASK if path == CHAT else GO_ON
    for seed in range(4):
        fields = {"structured_outputs": {"grammar": DEAD_END}, "seed": seed, "temperature": 1}
        error = served.refused_for("structured_outputs.grammar", path, ask | fields)
        assert "the grammar allows no token here" in error["message"]


def test_a_stream_without_an_end_fails(served: Served) -> None:
    fields = {"structured_outputs": {"grammar": DEAD_END}, "stream": True}
    _, body, _ = served.call(CHAT, ASK | fields)
    last = json.loads(body.decode().strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["param"] == "structured_outputs.grammar"
    assert '"stop"' not in body.decode()


def test_a_neighbour_goes_on_while_a_schema_is_judged(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bomb, while a stream runs: it is refused or answered, and the stream does not wait.

    Each is judged for as long as the stream takes for 24 more pieces, on any machine.
    """
    assert served.call(CHAT, ASK | openai_schema())[0] == 200  # its processes are there
    grammars = served.llm.text._grammars
    assert grammars is not None
    judge, num_pieces, num_judged = grammars._children.ask, 0, 0
    is_over = threading.Event()

    def judge_slowly(value: Any, limit_s: float) -> Any:
        nonlocal num_judged
        enough = num_pieces + 24
        eventually(lambda: num_pieces >= enough)
        num_judged += 1
        return judge(value, limit_s)

    def watch() -> None:
        nonlocal num_pieces
        while not is_over.is_set():
            stream = served.client().completions.create(
                model="tiny", prompt="x", max_tokens=100, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for _ in stream:
                num_pieces += 1

    monkeypatch.setattr(grammars._children, "ask", judge_slowly)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number, bomb in enumerate(BOMBS.values(), 1):
            status, _, _ = served.call(CHAT, ASK | {"structured_outputs": bomb, "max_tokens": 8})
            assert status in (200, 400, 500)
            assert num_judged == number
    finally:
        is_over.set()
        watcher.join()


def test_grammars_are_counted(served: Served) -> None:
    name = "ridgeline:grammar_compilation_time_seconds_count"
    before = served.metrics()
    assert served.call(CHAT, ASK | openai_schema())[0] == 200
    bad: dict[str, Any] = {"structured_outputs": {"regex": "("}}
    long: dict[str, Any] = {"structured_outputs": {"regex": "a" * 70_000}}
    for fields in (bad, long):
        served.refused(COMPLETE, GO_ON | fields)
    after = served.metrics()
    assert after[name] == before[name] + 1
    for reason in ("invalid", "too_long"):
        key = f'ridgeline:num_grammar_refused_total{{reason="{reason}"}}'
        assert after[key] == before[key] + 1, sorted(after)
