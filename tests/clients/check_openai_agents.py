"""openai-agents: an agent over chat completions and over responses, with a tool."""

import os

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=os.environ["RIDGELINE_URL"] + "/v1", api_key="x", max_retries=0)


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return "sunny"


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("tools", [[], [weather]], ids=["plain", "tool"])
def test_an_agent(kind, tools):
    model = kind(model=os.environ["RIDGELINE_MODEL"], openai_client=CLIENT)
    settings = ModelSettings(max_tokens=400, temperature=0)
    agent = Agent(
        name="a", instructions="Be short.", model=model, model_settings=settings, tools=tools
    )
    assert Runner.run_sync(agent, "Hi").final_output
