"""Ridgeline: an LLM inference engine for the machine you have.

from ridgeline import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    from ridgeline.api.vllm.arguments import EngineArgs, FlexibleArgumentParser
    from ridgeline.api.vllm.beams import BeamSearchOutput, BeamSearchParams
    from ridgeline.api.vllm.params import SamplingParams
    from ridgeline.api.vllm.prompts import TextPrompt, TokensPrompt
    from ridgeline.core.structured import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Chunk",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LoRARequest",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_PLACES = {
    "BeamSearchOutput": "ridgeline.api.vllm.beams",
    "BeamSearchParams": "ridgeline.api.vllm.beams",
    "EngineArgs": "ridgeline.api.vllm.arguments",
    "FlexibleArgumentParser": "ridgeline.api.vllm.arguments",
    "LLM": "ridgeline.api.llm",
    "LoRARequest": "ridgeline.api.adapters",
    "SamplingParams": "ridgeline.api.vllm.params",
    "StructuredOutputsParams": "ridgeline.core.structured",
    "TextPrompt": "ridgeline.api.vllm.prompts",
    "TokensPrompt": "ridgeline.api.vllm.prompts",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: the program's first lines must not wait for all of it."""
    if name not in __all__:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "ridgeline.api.outputs")), name)


def __dir__() -> list[str]:
    """Return the names that there are, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
