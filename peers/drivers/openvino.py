"""OpenVINO GenAI: its continuous-batching pipeline, prefix caching off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import DRAFT_TOKENS, Job, Shape

_BLOCK_TOKENS = 32


def open_engine(job: Job) -> Engine:
    """Load the model once for all shapes."""
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = max((s.num_sequences for s in job.shapes), default=1)
    tokens = max((s.max_tokens for s in job.shapes), default=64)
    scheduler.num_kv_blocks = scheduler.max_num_seqs * (tokens // _BLOCK_TOKENS + 2)
    properties = {"INFERENCE_NUM_THREADS": job.threads}
    if job.drafts:
        properties["prompt_lookup"] = True
    pipeline = genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)

    def ready(shape: Shape) -> Generate:
        def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            config = genai.GenerationConfig()
            config.max_new_tokens = new_tokens
            config.ignore_eos = True
            config.do_sample = shape.temperature > 0
            if config.do_sample:
                config.temperature = shape.temperature
                config.top_p = shape.top_p
            if shape.top_k:
                config.top_k = shape.top_k
            if shape.schema:
                form = genai.StructuredOutputConfig(json_schema=shape.schema)
                config.structured_output_config = form
            if shape.beams > 1:
                config.num_beams = shape.beams
            if job.drafts:
                config.num_assistant_tokens = DRAFT_TOKENS
                config.max_ngram_size = 3
            ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
            results = pipeline.generate(ids, [config] * len(ids))
            return [list(result.m_generation_ids[0]) for result in results]

        return generate

    return ready


if __name__ == "__main__":
    main(open_engine, lambda: str(genai.__version__))
