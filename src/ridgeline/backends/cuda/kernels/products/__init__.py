"""Products of tokens with matrices: plain, packed in 8 or 4 bits, and of experts."""
