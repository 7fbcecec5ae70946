"""Content from facts: a headline and a text that must name each fact; if one is missing, again."""

import json

from ridgeline import LLM, SamplingParams

facts = {"event": "summer fair", "place": "park", "day": "June 12", "offer": "free cake"}
schema = {
    "type": "object",
    "properties": {
        "headline": {"type": "string", "minLength": 10, "maxLength": 60},
        "text": {"type": "string", "minLength": 40, "maxLength": 240},
    },
    "required": ["headline", "text"],
    "additionalProperties": False,
}
told = "; ".join(f"{name}: {fact}" for name, fact in facts.items())
question = f"Write an invitation as JSON: a headline, and a text of two sentences. Say all: {told}."

with LLM("qwen2.5-coder:0.5b") as llm:
    for seed in range(4):
        params = SamplingParams(
            temperature=0.7 if seed else 0,
            seed=seed,
            max_tokens=120,
            structured_outputs={"json": schema},
        )
        [out] = llm.chat([{"role": "user", "content": question}], params)
        content = json.loads(out.outputs[0].text)
        both = f"{content['headline']} {content['text']}".lower()
        missing = [fact for fact in facts.values() if fact.lower() not in both]
        print(f"{content['headline']}\n{content['text']}")
        if not missing:
            break
        print(f"missing: {', '.join(missing)}; again")
assert not missing, "all facts are named"
