"""Ridgeline: an LLM inference engine for the machine you have.

from ridgeline import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ridgeline.version import __version__ as __version__

if TYPE_CHECKING:
    from ridgeline.api.adapters import LoRARequest
    from ridgeline.api.llm import LLM
    from ridgeline.api.outputs import (
        Chunk,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from ridgeline.api.vectors import print_embeddings
    from ridgeline.api.vllm.arguments import EngineArgs, FlexibleArgumentParser
    from ridgeline.api.vllm.beams import BeamSearchOutput, BeamSearchParams
    from ridgeline.api.vllm.metrics import Counter, Gauge, Histogram, Vector
    from ridgeline.api.vllm.params import PoolingParams, SamplingParams
    from ridgeline.api.vllm.prompts import TextPrompt, TokensPrompt
    from ridgeline.core.structured import StructuredOutputsParams

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
    "BeamSearchOutput": "ridgeline.api.vllm.beams",
    "BeamSearchParams": "ridgeline.api.vllm.beams",
    "Counter": "ridgeline.api.vllm.metrics",
    "EngineArgs": "ridgeline.api.vllm.arguments",
    "FlexibleArgumentParser": "ridgeline.api.vllm.arguments",
    "Gauge": "ridgeline.api.vllm.metrics",
    "Histogram": "ridgeline.api.vllm.metrics",
    "LLM": "ridgeline.api.llm",
    "LoRARequest": "ridgeline.api.adapters",
    "PoolingParams": "ridgeline.api.vllm.params",
    "SamplingParams": "ridgeline.api.vllm.params",
    "StructuredOutputsParams": "ridgeline.core.structured",
    "TextPrompt": "ridgeline.api.vllm.prompts",
    "TokensPrompt": "ridgeline.api.vllm.prompts",
    "Vector": "ridgeline.api.vllm.metrics",
    "print_embeddings": "ridgeline.api.vectors",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: the program's first lines must not wait for all of it."""
    if name not in __all__:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "ridgeline.api.outputs")), name)


def __dir__() -> list[str]:
    """Return the names that there are, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
