"""magentic: functions whose answers are a text, a model and a list."""

import os

import pydantic
from magentic import OpenaiChatModel, prompt

CHAT = OpenaiChatModel(
    os.environ["RIDGELINE_MODEL"],
    base_url=os.environ["RIDGELINE_URL"] + "/v1",
    api_key="x",
    max_tokens=120,
    temperature=0,
)


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=12)
    age: int


@prompt("Say hi.", model=CHAT)
def greeting() -> str:
    """Return a greeting."""


@prompt("Invent a person.", model=CHAT)
def person() -> Person:
    """Return a person."""


@prompt("Is the sky blue?", model=CHAT)
def is_blue() -> bool:
    """Return whether it is."""


def test_answers_have_their_types():
    assert greeting()
    assert isinstance(person(), Person)
    assert isinstance(is_blue(), bool)
