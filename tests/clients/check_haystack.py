"""haystack: chats, streams, tools and vectors."""

import os

from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

OWN = {
    "model": os.environ["RIDGELINE_MODEL"],
    "api_base_url": os.environ["RIDGELINE_URL"] + "/v1",
    "api_key": Secret.from_token("x"),
}
CHAT = OpenAIChatGenerator(**OWN, generation_kwargs={"max_tokens": 60})
HI = [ChatMessage.from_user("What is the weather in Paris?")]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_chats_and_streams():
    assert CHAT.run(HI)["replies"][0].text
    parts = []
    said = CHAT.run(HI, streaming_callback=parts.append)["replies"][0].text
    assert "".join(part.content for part in parts) == said


def test_tools():
    weather = Tool("weather", "Weather of a city.", CITY, function=lambda city: f"sunny in {city}")
    asked = {"tool_choice": "required", "max_tokens": 80}
    calls = CHAT.run(HI, tools=[weather], generation_kwargs=asked)["replies"][0].tool_calls
    assert {call.tool_name for call in calls} == {"weather"}
    assert set(calls[0].arguments) == {"city"}


def test_vectors():
    found = OpenAITextEmbedder(**OWN).run("hi")["embedding"]
    assert len(found) == len(OpenAITextEmbedder(**OWN).run("A longer text.")["embedding"])
    assert any(found)
