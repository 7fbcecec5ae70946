"""The APIs that clients know: each has its own names, and all share one way to an answer."""
