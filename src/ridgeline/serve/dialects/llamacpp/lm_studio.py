"""Models as LM Studio lists them."""

from __future__ import annotations

from typing import Any

from ridgeline.model.files.summary import Summary


def listed(name: str, summary: Summary, max_model_len: int | None) -> dict[str, Any]:
    """Return a model as a list has it; ``max_model_len`` is None while it is not loaded."""
    shown = {
        "id": name,
        "object": "model",
        "type": "llm" if summary.has_head else "embeddings",
        "publisher": "ridgeline",
        "arch": summary.family,
        "compatibility_type": "gguf" if summary.is_gguf else "safetensors",
        "quantization": next(iter(summary.formats)),
        "state": "not-loaded" if max_model_len is None else "loaded",
        "max_context_length": summary.context_length,
        "capabilities": ["tool_use"] if summary.can_chat else [],
    }
    return shown if max_model_len is None else shown | {"loaded_context_length": max_model_len}
