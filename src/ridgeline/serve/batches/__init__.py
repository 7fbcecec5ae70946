"""Batches over the routes: asked in this process, from files that the server or a user has."""
