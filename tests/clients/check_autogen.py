"""autogen: a client's answers, JSON, and an agent with a tool."""

import asyncio
import json
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import LengthFinishReasonError

ABLE = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family="unknown",
    structured_output=True,
)
ASK = [UserMessage(content="Say hi, as JSON.", source="user")]


def new_client():
    return OpenAIChatCompletionClient(
        model=os.environ["RIDGELINE_MODEL"],
        base_url=os.environ["RIDGELINE_URL"] + "/v1",
        api_key="x",
        max_tokens=200,
        model_info=ABLE,
    )


async def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def test_answers_and_json():
    assert asyncio.run(new_client().create(ASK)).content
    try:
        said = asyncio.run(new_client().create(ASK, json_output=True))
    except LengthFinishReasonError:  # any object fits, so it may have no end
        return
    assert said.finish_reason == "length" or isinstance(json.loads(said.content), dict)


def test_an_agent_with_a_tool():
    agent = AssistantAgent("assistant", new_client(), tools=[weather])
    done = asyncio.run(agent.run(task="What is the weather in Paris?"))
    assert done.messages[-1].source == "assistant"
