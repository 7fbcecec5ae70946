"""The servers of a model: processes, and which of them gets a request."""
