"""Backends: each is a Runner (``core.step.Runner``). Nothing outside imports their insides."""
