"""Characters to token ids and back."""
