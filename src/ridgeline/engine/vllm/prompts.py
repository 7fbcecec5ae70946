"""vLLM's types of prompts, for code that uses them; any dictionary with these keys will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
