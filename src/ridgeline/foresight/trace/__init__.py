"""Traces of a run: written as it goes, read and checked afterwards."""
