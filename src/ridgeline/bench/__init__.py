"""Measurements that users run."""
