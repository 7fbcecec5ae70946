"""From logits to tokens, for every backend: the rule in numpy, which kernels must equal."""
