"""Beam search: the answers and scores of transformers, for models of several families."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.parity import tiny, tiny_configs

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
            stop_token_ids=dice.sample(range(3, tiny_configs.VOCAB), dice.choice((1, 2, 20))),
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


@dataclass
class Places:
    """A constraint that says which tokens may come at each place."""

    allowed: list[list[int]]
    at: int = 0
    is_over: bool = False

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        bits = sum(1 << token for token in self.allowed[self.at])
        return (bits.to_bytes(-(-tiny_configs.VOCAB // 8), "little"),)

    def forced(self, most: int) -> tuple[int, ...]:
        return ()

    def num_valid(self, drafts: tuple[int, ...]) -> int:
        return 0

    def accept(self, token: int) -> None:
        self.at += 1

    def fork(self) -> Places:
        return replace(self)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_beams_within_a_grammar(backend: str, tmp_path: Path) -> None:
    """A mask drops candidates as transformers' ``prefix_allowed_tokens_fn`` does."""
    model, dice = tiny.make_model("llama2"), random.Random(26)
    path = tiny.save(model, tmp_path)
    exact: dict[str, Any] = {"backend": backend, "dtype": "f32", "kv_cache_dtype": "f32"}
    num_same = num_answers = 0
    with LLM(str(path), max_model_len=64, **exact) as llm:
        for prompt in tiny.prompts(*dice.choices(range(1, 40), k=16)):
            params = SamplingParams(
                use_beam_search=True,
                n=dice.choice((2, 3, 4)),
                length_penalty=dice.choice((0.0, 1.0, 2.0)),
                max_tokens=dice.randint(5, 16),
                ignore_eos=True,
                stop_token_ids=[3, 4],
            )
            allowed = [
                dice.sample(range(3, tiny_configs.VOCAB), dice.choice((8, 40))) for _ in range(64)
            ]
            found: dict[int, list[tuple[int, float]]] = {}
            llm.engine.add(tuple(prompt), params, new_constraint=partial(Places, allowed))
            while llm.engine.has_work():
                for event in llm.engine.step():
                    assert event.token is not None
                    logprob = event.logprobs.logprob if event.logprobs else math.nan
                    found.setdefault(event.seq_id[1], []).append((event.token, logprob))
            expected = search(model, prompt, params, allowed)
            assert len(found) == len(expected) == params.n
            for ours, (score, ids) in zip(found.values(), expected, strict=True):
                mine = sum(logprob for _, logprob in ours) / len(ours) ** params.length_penalty
                scale = len(ids) ** (1 - params.length_penalty)
                assert mine == pytest.approx(score, abs=NEAR_TIE * scale)
                num_same += [token for token, _ in ours] == ids
                num_answers += 1
    assert num_same >= 0.97 * num_answers


def search(
    model: Any,
    prompt: list[int],
    params: SamplingParams,
    allowed: list[list[int]] | None = None,
) -> list[tuple[float, list[int]]]:
    """Return transformers' answers with their scores, best first.

    ``allowed`` says which tokens may come at each place.
    """
    stops = list(params.stop_token_ids)
    allow = (lambda _, ids: allowed[len(ids) - len(prompt)]) if allowed else None
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
            prefix_allowed_tokens_fn=allow,
        )
    answers = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ids = row[len(prompt) :]
        last = next((i for i, token in enumerate(ids) if token in stops), len(ids) - 1)
        answers.append((score, ids[: last + 1]))
    return answers
