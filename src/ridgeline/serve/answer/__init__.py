"""What all dialects are made of: OpenAI's requests, the choices of an answer, and its reply."""
