"""dspy: chats and predictions."""

import os

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

CHAT = dspy.LM(
    "openai/" + os.environ["RIDGELINE_MODEL"],
    api_base=os.environ["RIDGELINE_URL"] + "/v1",
    api_key="x",
    max_tokens=100,
    cache=False,
)


def test_chats():
    assert CHAT("Say hi.")[0]
    assert CHAT(messages=[{"role": "user", "content": "Say hi."}])[0]


@pytest.mark.parametrize("adapter", ["ChatAdapter", "JSONAdapter"])
def test_predictions(adapter):
    """The form stands in the prompt alone, so a model of this size may miss it."""
    predict = dspy.Predict("question -> answer")
    with dspy.context(lm=CHAT, adapter=getattr(dspy, adapter)()):
        try:
            assert predict(question="What is the capital of France?").answer
        except AdapterParseError as error:
            assert "LM Response" in str(error)
