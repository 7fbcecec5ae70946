"""Batches: many requests in a file, answered into a file, whatever happens meanwhile."""
