"""Measuring a model here, and which model of time holds for it."""
