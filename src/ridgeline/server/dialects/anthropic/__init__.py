"""Anthropic's Messages API, as a thin edge over chats."""
