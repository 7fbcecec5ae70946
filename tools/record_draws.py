"""Record what the rule of ``sampler.rule`` draws: tests/data/draws.json, to be kept for good.

    python tools/record_draws.py

Logits are made from whole numbers, so that they are the same everywhere. The file changes only
with the rule, and then every user's seeds mean other answers: the CHANGELOG must say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.sampler.rule import Row, rank_tokens, sample
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling

PATH = Path(__file__).resolve().parent.parent / "tests" / "data" / "draws.json"
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {"7": 3.5, "11": -100.0}, "top_k": 100},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.3, "min_tokens": 64, "max_tokens": 64},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.2, "temperature": 1.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "min_p": 0.02},
    {"temperature": 3, "top_k": 90, "typical_p": 0.9, "top_p": 0.9, "top_n_sigma": 2},
]
VOCAB_SIZE = 1000
NUM_DRAWS = 12  # of each


def logits_of(number: int) -> NDArray[np.float32]:
    """Return a row of logits from -8 to 8 in steps of 2 ** -10, with ties."""
    ids = np.arange(VOCAB_SIZE, dtype=np.uint64)
    mixed = (ids + np.uint64(1)) * np.uint64(2654435761) * np.uint64(2 * number + 1)
    steps = ((mixed >> np.uint64(7)) % np.uint64(16384)).astype(np.float32)
    return steps / np.float32(1024) - np.float32(8)


def row_of(number: int, params: dict[str, Any], draw: int) -> Row:
    """Return a draw."""
    known = dict(params)
    if "logit_bias" in known:
        known["logit_bias"] = {int(token): bias for token, bias in known["logit_bias"].items()}
    values = SamplingParams(**known)
    history = (3, 5, 3, 900, 901, 3 + draw) if values.penalises else ()
    position = 6 + draw
    return Row(Sampling(values, 2, (1, 2, 40)), 1_000_003 * (number + 1), position, history)


def main() -> None:
    """Write the file."""
    recorded = []
    for number, params in enumerate(PARAMS):
        logits = logits_of(number)[None]
        rows = [row_of(number, params, draw) for draw in range(NUM_DRAWS)]
        tokens = sample(logits, np.zeros(NUM_DRAWS, np.intp), rows)
        assert tokens[0] is not None
        ((_, logprob, rank, top),) = rank_tokens(logits, [tokens[0]], 2)
        first = {"logprob": logprob, "rank": rank, "top": [token for token, _ in top]}
        recorded.append({"params": params, "tokens": tokens, "first": first})
    PATH.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
