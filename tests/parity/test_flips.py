"""A slice of ``make test-parity-full``: one flip of every few of each family's config."""

from __future__ import annotations

import pytest

from tests.parity.flips import LEFT_OUT, Flip
from tests.parity.full import BAD
from tests.parity.tiny import ALL
from tests.parity.tiny_encoders import ENCODERS
from tests.parity.verdicts import flips_of, judge

NAMES = list(ALL)
EVERY, EVERY_OF_ENCODERS = 40, 25  # whose flips are fewer, and quicker


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_key_is_equal_or_refused_by_name(name: str) -> None:
    every = EVERY_OF_ENCODERS if name in ENCODERS else EVERY
    first = NAMES.index(name) % every  # another one of each family
    for flip in [*flips_of(name)][first::every]:
        judged = judge(name, flip)
        assert judged.verdict not in BAD, judged


@pytest.mark.parametrize(
    ("key", "value", "says", "verdict"),
    [
        ("hidden_act", "quick_gelu", {}, "refused"),
        ("rms_norm_eps", 0.01, {}, "equal"),
        ("rms_norm_eps", 0.01, {"rms_norm_eps": 1e-6}, "wrong"),
        ("mlp_bias", True, {"mlp_bias": False}, "unnamed"),
        ("num_key_value_heads", 3, {}, "impossible"),
    ],
)
def test_each_verdict_is_given(
    key: str, value: object, says: dict[str, object], verdict: str
) -> None:
    """``says`` is what config.json says instead, as if the key were passed over."""
    judged = judge("llama2", Flip(key, value, {key: value}), says=says)
    assert judged.verdict == verdict, judged


@pytest.mark.parametrize(
    ("name", "key", "value", "own", "passed_over"),
    [
        ("bert", "layer_norm_eps", 0.01, 1e-12, "wrong"),
        ("bert-pairs", "layer_norm_eps", 0.01, 1e-12, "wrong"),
        ("roberta-pairs", "hidden_act", "relu", "gelu", "wrong"),
        ("distilbert", "n_heads", 2, 4, "wrong"),
        ("modern-bert", "local_attention", 5, 24, "wrong"),
        ("embedding-gemma", "query_pre_attn_scalar", 224, 20, "wrong"),
        ("embedding-gemma", "attention_bias", True, False, "unnamed"),
    ],
)
def test_vectors_and_scores_are_judged_too(
    name: str, key: str, value: object, own: object, passed_over: str
) -> None:
    flip = Flip(key, value, {key: value})
    assert judge(name, flip).verdict == "equal"
    judged = judge(name, flip, says={key: own})
    assert judged.verdict == passed_over, judged


@pytest.mark.parametrize(
    ("name", "key", "as_if"),
    [
        ("mixtral", "rope_parameters", {"rope_parameters": {"rope_theta": 10_000.0}}),
        ("glm4-moe-lite", "rms_norm_eps", {"rms_norm_eps": 1e-6}),
        ("phi2", "rope_parameters.partial_rotary_factor", {"partial_rotary_factor": 1.0}),
    ],
)
def test_a_key_that_is_left_out_is_judged_by_the_default_of_transformers(
    name: str, key: str, as_if: dict[str, object]
) -> None:
    """``as_if`` is the default that we had once."""
    (flip,) = [one for one in flips_of(name) if one.key == key and one.value == LEFT_OUT]
    assert judge(name, flip).verdict == "equal"
    judged = judge(name, flip, says=as_if)
    assert judged.verdict == "wrong", judged


def test_what_no_key_explains_is_no_refusal_by_name() -> None:
    judged = judge("bert", Flip("", None, {}), says={"is_decoder": True})
    assert judged.verdict == "unnamed", judged


@pytest.mark.parametrize(
    ("says", "verdict"), [({}, "equal"), ({"routed_scaling_factor": 2.9}, "wrong")]
)
def test_a_tie_of_experts_is_decided_by_rounding(says: dict[str, object], verdict: str) -> None:
    """One token's experts score alike: transformers too takes others after a move of 5e-7.

    On processors where torch rounds it as we do, there is nothing to decide.
    """
    key = "qk_rope_head_dim"
    judged = judge("deepseek-v2-groups", Flip(key, 16, {key: 16}), says=says)
    assert judged.verdict == verdict, judged
    assert not (says and "a tie of experts" in judged.why), judged


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("deepseek-v3", "q_lora_rank"),
        ("ernie4.5-moe", "moe_norm_min"),
        ("gpt-oss", "rope_parameters"),
        ("granite-hybrid", "layer_types"),
        ("ministral3", "rope_parameters"),
        ("falcon-groups", "new_decoder_architecture"),
        ("opt", "layer_norm_elementwise_affine"),
        ("qwen2-moe", "layer_types"),
        ("qwen3-moe-between", "num_hidden_layers"),
    ],
)
def test_keys_that_were_wrong_once_are_equal_or_refused_by_name(name: str, key: str) -> None:
    judged = [judge(name, flip) for flip in flips_of(name) if flip.key == key]
    assert judged
    assert not [one for one in judged if one.verdict in BAD]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 3}),
        ("olmo3", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}}),
    ],
)
def test_a_file_that_says_in_new_words_what_it_keeps_in_old_ones(
    name: str, changes: dict[str, object]
) -> None:
    """transformers 5 reads a published key, saves it beside its own, and goes by its own."""
    judged = judge(name, Flip(next(iter(changes)), None, changes))
    assert judged.verdict == "equal", judged
