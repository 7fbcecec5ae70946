"""The pure core: what to compute next, and what the result means for each request.

Standard library only: no clock, no I/O, no randomness. The server, the tests and a simulator run
exactly this code, with another runner and another clock.
"""
