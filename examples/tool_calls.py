"""Let a model call a function: it writes the arguments, Python runs it, the model sees the result.

Needs a running server (`make serve`) and the openai client:
python examples/tool_calls.py [http://127.0.0.1:8000/v1]
"""

import json
import sys
from typing import Any

from openai import OpenAI


def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


number = {"type": "integer", "minimum": 0, "maximum": 999}
schema = {
    "type": "object",
    "properties": {"a": number, "b": number},
    "required": ["a", "b"],
    "additionalProperties": False,
}
tool = {"name": "add", "description": "Adds two numbers.", "parameters": schema}
ask: dict[str, Any] = {"tools": [{"type": "function", "function": tool}], "temperature": 0}
messages: list[Any] = [{"role": "user", "content": "What is 12 plus 30?"}]

client = OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000/v1"])[0], api_key="none")
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model, messages=messages, tool_choice="required", parallel_tool_calls=False, **ask
)
message = answer.choices[0].message
[call] = message.tool_calls or []
arguments = json.loads(call.function.arguments)  # it fits the schema
result = add(**arguments)
print(f"{call.function.name}({arguments}) = {result}")

messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
answer = client.chat.completions.create(
    model=model, messages=messages, tool_choice="none", max_tokens=40, **ask
)
print(answer.choices[0].message.content)
