"""What a model takes on each device, and what fits beside it."""
