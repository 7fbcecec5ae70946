"""A chat whose answers stream as they are made. The second turn finds the first in the cache."""

from ridgeline import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=60)
messages = []

with LLM("smollm2") as llm:
    for question in ("Name a fruit that is yellow.", "And one that is red?"):
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in llm.stream(messages, params):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
        print()
        messages.append({"role": "assistant", "content": answer})
