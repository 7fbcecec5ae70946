"""Whether the head is the embedding: what a config says and what the file has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ridgeline.model.files.families import model_from_config
from ridgeline.model.files.tensors import ModelFileError, Tensor, same_bytes
from tests.model.files.tiny import CONFIG, Config, as_tensors, hf_weights

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTER = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
UNSAID = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}


def head_of(config: Config, raw: dict[str, np.ndarray]) -> tuple[np.ndarray, list[str]]:
    """Return the matrix that makes logits, and what is said of it."""
    notes: list[str] = []
    arch, tensors = model_from_config(config, as_tensors(raw), "model", note=notes.append)
    assert arch.tied_embeddings == ("head" not in tensors)
    return tensors["embed" if arch.tied_embeddings else "head"].to_f32(), notes


def nested(inner: Any, outer: Any) -> Config:
    """A model that also sees; None leaves the key out."""
    key = "tie_word_embeddings"
    text = UNSAID | {"model_type": "mistral"} | ({} if inner is None else {key: inner})
    return OUTER | {"text_config": text} | ({} if outer is None else {key: outer})


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CONFIG | {"tie_word_embeddings": True},
        *(nested(inner, outer) for inner in (None, True, False) for outer in (None, True, False)),
    ],
)
def test_a_head_that_differs_is_used_whatever_a_config_says(config: Config) -> None:
    raw = hf_weights(CONFIG)
    found, notes = head_of(config, raw)
    np.testing.assert_array_equal(found, raw[HEAD])
    said = config.get("text_config", config).get(
        "tie_word_embeddings", config.get("tie_word_embeddings", False)
    )
    assert len(notes) == bool(said)
    for note in notes:
        assert note.startswith(f"{HEAD} differs from {EMBED}, so it is used, though tie_word_")


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
def test_without_a_head_the_embedding_serves_if_either_level_says_so(
    inner: bool | None, outer: bool | None
) -> None:
    raw = hf_weights(CONFIG)
    del raw[HEAD]
    config = nested(inner, outer)
    if True in (inner, outer):
        found, notes = head_of(config, raw)
        np.testing.assert_array_equal(found, raw[EMBED])
        assert notes == []
    else:
        with pytest.raises(ModelFileError, match=r"'lm_head.weight' of shape .* is missing"):
            head_of(config, raw)


def test_a_head_that_is_the_embedding_is_kept_once() -> None:
    tied = CONFIG | {"tie_word_embeddings": True}
    raw = hf_weights(CONFIG)
    raw[HEAD] = raw[EMBED].copy()
    found, notes = head_of(tied, raw)
    assert notes == []
    np.testing.assert_array_equal(found, raw[EMBED])
    assert "head" not in model_from_config(tied, as_tensors(raw), "model")[1]
    del raw[EMBED]  # either may stand for both
    np.testing.assert_array_equal(head_of(tied, raw)[0], found)


def test_the_last_byte_of_a_large_tensor_counts() -> None:
    stored = np.zeros((3000, 4), np.uint8)
    other = stored.copy()
    one = Tensor("a", "F32", (3000,), stored)
    assert same_bytes(one, Tensor("b", "F32", (3000,), other))
    other[-1, -1] = 1
    assert not same_bytes(one, Tensor("b", "F32", (3000,), other))
    assert not same_bytes(one, Tensor("b", "F32", (1, 3000), stored))
    assert not same_bytes(one, Tensor("b", "I32", (3000,), stored))
    assert not same_bytes(one, one.reordered(np.arange(3000)[::-1]))
