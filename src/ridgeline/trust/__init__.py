"""What can be asked of a server that others must rely on: each is a stage that serve is given."""
