"""What sentence-transformers' files say of vectors: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.model.files.sentence_transformers import DenseStep, steps_of
from ridgeline.model.files.tensors import ModelFileError

WHERE = Path("model")
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def read(
    pooling: Any = None, kinds: Any = ("Transformer", "Pooling", "Normalize"), **dense: Any
) -> Any:
    modules = [
        {"path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    files: dict[str, Any] = {"modules.json": modules} | dense
    if pooling is not None:
        files["1_Pooling/config.json"] = pooling
    texts = {n: v if isinstance(v, bytes) else json.dumps(v).encode() for n, v in files.items()}
    return steps_of(lambda name, most: texts.get(name), WHERE)


def test_without_modules_nothing_is_said() -> None:
    assert steps_of(lambda name, most: None, WHERE) is None


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_poolings(config: dict[str, Any], mode: str) -> None:
    assert read(config) == (mode, True, ())
    assert read(config, ("Transformer", "Pooling")) == (mode, False, ())


def test_dense_layers() -> None:
    kinds = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    two = {"2_Dense/config.json": {"activation_function": "torch.nn.modules.linear.Identity"}}
    two["3_Dense/config.json"] = {"activation_function": "torch.nn.modules.activation.Tanh"}
    layers = (DenseStep("2_Dense", False), DenseStep("3_Dense", True))
    assert read(MEAN, kinds, **two) == ("mean", True, layers)
    assert read(MEAN, kinds[:3], **two) == ("mean", False, layers[:1])
    two["2_Dense/config.json"] = {"activation_function": "torch.nn.modules.activation.ReLU"}
    with pytest.raises(ModelFileError, match="'ReLU' is not supported; supported: Identity, Tanh"):
        read(MEAN, kinds, **two)


@pytest.mark.parametrize(
    ("config", "kinds", "words"),
    [
        ({"pooling_mode_max_tokens": True}, None, "pooling_mode_max_tokens is not supported"),
        (MEAN | {"pooling_mode_cls_token": True}, None, "and pooling_mode_cls_token"),
        ({}, None, "pooling by nothing"),
        ({"pooling_mode": "weightedmean"}, None, "weightedmean"),
        ([], None, "not a JSON object"),
        (b"{", None, "not JSON"),
        (None, None, "names it, but it is missing"),
        (MEAN, ("Transformer", "Pooling", "Dense"), "2_Dense/config.json: .* it is missing"),
        (MEAN, ("Transformer", "Dense", "Pooling"), "Pooling stands where it may not"),
        (MEAN, ("Transformer", "Pooling", "Normalize", "Dense"), "Dense stands where it may not"),
        (MEAN, ("Transformer", "Pooling", "Pooling"), "Pooling stands where it may not"),
        (MEAN, ("Transformer", "Pooling", "CNN"), "the module 'CNN' is not supported"),
        (MEAN, ("Transformer",), "no module says"),
    ],
)
def test_what_is_refused_by_name(config: Any, kinds: Any, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        read(config, *([kinds] if kinds else []))
    assert "\n" not in str(caught.value)


def test_damaged_modules() -> None:
    for content in (b"", b"[1]", b"{}", b"[" * 100_000):
        with pytest.raises(ModelFileError, match=r"modules\.json"):
            steps_of(lambda name, most, content=content: content, WHERE)
