"""Characters to token ids and back: tokenizers and chat templates. Knows nothing of engines."""
