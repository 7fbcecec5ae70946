"""smolagents: chats, tools, forms, streams, and a step of an agent."""

import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

MODEL = OpenAIServerModel(
    model_id=os.environ["RIDGELINE_MODEL"],
    api_base=os.environ["RIDGELINE_URL"] + "/v1",
    api_key="x",
    max_tokens=80,
)
HI = [{"role": "user", "content": [{"type": "text", "text": "Say hi."}]}]
FORM = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 20} for name in ("thought", "code")},
    "required": ["thought", "code"],
    "additionalProperties": False,
}


@tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: the city
    """
    return f"sunny in {city}"


def test_chats_and_streams():
    assert MODEL(HI).content
    assert "".join(part.content or "" for part in MODEL.generate_stream(HI))


def test_tools():
    calls = MODEL(HI, tools_to_call_from=[weather]).tool_calls
    assert calls[0].function.name == "weather"


def test_forms():
    schema = {"name": "Answer", "strict": True, "schema": FORM}
    said = MODEL(HI, response_format={"type": "json_schema", "json_schema": schema}).content
    assert set(json.loads(said)) == {"thought", "code"}


def test_an_agent():
    agent = ToolCallingAgent(tools=[weather], model=MODEL, max_steps=1, verbosity_level=0)
    assert agent.run("What is the weather in Paris?") is not None
