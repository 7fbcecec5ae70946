"""Blocks of the KV cache in files, so that they outlast a restart."""
