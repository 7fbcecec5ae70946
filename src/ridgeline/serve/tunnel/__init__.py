"""What a router and the servers behind it say to each other."""
