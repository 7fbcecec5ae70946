"""The engine in a thread of its own, and the streams that carry its events."""
