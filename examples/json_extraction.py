"""JSON from text into a dataclass: the answer always fits the schema, whatever the model thinks."""

import json
from dataclasses import dataclass

from ridgeline import LLM, SamplingParams

letter = (
    "Dear all, Maria Lopez, who is 34, moved here from Berlin and starts as our cook on Monday."
)
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@dataclass
class Person:
    """Whom a letter is about."""

    name: str
    age: int
    city: str


question = f"{letter}\n\nWho is this about? Answer as JSON with name, age and city."
params = SamplingParams(temperature=0, max_tokens=80, structured_outputs={"json": schema})

with LLM("smollm2") as llm:
    [out] = llm.chat([{"role": "user", "content": question}], params)
    person = Person(**json.loads(out.outputs[0].text))
    print(person)
    assert person == Person("Maria Lopez", 34, "Berlin")
