"""What Home Assistant 2026.2 calls for a conversation and a task, by the client packages it pins.

Its parts ``ollama`` and ``openai_conversation`` set a model up, talk with tools until none is
called, and fill in a form. Home Assistant itself is not run.
"""

import asyncio
import json
import os

import ollama
import openai
import pytest

MODEL, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"]
MOST_TURNS = 10
PROMPT = "You are a voice assistant for Home Assistant. When controlling it always call the tools."
QUESTION = "Turn on the kitchen light."
DONE = json.dumps({"speech": {}, "response_type": "action_done"})
PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "domain": {"type": "array", "items": {"type": "string"}},
    },
    "required": [],
}  # fmt: skip
TURN_ON = {"name": "HassTurnOn", "description": "Turns on a device", "parameters": PARAMETERS}
NOW = {
    "name": "GetLiveContext",
    "description": "The state of devices",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
FORM = {
    "type": "object",
    "properties": {"colour": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["colour"],
}


async def of_ollama():
    client = ollama.AsyncClient(host=URL)
    async with asyncio.timeout(5.0):
        assert (await client.list())["models"]
    assert [one.status async for one in await client.pull(MODEL, stream=True)] == ["success"]

    async def said(messages, tools=None, form=None):
        parts = await client.chat(
            model=MODEL, messages=messages, tools=tools, stream=True, keep_alive="-1s",
            options={"num_ctx": 8192}, think=False, format=form,
        )  # fmt: skip
        return [part["message"] async for part in parts]

    messages = [
        ollama.Message(role="system", content=PROMPT),
        ollama.Message(role="user", content=QUESTION),
    ]
    tools = [{"type": "function", "function": one} for one in (TURN_ON, NOW)]
    for _ in range(MOST_TURNS):
        parts = await said(list(messages), tools)
        calls = [call for part in parts for call in part.get("tool_calls") or ()]
        text = "".join(part.get("content") or "" for part in parts)
        assert text or calls
        messages.append(
            ollama.Message(role="assistant", content=text, thinking=None, tool_calls=calls or None)
        )
        messages += [ollama.Message(role="tool", content=DONE) for _ in calls]
        if not calls:
            break
    parts = await said([messages[0], ollama.Message(role="user", content="A colour?")], form=FORM)
    assert json.loads("".join(part.get("content") or "" for part in parts))["colour"] is not None


async def of_openai():
    client = openai.AsyncOpenAI(api_key="none", base_url=f"{URL}/v1")
    found = [one.id async for one in client.with_options(timeout=10.0).models.list()]
    assert found == [MODEL]

    async def said(items, **more):
        stream = await client.responses.create(
            model=MODEL, input=items, max_output_tokens=300, user="01HZ", store=False, stream=True,
            top_p=1.0, temperature=1.0, **more,
        )  # fmt: skip
        return [event async for event in stream]

    def message(role, text):
        return {"type": "message", "role": role, "content": text}

    items = [message("developer", PROMPT), message("user", QUESTION)]
    tools = [{"type": "function", "strict": False, **one} for one in (TURN_ON, NOW)]
    for _ in range(MOST_TURNS):
        events = await said(items, tools=tools)
        assert events[-1].type in ("response.completed", "response.incomplete")
        done = [one.item for one in events if one.type == "response.output_item.done"]
        calls = [item for item in done if item.type == "function_call"]
        items += [message("assistant", events[-1].response.output_text)] if not calls else []
        if not calls or events[-1].type == "response.incomplete":
            break
        for call in calls:
            given = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", **given})
            output = {"call_id": call.call_id, "output": DONE}
            items.append({"type": "function_call_output", **output})
    strict = FORM | {"strict": True, "additionalProperties": False, "required": ["colour", "sure"]}
    form = {"type": "json_schema", "name": "colour", "schema": strict}
    ask = [message("developer", PROMPT), message("user", "A colour?")]
    last = (await said(ask, text={"format": form}, reasoning={"effort": "low"}))[-1]
    assert last.type == "response.completed"
    assert json.loads(last.response.output_text)["colour"] is not None


@pytest.mark.parametrize("part", [of_ollama, of_openai])
def test_a_conversation_and_a_task(part):
    asyncio.run(part())
