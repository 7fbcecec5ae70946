"""The files of a model directory: where they are, and what they say of text."""
