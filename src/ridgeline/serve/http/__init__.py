"""What every request passes, whatever it asks: sockets, keys, limits, bodies, errors, the log."""
