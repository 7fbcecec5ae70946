"""One small program per engine, run in that engine's own environment."""
