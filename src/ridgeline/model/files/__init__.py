"""Model files in, checked facts and tensors out. Knows nothing of engines."""

# Parameters of sampling that a model's files may recommend.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
