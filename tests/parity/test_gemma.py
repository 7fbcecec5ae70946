"""Gemma 3 with real weights: windows in turn, two ropes, norms around, a scaled embedding."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from tests.parity.tiny import torch, transformers
from tests.real_models import shared_files

LENGTH, NUM_NEW, NEAR_TIE = 1000, 32, 0.02


@pytest.mark.full
def test_its_tokens_are_those_of_transformers() -> None:
    (path,) = shared_files("gemma-3-270m-q4_k_m.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    llm = LLM(str(path), dtype="f32", kv_cache_dtype="f32", max_model_len=LENGTH + NUM_NEW)
    rng = np.random.default_rng(5)
    words = [llm.tokenizer.encode(text) for text in (" the", " sea", " was", " blue", ".\n", " 7")]
    prompts = [
        [2, *(int(token) for i in rng.integers(0, len(words), LENGTH) for token in words[i])]
        for _ in range(4)
    ]
    prompts = [prompt[:LENGTH] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
    for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True):
        ours = out.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ours[:-1]]])).logits[0, LENGTH - 1 :]
        best, second = logits.topk(2).values.T
        for step, (token, wanted) in enumerate(zip(ours, logits.argmax(-1).tolist(), strict=True)):
            assert token == wanted or best[step] - second[step] < NEAR_TIE, step
        shares = logits.log_softmax(-1)
        for step, row in enumerate(out.outputs[0].logprobs):
            ((token, entry),) = row.items()
            assert entry.logprob == pytest.approx(float(shares[step, token]), abs=1e-3)
