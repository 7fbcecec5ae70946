"""Which model it is: by what its files hold, not by their names."""
