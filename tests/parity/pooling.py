"""What a model without answers says of texts, vectors or scores, and what transformers says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ridgeline import LLM
from tests.parity import tiny
from tests.parity.tiny import torch
from tests.parity.tiny_configs import VOCAB
from tests.parity.tiny_encoders import word_tokenizer, write_steps


class Pooled(NamedTuple):
    """What is said of one text: the mean of its states, or the score of two texts as one.

    Attributes:
        ids: of the text.
        types: of its tokens, where a model has several for the texts of a pair.
        values: ours.
    """

    ids: list[int]
    types: list[int] | None
    values: np.ndarray

    def off(self, model: Any) -> np.ndarray:
        """Return how far each number is from that of transformers."""
        distance: np.ndarray = abs(self.values - numbers_of(model, self.ids, self.types))
        return distance


def scores_pairs(model: Any) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def numbers_of(model: Any, ids: list[int], types: list[int] | None = None) -> np.ndarray:
    """Return the mean of a text's final states, or its score before any sigmoid."""
    more = {"token_type_ids": torch.tensor([types])} if types else {}
    with torch.inference_mode():
        said = model(torch.tensor([ids]), **more)
    found = said.logits[0] if scores_pairs(model) else said.last_hidden_state[0].mean(0)
    numbers: np.ndarray = found.double().numpy()
    return numbers


def save(model: Any, folder: Path) -> Path:
    """Write ``model`` with a tokenizer of words, and how its states become a vector."""
    tiny.save(model, folder)
    if not scores_pairs(model):
        write_steps(folder, "mean", normalises=False)
        return folder
    between = 2 if "Roberta" in type(model).__name__ else 1
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(VOCAB, between)))
    return folder


def pairs_of(texts: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """Return each text in two, a tenth of it and the rest, in words."""
    words = [[f"w{max(i, 4)}" for i in ids] for ids in texts]
    return [(" ".join(row[: len(row) // 10]), " ".join(row[len(row) // 10 :])) for row in words]


def pair_ids(folder: Path, pair: tuple[str, str]) -> tuple[list[int], list[int] | None]:
    """Return a pair's ids and types as the tokenizers library has them; RoBERTa has no types."""
    said = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*pair)
    return said.ids, said.type_ids if any(said.type_ids) else None


def answers_of(
    folder: Path, model: Any, texts: list[list[int]], room: int, backend: str
) -> list[Pooled]:
    """Return our numbers of these texts, given together."""
    with LLM(
        str(folder),
        backend=backend,
        dtype="f32",
        kv_cache_dtype="f32",
        max_num_seqs=4,
        kv_cache_memory="16MiB",
        max_model_len=room,
        threads=1,
    ) as llm:
        if not scores_pairs(model):
            found = llm.embed(texts)
            vectors = [np.array(out.outputs.embedding) for out in found]
            return [Pooled(ids, None, row) for ids, row in zip(texts, vectors, strict=True)]
        pairs = pairs_of(texts)
        scores = [out.outputs.score for out in llm.score(*zip(*pairs, strict=True))]
    return [
        Pooled(*pair_ids(folder, pair), np.array([score]))
        for pair, score in zip(pairs, scores, strict=True)
    ]
