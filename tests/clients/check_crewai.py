"""crewai: a call, and a crew of one agent."""

import os

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from crewai import LLM, Agent, Crew, Task  # it reads the variables

CHAT = LLM(
    model="openai/" + os.environ["RIDGELINE_MODEL"],
    base_url=os.environ["RIDGELINE_URL"] + "/v1",
    api_key="x",
    max_tokens=40,
)


def test_a_call():
    assert CHAT.call("Say hi.")


def test_a_crew():
    agent = Agent(role="greeter", goal="greet", backstory="You greet.", llm=CHAT, max_iter=1)
    task = Task(description="Say hi.", expected_output="A greeting.", agent=agent)
    assert str(Crew(agents=[agent], tasks=[task]).kickoff())
