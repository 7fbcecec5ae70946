"""Beam search: the answers and scores of transformers, for models of several families."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.parity import tiny

NEAR_TIE = 2e-4  # of scores, per token


@pytest.mark.parametrize("name", ["llama2", "mistral-window", "qwen2-tied", "qwen3", "phi3"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_beams(name: str, backend: str, tmp_path: Path) -> None:
    model, dice = tiny.make_model(name), random.Random(name)
    path = tiny.save(model, tmp_path)
    cases = []
    for prompt in tiny.prompts(*dice.choices(range(1, 40), k=24)):
        params = SamplingParams(
            use_beam_search=True,
            n=dice.choice((2, 3, 4)),
            length_penalty=dice.choice((0.0, 0.5, 1.0, 2.0, -0.5)),
            early_stopping=dice.choice((True, False, "never")),
            max_tokens=dice.randint(3, 20),
            min_tokens=dice.choice((0, 0, 0, 3)),
            ignore_eos=True,
            stop_token_ids=dice.sample(range(3, tiny.VOCAB), dice.choice((1, 2, 20))),
        )
        cases.append((prompt, params, search(model, prompt, params)))
    exact: dict[str, Any] = {"backend": backend, "dtype": "f32", "kv_cache_dtype": "f32"}
    with LLM(str(path), max_model_len=64, **exact) as llm:
        outs = llm.generate([prompt for prompt, _, _ in cases], [params for _, params, _ in cases])
    num_same = 0
    for (_, params, expected), out in zip(cases, outs, strict=True):
        assert len(out.outputs) == params.n
        for ours, (score, ids) in zip(out.outputs, expected, strict=True):
            assert ours.cumulative_logprob is not None
            mine = ours.cumulative_logprob / len(ours.token_ids) ** params.length_penalty
            scale = len(ids) ** (1 - params.length_penalty)
            assert mine == pytest.approx(score, abs=NEAR_TIE * scale)
            num_same += ours.token_ids == tuple(ids)
    # Two answers whose scores are equal but for rounding may change places.
    assert num_same >= 0.97 * sum(params.n for _, params, _ in cases)


def search(model: Any, prompt: list[int], params: SamplingParams) -> list[tuple[float, list[int]]]:
    """Return transformers' answers with their scores, best first."""
    stops = list(params.stop_token_ids)
    with tiny.torch.inference_mode():
        found = model.generate(
            tiny.torch.tensor([prompt]),
            attention_mask=tiny.torch.ones(1, len(prompt), dtype=tiny.torch.long),
            num_beams=params.n,
            num_return_sequences=params.n,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=stops,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ids = row[len(prompt) :]
        last = next((i for i, token in enumerate(ids) if token in stops), len(ids) - 1)
        answers.append((score, ids[: last + 1]))
    return answers
