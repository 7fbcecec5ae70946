"""What runs in each of the places for sequences, as llama.cpp tells it."""

from __future__ import annotations

from typing import Any


def slot(index: int, max_model_len: int, sequence: dict[str, Any] | None) -> dict[str, Any]:
    """Return a slot with a sequence of ``engine.view``, or with none.

    There are no texts in it, and no parameters.
    """
    shown = {
        "id": index,
        "n_ctx": max_model_len,
        "speculative": False,
        "is_processing": sequence is not None,
    }
    if sequence is None:
        return shown
    num_left = sequence["max_tokens"] - sequence["generated_tokens"]
    num_decoded = sequence["generated_tokens"]
    return shown | {
        "id_task": sequence["id"][0],
        "n_prompt_tokens": sequence["prompt_tokens"],
        "n_prompt_tokens_processed": sequence["computed_tokens"],
        "n_prompt_tokens_cache": sequence["cached_tokens"],
        "next_token": [
            {"has_next_token": True, "n_remain": num_left, "n_decoded": num_decoded},
        ],
    }
