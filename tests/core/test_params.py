"""SamplingParams: what is refused, by name, and that what is accepted stays as it was."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.structured import StructuredOutputsParams

# field, the lowest and the highest value allowed, what lies just outside
WHOLE = [
    ("n", 1, 1024),
    ("best_of", 1, 1024),
    ("top_k", -1, 1 << 31),
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("max_tokens", 1, 1 << 31),
    ("min_tokens", 0, 16),
    ("logprobs", -1, 1 << 31),
    ("prompt_logprobs", -1, 1 << 31),
    ("truncate_prompt_tokens", -1, 1 << 31),
    ("dry_allowed_length", 1, 1024),
    ("dry_penalty_last_n", -1, 1 << 31),
]
REAL = [
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", -1.0, 100.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 100.0),
]
OPTIONAL = {"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "logit_bias"}
OPTIONAL |= {"truncate_prompt_tokens"}


def refused(**params: Any) -> str:
    """Return the message with which these parameters are refused."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (every test looks at the message)
        SamplingParams(**params)
    return str(caught.value)


@pytest.mark.parametrize(("name", "low", "high"), WHOLE + REAL)
def test_the_whole_range_is_accepted(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "low", "high"), WHOLE)
def test_whole_numbers_out_of_range_are_refused_by_name(name: str, low: int, high: int) -> None:
    for value in (low - 1, high + 1, 10**400, -(10**400)):
        message = refused(**{name: value})
        assert message.startswith(f"{name} is {value}: ")
        assert "\n" not in message
    if name != "min_tokens":
        assert f"from {low} to {high}" in refused(**{name: low - 1})


@pytest.mark.parametrize(("name", "low", "high"), REAL)
def test_numbers_out_of_range_are_refused_by_name(name: str, low: float, high: float) -> None:
    for value in (low - 0.005, high + 0.005, math.inf, -math.inf, math.nan, 10**400):
        assert refused(**{name: value}).startswith(f"{name} is {value}: it must be from {low} to")


@pytest.mark.parametrize("name", [row[0] for row in WHOLE + REAL])
def test_other_types_are_refused_by_name(name: str) -> None:
    for value in (True, False, "1", b"1", [1], {}, 1j):
        assert refused(**{name: value}).startswith(f"{name} must be a ")
    if name not in OPTIONAL:
        assert refused(**{name: None}).startswith(f"{name} must be a ")


@pytest.mark.parametrize("name", [row[0] for row in WHOLE])
def test_fractions_are_refused_where_a_count_is_meant(name: str) -> None:
    for value in (1.0, 1.5, math.nan, math.inf):
        assert refused(**{name: value}) == f"{name} must be a whole number, not {value!r}"


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_none_means_no_wish(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize("value", [0, 1, None, "yes", 1.0])
def test_ignore_eos_must_be_a_boolean(value: object) -> None:
    assert refused(ignore_eos=value) == f"ignore_eos must be true or false, not {value!r}"


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    assert refused(min_tokens=6, max_tokens=5) == "min_tokens is 6: over max_tokens 5"


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop=(text for text in "ab")).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", [""], ["a", ""], [1], [None], b"ab", 5, 0, False, [["a"]]])
def test_stop_strings_of_other_kinds_are_refused(value: object) -> None:
    assert refused(stop=value).startswith("stop must be ")


@pytest.mark.parametrize("value", [[-1], [True], ["7"], [1.0], [(1 << 31) + 1], 7, 0, "7", [None]])
def test_stop_token_ids_of_other_kinds_are_refused(value: object) -> None:
    assert refused(stop_token_ids=value).startswith("stop_token_ids ")


def test_stop_token_ids_may_come_from_any_iterable() -> None:
    assert SamplingParams(stop_token_ids=(i for i in (1, 2))).stop_token_ids == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({-1: 0.0}, "logit_bias token id is -1"),
        ({"5": 0.0}, "logit_bias token id must be a whole number, not '5'"),
        ({True: 0.0}, "logit_bias token id must be"),
        ({5: 100.5}, "logit_bias of token 5 is 100.5"),
        ({5: -100.5}, "logit_bias of token 5 is -100.5"),
        ({5: math.nan}, "logit_bias of token 5 is nan"),
        ({5: "1"}, "logit_bias of token 5 must be a number, not '1'"),
        ({5: True}, "logit_bias of token 5 must be a number, not True"),
        ([1, 2], "logit_bias must map token ids to numbers, not [1, 2]"),
        ("ab", "logit_bias must map token ids"),
    ],
)
def test_logit_bias_is_checked_entry_by_entry(value: object, named: str) -> None:
    assert refused(logit_bias=value).startswith(named)
    assert SamplingParams(logit_bias={5: 100, 6: -100.0}).logit_bias == {5: 100, 6: -100.0}


@pytest.mark.parametrize("name", ["bad_words", "dry_sequence_breakers"])
def test_lists_of_texts_are_checked(name: str) -> None:
    assert getattr(SamplingParams(**{name: ["ab", " c"]}), name) == ("ab", " c")
    assert getattr(SamplingParams(**{name: []}), name) == ()
    assert refused(**{name: "ab"}) == f"{name} must be a list of strings, not 'ab'"
    for value in ([""], [1], [None], b"ab", 5, [["a"]]):
        assert refused(**{name: value}).startswith(f"{name} must be ")


