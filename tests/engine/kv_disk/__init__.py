"""Tests of the cache in files."""
