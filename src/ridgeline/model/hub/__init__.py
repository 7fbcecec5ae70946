"""Short names and hub ids to files on this disk."""
