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
    from ridgeline.engine.vllm.arguments import EngineArgs, FlexibleArgumentParser
    from ridgeline.engine.vllm.beams import BeamSearchOutput, BeamSearchParams
    from ridgeline.engine.vllm.metrics import Counter, Gauge, Histogram, Vector
    from ridgeline.engine.vllm.params import PoolingParams, SamplingParams, TextPrompt, TokensPrompt

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
    "BeamSearchOutput": "ridgeline.engine.vllm.beams",
    "BeamSearchParams": "ridgeline.engine.vllm.beams",
    "Counter": "ridgeline.engine.vllm.metrics",
    "EngineArgs": "ridgeline.engine.vllm.arguments",
    "FlexibleArgumentParser": "ridgeline.engine.vllm.arguments",
    "Gauge": "ridgeline.engine.vllm.metrics",
    "Histogram": "ridgeline.engine.vllm.metrics",
    "LLM": "ridgeline.engine.llm",
    "LoRARequest": "ridgeline.engine.adapters",
    "PoolingParams": "ridgeline.engine.vllm.params",
    "SamplingParams": "ridgeline.engine.vllm.params",
    "StructuredOutputsParams": "ridgeline.core.structured",
    "TextPrompt": "ridgeline.engine.vllm.params",
    "TokensPrompt": "ridgeline.engine.vllm.params",
    "Vector": "ridgeline.engine.vllm.metrics",
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
