"""Where a step goes, by kind of work."""
