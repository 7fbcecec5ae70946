"""The HTTP edge: an OpenAI-compatible server over one engine."""
