"""The load generator's result without a server."""
