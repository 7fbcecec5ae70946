"""Ridgeline, through its Python API. Prefix caching is off; text is made as for any user."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.drivers.measure import Engine, main
from bench.peers.shapes import Job
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
    )

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(list(prompts), params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return lambda num_streams, max_tokens: generate


if __name__ == "__main__":
    main(open_engine, lambda: __version__)
