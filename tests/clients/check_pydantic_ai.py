"""pydantic-ai: agents that talk, that answer with a type, and that have a tool."""

import os

import pydantic
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = OpenAIChatModel(
    os.environ["RIDGELINE_MODEL"],
    provider=OpenAIProvider(base_url=os.environ["RIDGELINE_URL"] + "/v1", api_key="x"),
)


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(max_length=20)


def test_a_conversation():
    agent = Agent(MODEL, instructions="Be short.", model_settings={"max_tokens": 16})
    first = agent.run_sync("Hi")
    assert agent.run_sync("And?", message_history=first.all_messages()).output


def test_typed_answers():
    for kind in (City, NativeOutput(City)):
        agent = Agent(MODEL, output_type=kind, model_settings={"max_tokens": 100, "temperature": 0})
        assert isinstance(agent.run_sync("Name a city.").output, City)


def test_a_prompted_type():
    """Any object fits what it sends: the small model may choose another key."""
    agent = Agent(
        MODEL, output_type=PromptedOutput(City), model_settings={"max_tokens": 100}, retries=0
    )
    try:
        assert isinstance(agent.run_sync("Name a city.").output, City)
    except UnexpectedModelBehavior as error:
        assert "output" in str(error).lower()


def test_a_tool():
    agent = Agent(MODEL, model_settings={"max_tokens": 60, "temperature": 0})

    @agent.tool_plain
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return "sunny"

    assert agent.run_sync("Weather of Rome?").output is not None
