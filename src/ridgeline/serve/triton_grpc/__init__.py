"""Triton's gRPC service: it translates to the routes under /v2, and decides nothing."""
