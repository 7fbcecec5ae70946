"""What a request passes before its route: a bounded connection, then a row of ASGI callables."""
