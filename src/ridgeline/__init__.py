"""Ridgeline: an LLM inference engine for the machine you have.

from ridgeline import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ridgeline.version import __version__ as __version__

if TYPE_CHECKING:
    from ridgeline.core.structured import StructuredOutputsParams
    from ridgeline.engine.adapters import LoRARequest
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.outputs import (
        Chunk,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
        print_embeddings,
    )
    from ridgeline.engine.vllm import (
        BeamSearchOutput,
        BeamSearchParams,
        Counter,
        EngineArgs,
        FlexibleArgumentParser,
        Gauge,
        Histogram,
        PoolingParams,
        SamplingParams,
        TextPrompt,
        TokensPrompt,
        Vector,
    )

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Chunk",
    "CompletionOutput",
    "Counter",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "print_embeddings",
]

_PLACES = {
    "BeamSearchOutput": "ridgeline.engine.vllm",
    "BeamSearchParams": "ridgeline.engine.vllm",
    "Counter": "ridgeline.engine.vllm",
    "EngineArgs": "ridgeline.engine.vllm",
    "FlexibleArgumentParser": "ridgeline.engine.vllm",
    "Gauge": "ridgeline.engine.vllm",
    "Histogram": "ridgeline.engine.vllm",
    "LLM": "ridgeline.engine.llm",
    "LoRARequest": "ridgeline.engine.adapters",
    "PoolingParams": "ridgeline.engine.vllm",
    "SamplingParams": "ridgeline.engine.vllm",
    "StructuredOutputsParams": "ridgeline.core.structured",
    "TextPrompt": "ridgeline.engine.vllm",
    "TokensPrompt": "ridgeline.engine.vllm",
    "Vector": "ridgeline.engine.vllm",
    "print_embeddings": "ridgeline.engine.outputs",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: the program's first lines must not wait for all of it."""
    if name not in __all__:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "ridgeline.engine.outputs")), name)


def __dir__() -> list[str]:
    """Return the names that there are, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
