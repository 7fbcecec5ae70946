"""The right answer: what transformers said in float32, recorded by tools/record_reference.py.

All prompts of a model are generated in one call, so this is also a batch of prompts of many
lengths. A prompt is left at a token where the reference's two best were nearly tied.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.answers.conftest import BACKENDS
from tests.real_models import real_model

pytestmark = pytest.mark.engine

DATA = Path(__file__).parents[1] / "data" / "reference"
NUM_TOKENS = 64
NEAR_TIE = 0.02  # logits
LOGPROB_TOLERANCE = 2e-3
STORIES260K = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)


# What was recorded is in float32: the backends that do not round. Numpy takes minutes.
EXACT = ["cpu-f32", pytest.param("reference", marks=pytest.mark.full)]
TINYLLAMA = "tinyllama-1.1b-chat-iq2_xxs"


@pytest.mark.parametrize("backend", EXACT)
def test_smollm2(backend: str) -> None:
    compare(str(real_model("smollm2")), backend, "smollm2-135m-instruct-q4_1")


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cpu-f32", "reference"])
def test_qwen(backend: str) -> None:
    compare(str(real_model("qwen2.5-coder:0.5b")), backend, "qwen2.5-coder-0.5b-instruct-q4_k_m")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("stories15M", "cpu-f32"),
        pytest.param("stories15M", "reference", marks=pytest.mark.full),
        pytest.param(TINYLLAMA, "cpu-f32", marks=pytest.mark.full),
        pytest.param(TINYLLAMA, "reference", marks=pytest.mark.full),
    ],
)
def test_shared_model(name: str, backend: str, shared_model: Callable[[str], Path]) -> None:
    compare(str(shared_model(name)), backend, name)


@pytest.mark.parametrize("backend", ["cpu-f32", "reference"])
def test_known_story(backend: str, shared_model: Callable[[str], Path]) -> None:
    llm = LLM(str(shared_model("stories260K")), **BACKENDS[backend])
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    text = llm.generate([[1]], params)[0].outputs[0].text
    assert text.lstrip().startswith(STORIES260K)


def compare(model: str, backend: str, recording: str) -> None:
    """Assert that ``model`` continues every recorded prompt as recorded, and cuts texts so too."""
    prompts = json.loads((DATA / f"{recording}.json").read_text())["prompts"]
    assert len(prompts) >= 20
    llm = LLM(model, max_model_len=256, **BACKENDS[backend])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    outs = llm.generate([prompt["prompt_ids"] for prompt in prompts], params)
    problems = []
    for prompt, out in zip(prompts, outs, strict=True):
        ours = out.outputs[0]
        first = {token: entry.logprob for token, entry in ours.logprobs[0].items()}
        problem = wrong_token(prompt, ours.token_ids) or wrong_top5(prompt, first)
        if problem:
            problems.append(f"{prompt['text'][:40]!r}: {problem}")
    assert not problems, "\n".join(problems)
    texts = [prompt["text"] for prompt in prompts]
    for prompt, out in zip(prompts, llm.generate(texts, SamplingParams(max_tokens=1)), strict=True):
        assert out.prompt_token_ids == prompt["prompt_ids"]


def wrong_token(prompt: dict[str, Any], ids: tuple[int, ...]) -> str | None:
    """Say where ``ids`` leave the recording, unless that is at a near tie."""
    if len(ids) != NUM_TOKENS:
        return f"{len(ids)} tokens"
    rows = zip(ids, prompt["output_ids"], prompt["margins"], strict=True)
    for i, (got, wanted, margin) in enumerate(rows):
        if got != wanted:
            differs = f"token {i} is {got}, not {wanted} (margin {margin})"
            return differs if margin >= NEAR_TIE else None
    return None


def wrong_top5(prompt: dict[str, Any], logprobs: dict[int, float]) -> str | None:
    """Say which of the five likeliest first tokens is missing or has another logprob.

    Tokens about as likely as the fifth may stand for it.
    """
    fifth = prompt["top5"][-1][1]
    for token, wanted in prompt["top5"]:
        if token not in logprobs:
            if wanted - fifth > NEAR_TIE:
                return f"token {token} is not among the first top five"
        elif abs(logprobs[token] - wanted) > LOGPROB_TOLERANCE:
            return f"logprob of token {token} is {logprobs[token]:.4f}, not {wanted:.4f}"
    return None


@pytest.mark.parametrize("backend", EXACT)
def test_beams_of_smollm2(backend: str) -> None:
    """Recorded by tools/record_beams.py: all answers of each search, and their scores."""
    recording = json.loads((DATA / "smollm2-135m-instruct-q4_1.beams.json").read_text())
    header, searches = recording["header"], recording["searches"]
    assert len(searches) >= 30
    llm = LLM(str(real_model("smollm2")), max_model_len=128, **BACKENDS[backend])
    params = [
        SamplingParams(
            use_beam_search=True,
            n=search["wish"]["num_beams"],
            length_penalty=search["wish"].get("length_penalty", 1.0),
            early_stopping=search["wish"].get("early_stopping", False),
            min_tokens=search["wish"].get("min_new_tokens", 0),
            ignore_eos=True,
            stop_token_ids=header["stop_token_ids"],
            max_tokens=header["max_tokens"],
        )
        for search in searches
    ]
    outs = llm.generate([search["prompt_ids"] for search in searches], params)
    num_same = num_answers = 0
    for search, wish, out in zip(searches, params, outs, strict=True):
        for ours, theirs in zip(out.outputs, search["answers"], strict=True):
            length = len(ours.token_ids)
            assert ours.cumulative_logprob is not None
            score = ours.cumulative_logprob / length**wish.length_penalty
            near = LOGPROB_TOLERANCE * length ** (1 - wish.length_penalty)
            assert score == pytest.approx(theirs["score"], abs=near)
            num_same += list(ours.token_ids) == theirs["output_ids"]
            num_answers += 1
            has_stopped = ours.token_ids[-1] in header["stop_token_ids"]
            assert ours.finish_reason == ("stop" if has_stopped else "length")
    assert num_same == num_answers
