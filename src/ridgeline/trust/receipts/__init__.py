"""Receipts: what an answer is a function of, signed, and computed again by its reader."""
