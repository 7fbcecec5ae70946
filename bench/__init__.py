"""Benchmarks for developers: python -m bench.NAME."""
