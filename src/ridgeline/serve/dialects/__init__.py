"""The APIs that clients know: each has its own names, and all share one path to an answer."""
