"""Model files in, checked facts and tensors out. Knows nothing of engines."""
