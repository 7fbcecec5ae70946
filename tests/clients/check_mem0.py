"""mem0: memories are added and found; its providers of models."""

import os

os.environ |= {"MEM0_TELEMETRY": "False", "OPENAI_API_KEY": "x"}

import openai
import pytest
from mem0 import Memory  # it reads the variables

MODEL, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"] + "/v1"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def new_memory(tmp_path):
    """Return what makes a memory by a provider and the name of its address."""
    own = {"model": MODEL, "openai_base_url": URL, "api_key": "x"}
    width = len(
        openai.OpenAI(base_url=URL).embeddings.create(model=MODEL, input="x").data[0].embedding
    )

    def new(provider, address):
        chat = {"model": MODEL, address: URL, "max_tokens": 40}
        store = {"path": str(tmp_path / provider), "embedding_model_dims": width}
        return Memory.from_config(
            {
                "llm": {"provider": provider, "config": chat},
                "embedder": {"provider": "openai", "config": own | {"embedding_dims": width}},
                "vector_store": {"provider": "qdrant", "config": store},
            }
        )

    return new


def test_memories_are_found(new_memory):
    memory = new_memory("openai", "openai_base_url")
    memory.add("I like tea.", user_id="u", infer=False)
    memory.add("The train leaves at nine.", user_id="u", infer=False)
    found = memory.search("I like tea.", filters={"user_id": "u"})["results"]
    assert found[0]["memory"] == "I like tea."


@pytest.mark.parametrize("provider", ["openai", "vllm", "lmstudio"])
def test_providers(new_memory, provider):
    assert new_memory(provider, f"{provider}_base_url").llm.generate_response(HI)
