"""Draws of tokens, by the rule of `backends.sampler.rule`."""
