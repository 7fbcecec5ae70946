"""Where servers of other machines come from, if a router has them started."""
