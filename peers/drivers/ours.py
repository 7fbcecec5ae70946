"""Ridgeline, through its Python API, without prefix caching. Text is made too."""

from __future__ import annotations

from collections.abc import Sequence

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import Job, Shape
from ridgeline import LLM, SamplingParams, StructuredOutputsParams, __version__


def open_engine(job: Job) -> Engine:
    """Load the model once for all shapes."""
    tokens = max((s.max_tokens for s in job.shapes), default=64)
    llm = LLM(
        job.model,
        threads=job.threads,
        enable_prefix_caching=False,
        max_model_len=max(tokens, 64),
        dtype=job.dtype,
        # Behind random prompts a small model repeats itself: drafts are for prompts of text.
        **({} if job.drafts else {"speculative_config": "off"}),
    )

    def ready(shape: Shape) -> Generate:
        form = StructuredOutputsParams(json=shape.schema) if shape.schema else None

        def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            params = SamplingParams(
                temperature=shape.temperature,
                top_k=shape.top_k,
                top_p=shape.top_p,
                max_tokens=new_tokens,
                ignore_eos=not shape.schema,  # which says itself when to end
                structured_outputs=form,
                use_beam_search=shape.beams > 1,
                best_of=shape.beams if shape.beams > 1 else None,
            )
            outputs = llm.generate(list(prompts), params, progress=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        return generate

    return ready


if __name__ == "__main__":
    main(open_engine, lambda: __version__)
