"""The ollama package: chat, generate, streams, forms, tools, lists, errors."""

import json
import os

import ollama
import pytest

MODEL = os.environ["RIDGELINE_MODEL"]
CLIENT = ollama.Client(host=os.environ["RIDGELINE_URL"])
ASK = [{"role": "user", "content": "Say hi."}]
SHORT = {"num_predict": 12, "temperature": 0}


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def test_chat_and_its_stream():
    whole = CLIENT.chat(model=MODEL, messages=ASK, options=SHORT)
    parts = list(CLIENT.chat(model=MODEL, messages=ASK, options=SHORT, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done_reason == whole.done_reason
    turns = [*ASK, whole.message, *ASK]
    assert CLIENT.chat(model=f"{MODEL}:latest", messages=turns, options=SHORT).message.content


def test_generate():
    assert CLIENT.generate(model=MODEL, prompt="Say hi.", options=SHORT).response
    assert CLIENT.generate(model=MODEL, prompt="2+2=", raw=True, options=SHORT).response
    assert CLIENT.generate(model=MODEL).done_reason == "load"


def test_forms_and_tools():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    said = CLIENT.chat(model=MODEL, messages=ASK, format=schema, options={"num_predict": 60})
    assert isinstance(json.loads(said.message.content)["n"], int)
    assert CLIENT.chat(model=MODEL, messages=ASK, tools=[weather], options=SHORT).message


def test_models():
    assert [one.model for one in CLIENT.list().models] == [f"{MODEL}:latest"]
    assert CLIENT.ps().models[0].context_length
    shown = CLIENT.show(MODEL)
    assert shown.details.family == "llama"
    assert "completion" in shown.capabilities


def test_what_sets_up_and_manages():
    """What a set-up asks (Home Assistant's), and an admin's page (Open WebUI's)."""
    assert CLIENT.pull(MODEL).status == "success"
    assert [one.status for one in CLIENT.pull(f"{MODEL}:latest", stream=True)] == ["success"]
    own = {"system": "Answer in capitals.", "parameters": {"num_predict": 4, "temperature": 0}}
    assert CLIENT.create("mine", from_=MODEL, **own).status == "success"
    assert CLIENT.copy("mine", "two").status == "success"
    assert {one.model for one in CLIENT.list().models} >= {"mine:latest", "two:latest"}
    assert CLIENT.chat(model="two", messages=ASK).eval_count == 4
    for name in ("mine", "two"):
        assert CLIENT.delete(name).status == "success"
    with pytest.raises(ollama.ResponseError, match="nothing is pushed from here"):
        CLIENT.push(MODEL)


def test_errors():
    with pytest.raises(ollama.ResponseError, match="there is no model"):
        CLIENT.chat(model="nope", messages=ASK)
    with pytest.raises(ollama.ResponseError, match="dimensions is 9999"):
        CLIENT.embed(model=MODEL, input="x", dimensions=9999)


def test_vectors():
    found = CLIENT.embed(model=MODEL, input=["x", "y"])
    assert [round(sum(v * v for v in one), 4) for one in found.embeddings] == [1, 1]
    assert len(CLIENT.embeddings(model=MODEL, prompt="x").embedding) == len(found.embeddings[0])
