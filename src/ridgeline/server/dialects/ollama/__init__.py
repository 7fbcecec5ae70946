"""Ollama's API, for programs that have a setting for it: a thin edge over the one path."""
