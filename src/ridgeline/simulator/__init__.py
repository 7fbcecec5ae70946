"""Runs of the core without a model. Whatever it decides here, it decides in the server too."""
