"""Hugging Face transformers: one stream, greedy; drafts are its assisted generation's lookup."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers  # type: ignore[import-not-found]

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import DRAFT_TOKENS, Job, Shape


def open_engine(job: Job) -> Engine:
    """Load the model once for all shapes."""
    torch.set_num_threads(job.threads)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(job.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    lookup = {"prompt_lookup_num_tokens": DRAFT_TOKENS, "max_matching_ngram_size": 3}

    def ready(shape: Shape) -> Generate:
        def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            [prompt] = prompts
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                whole = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **(lookup if job.drafts else {}),
                )
            return [whole[0, len(prompt) :].tolist()]

        return generate

    return ready


if __name__ == "__main__":
    main(open_engine, lambda: str(transformers.__version__))
