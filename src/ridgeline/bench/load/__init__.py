"""The load generator: ``ridgeline bench serve``."""
