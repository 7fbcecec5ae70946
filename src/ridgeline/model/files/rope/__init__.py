"""Angles of rotary positions, the same bits for every backend."""
