"""Anthropic's Messages API, translated to and from OpenAI's chats."""
