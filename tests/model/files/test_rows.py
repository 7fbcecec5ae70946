"""Rows of the table of families: what one says of another, and what follows for GGUF files."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

import pytest

from ridgeline.model.files.families import TABLES
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.fields import KINDS, choice, const, flag, has, integer
from ridgeline.model.files.families.inherit import FamilyRow, row, tables_of

BASE = row(
    "base",
    like="",
    hf="BaseForCausalLM",
    gguf="base",
    outer={"embed": "embed.", "norm": "norm.", "head": "head."},
    layer={"q k": "attn.qk.", "v": "attn.v.", "sinks": "attn.sinks"},
    prefix="layers.{}.",
    facts={
        "hidden_size": integer("hidden_size"),
        "vocab_size": integer("vocab_size"),
        "mixer.num_heads": integer("num_attention_heads"),
        "mixer.qkv_bias": flag("attention_bias"),
        "ffn.activation": choice("hidden_act", among={"a": "silu", "b": "relu"}, default="b"),
        "layer.norms": "behind",
    },
    windows="switch",
    refused_keys="one two",
    required={"old": True, "other": 1},
    in_gguf={"facts": {"mixer.sinks": True}},
)


def second(**changes: Any) -> tuple[Family, Family]:
    """What a row that is like ``BASE`` gives for both kinds of files."""
    one: FamilyRow = row("second", like="base", hf="SecondForCausalLM", gguf="second", **changes)
    tables = tables_of([BASE, one])
    return tables.hf["SecondForCausalLM"], tables.gguf["second"]


def test_a_row_has_what_the_row_has_that_it_is_like() -> None:
    in_hf, in_gguf = second()
    base = tables_of([BASE])
    assert (in_hf, in_gguf) == (base.hf["BaseForCausalLM"], base.gguf["base"])
    assert in_hf.refused_keys == ("one", "two")
    with pytest.raises(KeyError, match="nobody"):
        tables_of([row("third", like="nobody")])


def test_changes_are_added_and_none_or_a_minus_takes_away() -> None:
    in_hf, in_gguf = second(
        refused_keys="-one three",
        required={"old": None, "new": 2},
        facts={"layer.norms": None, "norm_bias": True},
        windows="all",
        in_gguf={"facts": {"mixer.sinks": None}},
    )
    assert in_hf.refused_keys == ("two", "three")
    assert in_hf.required == {"other": 1, "new": 2}
    assert "layer.norms" not in {*in_hf.facts, *in_gguf.facts}
    assert in_hf.facts["norm_bias"] == const(True)
    assert (in_hf.windows, in_gguf.windows, in_gguf.default_window) == ("all", "all", 0)
    assert "mixer.sinks" not in in_gguf.facts


def test_a_module_stands_for_its_weight_and_its_bias() -> None:
    in_hf, _ = second()
    assert in_hf.layer == {
        "q": "attn.qk.weight",
        "q_bias": "attn.qk.bias",
        "k": "attn.qk.weight",
        "k_bias": "attn.qk.bias",
        "v": "attn.v.weight",
        "v_bias": "attn.v.bias",
        "sinks": "attn.sinks",
    }


def test_the_half_for_gguf_files_has_their_names_and_keys() -> None:
    _, in_gguf = second()
    assert (in_gguf.outer["embed"], in_gguf.prefix) == ("token_embd.weight", "blk.{}.")
    assert "positions" not in in_gguf.outer  # which the row has not either
    assert (in_gguf.layer["q"], in_gguf.layer["k_bias"]) == ("attn_q.weight", "attn_k.bias")
    assert in_gguf.facts == {
        "hidden_size": integer("embedding_length"),
        "mixer.num_heads": integer("attention.head_count"),
        "mixer.qkv_bias": has("attn_q.bias"),  # each if the file has it
        "mixer.o_bias": has("attn_output.bias"),
        "ffn.activation": const("relu"),  # no key says it: the default
        "layer.norms": const("behind"),
        "mixer.sinks": const(True),
    }
    assert in_gguf.windows == "none"
    assert in_gguf.ignored_keys == ("attention.sliding_window",)


def test_gguf_files_may_say_what_the_row_reads_and_nothing_else_that_changes_an_answer() -> None:
    _, plain = second()
    _, sparse = second(has_experts=True, facts={"ffn.num": integer("num_experts")})
    assert {"expert_count", "logit_scale"} <= {*plain.refused_keys}
    assert "expert_count" not in sparse.refused_keys
    assert sparse.layer["gate"] == "ffn_gate_exps.weight"


def test_what_is_one_tensor_in_a_directory_is_one_in_a_gguf_file() -> None:
    _, apart = second()
    _, fused = second(layer={"q k v": "attn.qkv."})
    assert [apart.layer[part] for part in "qv"] == ["attn_q.weight", "attn_v.weight"]
    assert {fused.layer[part] for part in "qkv"} == {"attn_qkv.weight"}


@pytest.mark.parametrize("name", typing.get_type_hints(Family))
def test_every_field_of_every_family_has_a_value_of_its_type(name: str) -> None:
    """Rows are words by words: a wrong one would be another model without an error."""
    hint = typing.get_type_hints(Family)[name]
    families = [*TABLES.hf.values(), *TABLES.gguf.values(), *TABLES.counted.values()]
    for value in (getattr(family, name) for family in families):
        if typing.get_origin(hint) is typing.Literal:
            assert value in typing.get_args(hint)
        else:
            is_union = isinstance(hint, types.UnionType)
            wanted = hint if is_union else typing.get_origin(hint) or hint
            assert isinstance(value, wanted), (name, value)
            if wanted is tuple:
                assert all(isinstance(one, typing.get_args(hint)[0]) for one in value)


def test_every_word_of_every_row_has_options_that_its_reader_knows() -> None:
    """A misspelt option would else be an error of the first file that is read."""
    families = [*TABLES.hf.values(), *TABLES.gguf.values(), *TABLES.counted.values()]
    readers = {id(one): one for family in families for one in family.facts.values()}
    assert {one.kind for one in readers.values()} <= KINDS.keys()
    for one in readers.values():
        signature = inspect.signature(KINDS[one.kind])
        keys = one.keys[:1] if "key" in signature.parameters else one.keys
        signature.bind(None, *keys, **one.options)
