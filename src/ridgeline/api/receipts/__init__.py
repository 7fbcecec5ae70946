"""Receipts: what an answer is a function of, signed, and computed again by whoever doubts it."""
