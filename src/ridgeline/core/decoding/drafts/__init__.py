"""Guesses of the next tokens, and how many of them pay."""
