"""Mixes: the names of files mean the same types as llama.cpp's."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.engine.quantise.targets import types_of
from ridgeline.model.cost.gguf_mixes import Mix
from ridgeline.model.files.tensors import Tensor

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def tensors(num_layers: int, width: int = 256, *others: str) -> dict[str, Tensor]:
    names = [f"blk.{i}.{part}.weight" for i in range(num_layers) for part in PARTS]
    shapes = dict.fromkeys(("token_embd.weight", *names, *others), (8, width))
    shapes["output_norm.weight"] = (width,)
    empty = np.zeros((1, 1), np.uint8)
    return {name: Tensor(name, "BF16", shape, empty) for name, shape in shapes.items()}


def layers_of(types: dict[str, str], part: str, dtype: str) -> list[int]:
    return [int(n.split(".")[1]) for n, found in types.items() if part in n and found == dtype]


# llama.cpp's use_more_bits, of 18 and of 30 layers.
WIDER = {
    18: [0, 1, 4, 7, 10, 13, 15, 16, 17],
    30: [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29],
}


@pytest.mark.parametrize(("target", "main"), [("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")])
@pytest.mark.parametrize("num_layers", WIDER)
def test_values_and_down_projections_of_some_layers_are_wider(
    target: str, main: str, num_layers: int
) -> None:
    types = types_of(Mix(target, num_layers), tensors(num_layers))
    for part in ("attn_v", "ffn_down"):
        assert layers_of(types, part, "Q6_K") == WIDER[num_layers]
        assert len(layers_of(types, part, main)) == num_layers - len(WIDER[num_layers])
    assert layers_of(types, "attn_q.", main) == list(range(num_layers))


@pytest.mark.parametrize(
    ("target", "embedding", "head"),
    [("q4_k_m", "Q4_K", "Q6_K"), ("q6_k", "Q6_K", "Q6_K"), ("q8_0", "Q8_0", "Q8_0"),
     ("q4_0", "Q4_0", "Q6_K")],
)  # fmt: skip
def test_the_head_is_wider_also_where_it_is_the_embedding(
    target: str, embedding: str, head: str
) -> None:
    types = types_of(Mix(target, 2), tensors(2, 256, "output.weight"))
    assert (types["token_embd.weight"], types["output.weight"]) == (embedding, head)
    assert types_of(Mix(target, 2, is_tied=True), tensors(2))["token_embd.weight"] == head


@pytest.mark.parametrize(
    ("target", "wanted"), [("q4_k_m", "Q5_0"), ("q5_k_m", "Q5_1"), ("q6_k", "Q8_0")]
)
def test_rows_that_256_does_not_divide_get_wider_blocks(target: str, wanted: str) -> None:
    types = types_of(Mix(target, 2), tensors(2, 288))
    assert types["blk.0.attn_q.weight"] == wanted
    assert types_of(Mix(target, 2), tensors(2, 40))["blk.0.attn_q.weight"] == "BF16"


def test_norms_and_routers_stay() -> None:
    types = types_of(Mix("q4_0", 1), tensors(1, 256, "blk.0.ffn_gate_inp.weight"))
    assert types["output_norm.weight"] == types["blk.0.ffn_gate_inp.weight"] == "BF16"


def test_eight_experts_widen_attention() -> None:
    types = types_of(Mix("q4_k_m", 4, num_experts=8), tensors(4))
    found = [types[f"blk.1.{part}.weight"] for part in PARTS[:4]]
    assert found == ["Q4_K", "Q8_0", "Q8_0", "Q5_K"]


def test_values_of_70b_are_wider() -> None:
    types = types_of(Mix("q4_k_m", 80, per_key=8), tensors(80))
    assert len(layers_of(types, "attn_v", "Q6_K")) + len(layers_of(types, "attn_v", "Q5_K")) == 80
    assert len(layers_of(types, "attn_v", "Q5_K")) == len(layers_of(types, "ffn_down", "Q4_K"))


def test_shared_experts_and_latent_values_follow_the_rules_of_their_kind() -> None:
    names = [f"blk.{i}.{part}.weight" for i in (0, 1) for part in ("attn_kv_b", "ffn_down_shexp")]
    types = types_of(Mix("q4_k_m", 2), tensors(2, 256, *names))
    assert [types[name] for name in names] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
