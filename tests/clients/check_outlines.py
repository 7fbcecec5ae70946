"""outlines: texts and forms, by OpenAI's client, by vLLM's fields and by Ollama's client."""

import os
import re
from typing import Literal

import ollama
import openai
import outlines
import pydantic

MODEL, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"]
OPENAI = openai.OpenAI(base_url=URL + "/v1", api_key="x", max_retries=0)


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=12)
    age: int


def test_openai():
    model = outlines.from_openai(OPENAI, MODEL)
    assert model("Say hi.", max_tokens=8)
    Person.model_validate_json(model("A person.", Person, max_tokens=80))


def test_fields_of_vllm():
    model = outlines.from_vllm(OPENAI, MODEL)
    Person.model_validate_json(model("A person.", Person, max_tokens=80))
    assert model("The sky?", Literal["blue", "red"], max_tokens=10) in ("blue", "red")
    assert re.fullmatch("[0-9]{3}", model("A number.", outlines.regex("[0-9]{3}"), max_tokens=10))
    assert model("Yes?", outlines.cfg('start: "yes" | "no"'), max_tokens=10) in ("yes", "no")


def test_ollama():
    model = outlines.from_ollama(ollama.Client(host=URL), MODEL)
    Person.model_validate_json(model("A person.", Person, options={"num_predict": 80}))
