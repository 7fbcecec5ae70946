"""Structured output: every finished answer fits, with drafts as without, and no bomb goes off."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.text.messages import json_repeats
from tests.engine.test_llm import assert_idle, model

__all__ = ["model"]  # a fixture

SAMPLED = SamplingParams(temperature=1, max_tokens=200)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# One for each keyword that the grammars know; answers must be short enough to end.
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "minimum": 3, "maximum": 17},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"enum": ["a", 1, None, {"b": [2]}]},
    {"const": {"x": [1, 2, "three"]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {"oneOf": [{"const": "red"}, {"const": "green"}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 6}]},
    {"$defs": {"bit": {"enum": [0, 1]}}, "type": "array", "items": {"$ref": "#/$defs/bit"},
     "maxItems": 3},
    {"type": "object", "patternProperties": {"^x_[a-c]$": {"type": "integer", "maximum": 9}},
     "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "properties": {"a": PERSON}, "required": ["a"],
     "additionalProperties": False},
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_cache_memory": "1MiB", "threads": 1}
    with LLM(model, speculative_config="off", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_cache_memory": "1MiB", "threads": 1}
    with LLM(model, speculative_config={"always": True}, **options) as llm:
        yield llm


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_what_ends_fits_its_schema(plain: LLM, drafting: LLM, schema: dict[str, Any]) -> None:
    """A model of random weights says anything it is allowed to; drafts change none of it."""
    num_ended = 0
    for compact in (True, False):
        wish = {"json": schema, "disable_any_whitespace": compact}
        params = [replace(SAMPLED, structured_outputs=wish, seed=seed) for seed in range(6)]
        outs = [llm.generate(["x"] * 6, params) for llm in (plain, drafting)]
        said, with_drafts = ([out.outputs[0] for out in of_llm] for of_llm in outs)
        assert said == with_drafts
        for answer in said:
            assert answer.finish_reason in ("stop", "length"), answer.error
            if answer.finish_reason == "stop":
                num_ended += 1
                jsonschema.validate(json.loads(answer.text), schema)
                assert not (compact and re.search(r"[:,{\[] ", json.dumps(answer.text)[:3]))
    assert num_ended >= 6


def test_forced_tokens_are_drafts(drafting: LLM) -> None:
    schema = {"const": {"a_long_name_that_is_forced": [1, 2, 3]}}
    wish = {"json": schema, "disable_any_whitespace": True}
    (out,) = drafting.generate("x", replace(SAMPLED, structured_outputs=wish))
    assert json.loads(out.outputs[0].text) == schema["const"]
    assert out.num_accepted_tokens > 5


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"regex": "[ab]{3}-\\d\\d"}, "[ab]{3}-\\d\\d"),
        ({"choice": ["yes", "no", 'say "perhaps"\n']}, 'yes|no|say "perhaps"\\n'),
        ({"grammar": 'root ::= "<" [0-9]{1,3} ">"'}, "<[0-9]{1,3}>"),
        ({"grammar": 'start: "<" /[0-9]{1,3}/ ">"'}, "<[0-9]{1,3}>"),
        ({"json_object": True}, "(?s)\\{.*"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_kind(
    plain: LLM, drafting: LLM, wish: dict[str, Any], pattern: str, temperature: float
) -> None:
    params = replace(SAMPLED, structured_outputs=wish, temperature=temperature, n=3, seed=5)
    (one,), (other,) = (llm.generate("x", params) for llm in (plain, drafting))
    assert one.outputs == other.outputs
    for answer in one.outputs:
        if answer.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text)


def test_constrained_answers_do_not_hang_on_others(plain: LLM) -> None:
    wish = {"json": PERSON}
    params = [replace(SAMPLED, structured_outputs=wish, seed=i, logprobs=2) for i in range(8)]
    mixed = [p for i, one in enumerate(params) for p in (one, replace(SAMPLED, seed=i))]
    together = plain.generate(["x"] * 16, mixed)[::2]
    alone = [plain.generate("x", one)[0] for one in params]
    assert [out.outputs for out in together] == [out.outputs for out in alone]


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "Unsatisfiable"),
        ({"json": {"not": {}}}, "no value fits it"),
        ({"json": False}, "no value fits it"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems: .*comes twice"),
        ({"json": {"properties": {"a": {"pattern": "x\\b"}}}}, r"properties.a.pattern: .*\\b"),
        ({"json": {"$ref": "https://a.b/c"}}, r"\$ref: 'https://a.b/c' is not in this schema"),
        ({"json": {"type": "text"}}, "type: 'text' is not a type of JSON"),
        ({"json": "{"}, "."),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": 'root ::= "a'}, "."),
        ({"json": {"$ref": "#"}}, "refers to itself"),
        (
            {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}},
            "defs.n: it refers",
        ),
        ({"json": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}}, "oneOf: .*only one"),
        ({"regex": "a" * 70_000}, "70000 bytes: at most 65536"),
    ],
)
def test_what_cannot_be_used_says_why(plain: LLM, wish: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plain.generate("x", replace(SAMPLED, structured_outputs=wish))
    assert_idle(plain)


@pytest.mark.parametrize("is_drafting", [False, True])
def test_an_answer_without_an_end_is_an_error(plain: LLM, drafting: LLM, is_drafting: bool) -> None:
    wish = {"grammar": 'start: "a" "b"? C\nC: /x/ & /y/'}
    llm = drafting if is_drafting else plain
    for seed in range(6):
        (out,) = llm.generate("x", replace(SAMPLED, structured_outputs=wish, seed=seed))
        assert out.outputs[0].finish_reason == "error"
        assert "the grammar allows no token here" in (out.outputs[0].error or "")
    assert_idle(llm)


def _any_of(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for i in range(depth):
        inner = {"anyOf": [{"type": "object", "properties": {f"k{i}": inner}}, inner]}
    return inner


def _all_of(depth: int) -> dict[str, Any]:
    defs: dict[str, Any] = {"d0": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
    for i in range(1, depth):
        ref = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {"allOf": [{"anyOf": [ref, {"type": "null"}]}, {"anyOf": [ref, True]}]}
    return {"$defs": defs, "$ref": f"#/$defs/d{depth - 1}"}


BOMBS: dict[str, dict[str, Any]] = {
    "a chain of rules": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'
    },
    "anyOf written out": {"json": _any_of(9)},
    "allOf of anyOf": {"json": _all_of(14)},
    "counts in counts": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "intersections": {"regex": "(.*a.{20}&.*b.{20})"},
    "many values": {"json": {"enum": [f"value number {i}" for i in range(3000)]}},
    "brackets": {"regex": "(" * 20_000 + ")" * 20_000},
    "a cycle": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
}


def cpu_s() -> float:
    return sum(os.times()[:4])


@pytest.mark.parametrize("name", BOMBS)
def test_no_bomb_goes_off(plain: LLM, name: str) -> None:
    """It is refused within seconds, or compiles and then ends or fails alone.

    Seconds of processors, of processes that have ended too: those of others do not count.
    """
    begin_s, refusal = cpu_s(), ""
    neighbour = replace(SAMPLED, seed=3, max_tokens=8, ignore_eos=True)
    try:
        bomb = replace(SAMPLED, structured_outputs=BOMBS[name], max_tokens=8)
        answers = [out.outputs[0] for out in plain.generate(["x", "y"], [bomb, neighbour])]
        assert answers[0].finish_reason in ("stop", "length", "error")
        assert answers[1].finish_reason == "length"
    except ValueError as error:
        refusal = str(error)
    assert len(refusal) < 400
    assert cpu_s() - begin_s < 20  # of which a refusal takes 2
    assert_idle(plain)
    (good,) = plain.generate(
        "x", replace(SAMPLED, structured_outputs={"choice": ["still", "well"]})
    )
    assert good.outputs[0].text in ("still", "well")


def test_a_list_that_repeats_ends_with_drafts_as_without(
    plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts guess that it goes on as it did, and the grammar would let it."""
    monkeypatch.setattr(json_repeats, "LEAST_CHARS", 60)
    [zero], [comma] = (plain.text.tokenizer.encode(char, add_bos=False) for char in "0,")
    form = {"json": {"type": "array", "items": {"enum": [0, 1]}}, "disable_any_whitespace": True}
    wish = replace(SAMPLED, structured_outputs=form, logit_bias={zero: 50, comma: 100})
    for seed in range(3):
        answers = []
        for llm in (plain, drafting):
            (out,) = llm.generate("x", replace(wish, seed=seed))
            answers.append(out.outputs[0].token_ids)
            assert out.outputs[0].finish_reason == "stop"
        assert answers[0] == answers[1]
        found = json.loads(out.outputs[0].text)
        assert found[-20:] == [0] * 20
        assert len(found) < 50
    assert_idle(drafting)


def test_the_process_that_compiles_may_die(plain: LLM) -> None:
    """So says the test above only if a bomb really kills it."""
    with pytest.raises(ValueError, match="takes more than 2 s of computing or 1 GiB to compile"):
        plain.generate("x", replace(SAMPLED, structured_outputs=BOMBS["a chain of rules"]))
