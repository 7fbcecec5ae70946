"""Receipts of small models, which later versions must compute to the bit."""
