"""guidance: a generated text, and a choice by a grammar that is sent as vLLM's field."""

import os

import guidance
from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel

OWN = {"base_url": os.environ["RIDGELINE_URL"] + "/v1", "api_key": "x", "echo": False}
MODEL = os.environ["RIDGELINE_MODEL"]


def test_a_text():
    model = guidance.models.OpenAI(MODEL, **OWN)
    with user():
        model += "Say hi."
    with assistant():
        model += gen("said", max_tokens=8)
    assert model["said"]


def test_a_choice():
    model = VLLMModel(MODEL, **OWN)
    with user():
        model += "Which colour has the sky?"
    with assistant():
        model += select(["blue", "red"], name="colour")
    assert model["colour"] in ("blue", "red")
