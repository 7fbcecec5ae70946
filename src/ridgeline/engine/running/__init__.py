"""Requests of the Python API on their way through the engine, in the threads that wait for them."""
