"""Blocks of the KV cache, and states of recurrent layers."""
