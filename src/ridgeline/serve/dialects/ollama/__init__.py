"""Ollama's API, for programs that have a setting for it, translated to and from OpenAI's."""
