"""A knowledge graph from text: the things and relations are known, the model says which belong."""

from ridgeline import LLM, SamplingParams

text = "Ada Lovelace worked with Charles Babbage, who designed the Analytical Engine in London."
things = ["Ada Lovelace", "Charles Babbage", "the Analytical Engine", "London"]
# Each with what belongs to it.
asked = {
    ("Ada Lovelace", "worked with"): "Charles Babbage",
    ("the Analytical Engine", "was designed by"): "Charles Babbage",
    ("the Analytical Engine", "was designed in"): "London",
}
prompts = [f"{text}\n\nIn short: {subject} {relation}" for subject, relation in asked]
choices = [[f" {thing}" for thing in things if thing != subject] for subject, _ in asked]
params = [SamplingParams(temperature=0, structured_outputs={"choice": some}) for some in choices]

with LLM("smollm2") as llm:
    outputs = llm.generate(prompts, params)
for ((subject, relation), thing), out in zip(asked.items(), outputs, strict=True):
    print(f"{subject} --{relation}-->{out.outputs[0].text}")
    assert out.outputs[0].text.strip() == thing
