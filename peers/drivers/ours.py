"""Ridgeline, through its Python API, without prefix caching and drafts. Text is made too."""

from __future__ import annotations

from collections.abc import Sequence

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import Job, Shape
from ridgeline import LLM, SamplingParams, __version__


def open_engine(job: Job) -> Engine:
    """Load the model once for all shapes."""
    tokens = max((s.max_tokens for s in job.shapes), default=64)
    llm = LLM(
        job.model,
        threads=job.threads,
        enable_prefix_caching=False,
        max_model_len=max(tokens, 64),
        dtype=job.dtype,
        speculative_config="off",  # prompts are random: a small model then repeats itself
    )

    def ready(shape: Shape) -> Generate:
        def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            params = SamplingParams(
                temperature=shape.temperature,
                top_k=shape.top_k,
                top_p=shape.top_p,
                max_tokens=new_tokens,
                ignore_eos=True,
            )
            outputs = llm.generate(list(prompts), params, progress=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        return generate

    return ready


if __name__ == "__main__":
    main(open_engine, lambda: __version__)
