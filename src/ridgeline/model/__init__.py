"""A model: its shape, what it costs, its files, and where they are."""
