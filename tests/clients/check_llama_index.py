"""llama-index's OpenAILike, as a chat model and as a completion model."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

OWN = {
    "model": os.environ["RIDGELINE_MODEL"],
    "api_base": os.environ["RIDGELINE_URL"] + "/v1",
    "api_key": "x",
    "max_tokens": 12,
    "context_window": 2048,
    "max_retries": 0,
}
CHAT, PLAIN = OpenAILike(is_chat_model=True, **OWN), OpenAILike(is_chat_model=False, **OWN)
ASK = [ChatMessage(role="user", content="Name three colours.")]


def test_chat():
    first = CHAT.chat(ASK).message
    assert CHAT.chat([*ASK, first, *ASK]).message.content
    assert list(CHAT.stream_chat(ASK))[-1].message.content


def test_completions():
    assert PLAIN.complete("2+2=").text
    assert list(PLAIN.stream_complete("2+2="))[-1].text
