"""vLLM's CPU build: its Python API in one process, prefix caching off, no tokenizer.

The engine runs in this process: a second one would compete with the kernels for the cores. The
start is measured with ``enforce_eager``, which reaches the first token sooner than loading what
torch compiled; the shapes are measured with the compiled model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import Job, Shape


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

    llm = LLM(
        job.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=not job.shapes,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max((s.num_streams for s in job.shapes), default=1),
        disable_log_stats=True,
    )

    def ready(shape: Shape) -> Generate:
        def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            params = SamplingParams(
                temperature=shape.temperature,
                top_k=shape.top_k,
                top_p=shape.top_p,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
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
