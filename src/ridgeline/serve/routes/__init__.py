"""Routes of a server that are no dialect's: an operator's, plans, and where time went."""
