"""The Python API: ``LLM`` and what it returns."""
