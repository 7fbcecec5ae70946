"""Samplers through the server: each field is honoured, and what leaves no token is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_llm import HELLO
from tests.serve.serving import Served

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 60, "seed": 4, "ignore_eos": True}
GO_ON: dict[str, Any] = {"prompt": "one two one two", **ASK}
del GO_ON["messages"]
ALWAYS_XTC = {"xtc_probability": 1, "xtc_threshold": 0.001}


def answer(served: Served, path: str, fields: dict[str, Any]) -> str:
    status, body, headers = served.call(path, (ASK if path == CHAT else GO_ON) | fields)
    assert status == 200, body
    assert "x-ridgeline-ignored" not in headers
    choice = body["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        ({}, {"seed": 5}),
        ({}, {"repetition_penalty": 50}),
        ({}, {"presence_penalty": 2}),
        ({}, {"frequency_penalty": 2}),
        ({}, {"logit_bias": {"50": 100}}),
        ({}, {"typical_p": 0.2}),
        ({}, {"top_n_sigma": 0.5}),
        ({}, ALWAYS_XTC),
        (ALWAYS_XTC, {"xtc_threshold": 0.4}),
        ({}, {"dry_multiplier": 30}),
        ({"dry_multiplier": 3, "dry_base": 1}, {"dry_base": 3}),
        ({"dry_multiplier": 30}, {"dry_allowed_length": 3}),
        ({"dry_multiplier": 30}, {"dry_penalty_last_n": 2}),
        ({"dry_multiplier": 30}, {"dry_sequence_breakers": ["G", "H"]}),
        ({}, {"allowed_token_ids": [50, 51, 52]}),
        ({}, {"bad_words": ["a", "b", "c", "d", "e", "f", "g"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_each_field_is_honoured(
    served: Served, path: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    """It changes the answer, to one that comes again."""
    base = base | {"temperature": 2}
    if "dry_multiplier" in base | fields:  # there must be repeats
        base = base | {"allowed_token_ids": list(range(40, 46))}
    changed = answer(served, path, base | fields)
    assert changed != answer(served, path, base)
    assert changed == answer(served, path, base | fields)


ALL = {"repeat_last_n": -1}


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"temperature": 2, "top_k": 1}, {"temperature": 0}),
        ({"temperature": 2, "top_p": 0}, {"temperature": 0}),
        ({"temperature": 2, "min_p": 1}, {"temperature": 0}),
        ({"repeat_penalty": 50} | ALL, {"repetition_penalty": 50}),
        ({"repeat_penalty": 50, "repeat_last_n": 0}, {}),
        ({"temperature": 2, "top_k": 1, "repeat_penalty": 50, "samplers": ["top_k"]} | ALL,
         {"temperature": 1, "top_k": 1}),
        ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"best_of": 0}, {}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_what_gets_the_same_answer(
    served: Served, path: str, fields: dict[str, Any], others: dict[str, Any]
) -> None:
    """Under another server's name, or where filters leave the likeliest token alone."""
    bodies = [(ASK if path == CHAT else GO_ON) | some for some in (fields, others)]
    one, same = (served.call(path, body)[1] for body in bodies)
    assert one["choices"] == same["choices"]
    assert one["usage"]["completion_tokens"] == same["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_values_that_switch_off_change_nothing(served: Served, temperature: float) -> None:
    off: list[dict[str, Any]] = [
        {"typical_p": 1, "top_n_sigma": -1, "xtc_probability": 0, "dry_multiplier": 0},
        {"typical_p": 1.0, "top_n_sigma": 0, "xtc_probability": 0.0, "dry_multiplier": 0.0},
        {"xtc_probability": 1, "xtc_threshold": 0.6},
        {"dry_multiplier": 5, "dry_penalty_last_n": 0, "dry_base": 2, "dry_allowed_length": 1},
        {"dry_sequence_breakers": ["x"], "xtc_threshold": 0.2, "bad_words": []},
        dict.fromkeys(
            ("typical_p", "dry_multiplier", "allowed_token_ids", "bad_words", "mirostat")
        ),
        {"mirostat": 0, "smoothing_factor": 0},
        {"dynatemp_range": 0.0, "adaptive_target": -1},
    ]
    plain = answer(served, COMPLETE, {"temperature": temperature})
    for fields in off:
        assert answer(served, COMPLETE, {"temperature": temperature} | fields) == plain


def test_greedy_answers_know_no_filters(served: Served) -> None:
    filters = {"typical_p": 0.1, "top_n_sigma": 0.1, **ALWAYS_XTC}
    greedy = answer(served, CHAT, {"temperature": 0})
    assert answer(served, CHAT, {"temperature": 0} | filters) == greedy
    assert "answer" in greedy
    assert answer(served, CHAT, {"temperature": 0, "bad_words": ["answer"]}).count("answer") == 0


def test_nothing_left_to_choose_ends_one_answer_alone(served: Served) -> None:
    """The second token would complete a bad word, and no other is allowed."""
    text = served.running.model_server.text
    pair = text.tokenizer.encode("zz", add_bos=False)
    assert pair[0] == pair[1]
    fields = {"allowed_token_ids": pair, "bad_words": ["zz"]}
    status, error = served.refused(COMPLETE, GO_ON | fields)
    assert (status, error["code"]) == (400, "invalid_value")
    assert "every token is ruled out" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_what_leaves_no_token_is_refused(served: Served, path: str) -> None:
    text = served.running.model_server.text
    letters = [t for t in range(400) if text.spell(t) in ("a", " a")]
    (end,) = text._eos_ids
    ask = (ASK if path == CHAT else GO_ON) | {"ignore_eos": False}
    for fields, name in (
        ({"allowed_token_ids": letters, "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [end], "min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [end, *letters], "min_tokens": 1, "bad_words": ["a"]}, "min_tokens"),
        ({"allowed_token_ids": [50], "min_tokens": 1, "stop_token_ids": [50]}, "min_tokens"),
    ):
        error = served.refused_for("allowed_token_ids", path, ask | fields)
        assert f"only tokens that {name} excludes" in error["message"]
    for fields in (
        {"allowed_token_ids": [end, 50], "min_tokens": 1},
        {"allowed_token_ids": [end], "min_tokens": 0},
        {"allowed_token_ids": [end], "min_tokens": 1, "ignore_eos": True},
    ):
        assert served.call(path, ask | fields)[0] == 200
