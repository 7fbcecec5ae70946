"""OpenAI's completions, chats and embeddings."""
