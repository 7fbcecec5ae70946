"""semantic-kernel: chats, streams and functions."""

import asyncio
import os

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

ASKED = []


class Weather:
    """A plugin."""

    @kernel_function(description="Weather of a city.")
    def weather(self, city: str) -> str:
        """Return the weather of a city."""
        ASKED.append(city)
        return f"sunny in {city}"


def new_chat():
    client = AsyncOpenAI(base_url=os.environ["RIDGELINE_URL"] + "/v1", api_key="x", max_retries=0)
    return OpenAIChatCompletion(ai_model_id=os.environ["RIDGELINE_MODEL"], async_client=client)


def history(question):
    found = ChatHistory()
    found.add_user_message(question)
    return found


def test_chats_and_streams():
    settings = OpenAIChatPromptExecutionSettings(max_tokens=10)

    async def run():
        whole = await new_chat().get_chat_message_content(history("Say hi."), settings)
        stream = new_chat().get_streaming_chat_message_content(history("Say hi."), settings)
        return whole, [part async for part in stream]

    whole, parts = asyncio.run(run())
    assert str(whole)
    assert "".join(str(part) for part in parts)


def test_functions():
    kernel = Kernel()
    kernel.add_plugin(Weather(), "w")
    choice = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    settings = OpenAIChatPromptExecutionSettings(max_tokens=80, function_choice_behavior=choice)
    asking = new_chat().get_chat_message_content(
        history("What is the weather in Paris?"), settings, kernel=kernel
    )
    assert asyncio.run(asking) is not None
    assert ASKED
