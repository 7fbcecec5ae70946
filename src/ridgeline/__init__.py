"""Ridgeline: an LLM inference engine that knows its own physics.

from ridgeline import LLM, SamplingParams
"""

from ridgeline.core.params import SamplingParams
from ridgeline.llm import LLM
from ridgeline.outputs import Chunk, CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

__all__ = ["LLM", "Chunk", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
