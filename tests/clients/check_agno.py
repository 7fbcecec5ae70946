"""agno: agents over the chat, responses, Ollama's and Anthropic's APIs."""

import os

import anthropic
import pydantic
import pytest
from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.lmstudio import LMStudio
from agno.models.ollama import Ollama
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.models.vllm import VLLM
from agno.run.base import RunStatus

NAME, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"]
OWN = {"id": NAME, "base_url": URL + "/v1", "api_key": "x"}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=12)
    age: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


MODELS = {
    "openai": lambda: OpenAILike(**OWN, max_tokens=20),
    "vllm": lambda: VLLM(**OWN, max_tokens=20),
    "lmstudio": lambda: LMStudio(**OWN, max_tokens=20),
    "responses": lambda: OpenAIResponses(**OWN, max_output_tokens=20),
    "ollama": lambda: Ollama(id=NAME, host=URL, options={"num_predict": 20}),
    "anthropic": lambda: Claude(
        id=NAME, client=anthropic.Anthropic(base_url=URL, api_key="x"), max_tokens=20
    ),
}


def run(agent, question):
    answer = agent.run(question)
    assert answer.status == RunStatus.completed, answer.content  # else it is an error's text
    return answer.content


@pytest.mark.parametrize("api", MODELS)
def test_an_agent(api):
    assert run(Agent(model=MODELS[api]()), "Say hi.")


def test_tools_and_forms():
    chat = OpenAILike(**OWN, max_tokens=80)
    agent = Agent(model=chat, tools=[weather], tool_call_limit=1)
    assert run(agent, "What is the weather in Paris?") is not None
    assert isinstance(run(Agent(model=chat, output_schema=Person), "A person."), Person)
