"""Runs of the core without a model. Its decisions are those that the server would make."""
