"""vLLM's CPU build: its Python API in one process.

Prefix caching is off and there is no tokenizer, but where they are needed: a schema and a beam
search want a tokenizer, and a beam search is a new request for every token of every beam, which
nobody would run without cached prefixes.

The engine runs in this process: a second one would compete with the kernels for the cores. The
start is measured with ``enforce_eager``, which reaches the first token sooner than loading what
torch compiled; the shapes are measured with the compiled model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import DRAFT_TOKENS, Job, Shape

_BLOCK_TOKENS = 32  # the smallest that its attention takes: a beam's last ones come again


def open_engine(job: Job) -> Engine:
    """Load the model once for all shapes."""
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(job.threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # It reads the environment when it is imported.
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import (  # type: ignore[import-not-found]
        BeamSearchParams,
        StructuredOutputsParams,
    )

    searches = any(s.beams > 1 for s in job.shapes)
    lookup = {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 3}
    llm = LLM(
        job.model,
        skip_tokenizer_init=not searches and not any(s.schema for s in job.shapes),
        enable_prefix_caching=searches,
        block_size=_BLOCK_TOKENS if searches else None,
        enforce_eager=not job.shapes,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max((s.num_sequences for s in job.shapes), default=1),
        disable_log_stats=True,
        speculative_config=lookup if job.drafts else None,
    )

    def ready(shape: Shape) -> Generate:
        form = StructuredOutputsParams(json=shape.schema) if shape.schema else None

        def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            params = SamplingParams(
                temperature=shape.temperature,
                top_k=shape.top_k,
                top_p=shape.top_p,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=form,
            )
            ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            if shape.beams > 1:
                search_params = BeamSearchParams(shape.beams, new_tokens, ignore_eos=True)
                best = [
                    result.sequences[0].tokens for result in llm.beam_search(ids, search_params)
                ]
                return [all_[len(p) :] for p, all_ in zip(prompts, best, strict=True)]
            outputs = llm.generate(ids, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        return generate

    return ready


def version() -> str:
    """Return vLLM's version."""
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main(open_engine, version)
