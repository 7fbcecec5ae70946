"""What sentence-transformers' files say of vectors: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.sentence import pooling_of
from ridgeline.models.tensors import ModelFileError

WHERE = Path("model")
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def read(pooling: Any = None, kinds: Any = ("Transformer", "Pooling", "Normalize")) -> Any:
    modules = [{"path": "1_Pooling", "type": f"sentence_transformers.models.{k}"} for k in kinds]
    files = {"modules.json": modules}
    if pooling is not None:
        files["1_Pooling/config.json"] = pooling
    texts = {n: v if isinstance(v, bytes) else json.dumps(v).encode() for n, v in files.items()}
    return pooling_of(lambda name, most: texts.get(name), WHERE)


def test_without_modules_nothing_is_said() -> None:
    assert pooling_of(lambda name, most: None, WHERE) is None


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
    assert read(config) == (mode, True)
    assert read(config, ("Transformer", "Pooling")) == (mode, False)


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
        (MEAN, ("Transformer", "Pooling", "Dense"), "the module 'Dense' is not supported"),
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
            pooling_of(lambda name, most, content=content: content, WHERE)
