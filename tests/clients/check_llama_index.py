"""llama-index's OpenAILike, as a chat model, a completion model, and for vectors."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
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


def test_embeddings():
    make = OpenAILikeEmbedding(
        model_name=OWN["model"], api_base=OWN["api_base"], api_key="x", embed_batch_size=2
    )
    texts = ["A dog barks.", "A dog barks loudly.", "Bread is baked at night."]
    one, *others = make.get_text_embedding_batch(texts)
    assert make.get_query_embedding(texts[0]) == one
    near, far = (sum(a * b for a, b in zip(one, other, strict=True)) for other in others)
    assert near > far
