"""OpenAI's Responses API, as a thin edge over chats."""
