"""Quantising: a model's weights written again in fewer bits, an adapter merged on the way."""
