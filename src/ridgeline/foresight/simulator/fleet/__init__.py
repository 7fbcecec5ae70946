"""Several replicas under one virtual time, and which of them gets a request."""