def test_allowed_token_ids_are_checked() -> None:
    assert SamplingParams(allowed_token_ids=[3, 1]).allowed_token_ids == (3, 1)
    assert SamplingParams().allowed_token_ids is None
    assert refused(allowed_token_ids=[]).startswith("allowed_token_ids is empty: ")
    for value in ([-1], [True], ["7"], [1.0], [(1 << 31) + 1], 7, "7", [None]):
        assert refused(allowed_token_ids=value).startswith("allowed_token_ids ")
    with pytest.raises(ValueError, match=r"allowed_token_ids names token 8: ids end at 7"):
        SamplingParams(allowed_token_ids=[8]).validate_ids(8)


def test_who_needs_the_tokens_before() -> None:
    assert not SamplingParams().needs_history
    assert SamplingParams(presence_penalty=1.0).needs_history
    assert SamplingParams(bad_words=["x"]).needs_history
    assert SamplingParams(dry_multiplier=0.1).needs_history
    assert SamplingParams(dry_multiplier=0.1).uses_dry
    assert not SamplingParams(dry_multiplier=0.1, dry_penalty_last_n=0).needs_history
    assert not SamplingParams(dry_multiplier=0.1).penalises
    filters = {"typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 1.0}
    assert not SamplingParams(**filters, allowed_token_ids=[1]).needs_history  # type: ignore[arg-type]


def test_later_changes_of_what_was_passed_do_not_reach_in() -> None:
    stop, stop_ids, bias = ["x"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_ids, logit_bias=bias)
    stop.append("y")
    stop_ids.append(2)
    bias[2] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (1,), {1: 1.0})
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_params_survive_pickling() -> None:
    params = SamplingParams(stop="x", logit_bias={1: 1.0}, seed=5)
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301 (its own bytes)


def test_ids_beyond_the_vocabulary_are_named() -> None:
    params = SamplingParams(stop_token_ids=[9], logit_bias={8: 1.0})
    params.validate_ids(10)
    SamplingParams().validate_ids(1)
    with pytest.raises(ValueError, match=r"stop_token_ids names token 9: ids end at 8"):
        params.validate_ids(9)
    with pytest.raises(ValueError, match=r"logit_bias names token 8: ids end at 7"):
        SamplingParams(logit_bias={8: 1.0}).validate_ids(8)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_needs_the_tokens_before(name: str) -> None:
    assert not SamplingParams().penalises
    assert SamplingParams(**{name: 0.5}).penalises  # type: ignore[arg-type]


# --- the form of an answer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({}, "sets none of them: it must set one of"),
        ({"json": "{}", "regex": "a"}, "sets json and regex"),
        ({"choice": []}, "must have texts"),
        ({"choice": "yes"}, "must be a list of texts"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"regex": 7}, "structured_outputs.regex must be text"),
        ({"json": 7}, "must be a JSON schema"),
        ({"json": "{}", "disable_any_whitespace": True, "whitespace_pattern": " "}, "one of them"),
    ],
)
def test_wrong_wishes(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(structured_outputs=wish)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_contradicts_a_form(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(other))} contradicts structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, **other)  # type: ignore[arg-type]


def test_forms_are_kept_as_plain_values() -> None:
    params = SamplingParams(structured_outputs={"json": {"type": "string"}})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(json='{"type": "string"}')
    assert StructuredOutputsParams(json=True).json == "true"
    assert StructuredOutputsParams(json=False).json == "false"
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    with pytest.raises(ValueError, match="must be StructuredOutputsParams, not 7"):
        SamplingParams(structured_outputs=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="json_object must be true or false"):
        StructuredOutputsParams(json_object=1)  # type: ignore[arg-type]


def test_a_prediction_is_text() -> None:
    assert SamplingParams(prediction="so").prediction == "so"
    with pytest.raises(ValueError, match="prediction must be text, not 7"):
        SamplingParams(prediction=7)  # type: ignore[arg-type]


# --- answers that are chosen -------------------------------------------------------------------


def test_of_how_many_answers_how_many_are_chosen() -> None:
    assert refused(n=3, best_of=2) == "best_of is 2: it must be at least n (3)"
    assert refused(use_beam_search=1).startswith("use_beam_search must be true or false")
    assert refused(length_penalty=11.0).startswith("length_penalty is 11.0: ")
    cases = [
        ({}, 1, 1),
        ({"n": 2}, 2, 2),
        ({"n": 2, "best_of": 2}, 2, 2),
        ({"n": 2, "best_of": 3}, 3, 3),
        ({"n": 2, "best_of": 3, "use_beam_search": True}, 3, 2),
    ]
    for wishes, num_seqs, num_answers in cases:
        params = SamplingParams(**wishes)
        assert (params.num_seqs, params.num_answers) == (num_seqs, num_answers)


def test_a_copy_is_equal_and_keeps_what_was_said_by_an_older_name() -> None:
    params = SamplingParams(
        guided_decoding={"regex": "a+"}, detokenize=False, output_kind=2, stop="x"
    )
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    assert params.clone() == params
    assert params.clone() is not params
    assert SamplingParams().clone().structured_outputs is None


@pytest.mark.parametrize(
    "name",
    ["include_stop_str_in_output", "skip_special_tokens", "post_sampling_probs", "ignore_eos"],
)
def test_what_is_shown_is_true_or_false(name: str) -> None:
    assert f"{name} must be true or false, not 1" in refused(**{name: 1})
