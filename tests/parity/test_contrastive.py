"""Contrastive search: the choices of its formula over transformers' hidden states in float32.

Transformers 5 has no contrastive search any more, so the formula of Su et al. (2022) stands here,
without a cache: every candidate is computed with the whole text before it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.parity import tiny

torch = tiny.torch
NEAR_TIE = 1e-4  # between the scores of two candidates


@pytest.mark.parametrize("name", ["llama2", "mistral-window", "qwen2-tied", "qwen3", "phi3"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_contrastive_search(name: str, backend: str, tmp_path: Path) -> None:
    model, dice = tiny.make_model(name), random.Random(name)
    path = tiny.save(model, tmp_path)
    prompts = tiny.prompts(*dice.choices(range(1, 40), k=12))
    wishes = [
        SamplingParams(
            penalty_alpha=dice.choice((0.2, 0.6, 0.9, 1.0)),
            top_k=dice.randint(2, 6),
            max_tokens=dice.randint(3, 16),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    exact: dict[str, Any] = {"backend": backend, "dtype": "f32", "kv_cache_dtype": "f32"}
    with LLM(str(path), max_model_len=64, **exact) as llm:
        outs = llm.generate(prompts, wishes)
    behind = [
        gap
        for prompt, wish, out in zip(prompts, wishes, outs, strict=True)
        for gap in gaps(model, prompt, wish, out.outputs[0].token_ids)
    ]
    assert max(behind) < NEAR_TIE
    assert sum(gap == 0 for gap in behind) > 0.95 * len(behind)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def gaps(model: Any, prompt: list[int], wish: SamplingParams, tokens: list[int]) -> list[float]:
    """Return by how much each of ``tokens`` is behind the best score in its place."""
    text, found = list(prompt), []
    alpha = wish.penalty_alpha
    assert alpha is not None
    for ours in tokens:
        probabilities, ranked = (
            model(torch.tensor([text])).logits[0, -1].softmax(-1).topk(wish.top_k)
        )
        rows = torch.tensor([[*text, token] for token in ranked.tolist()])
        states = model(rows, output_hidden_states=True).hidden_states[-1]
        states = torch.nn.functional.normalize(states, dim=-1)
        alike = (states[:, :-1] @ states[:, -1:].mT).amax((1, 2))
        scores = (1 - alpha) * probabilities - alpha * alike
        found.append((scores.max() - scores[ranked.tolist().index(ours)]).item())
        text.append(ours)
    return found
