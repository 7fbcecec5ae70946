"""A knowledge graph from text: the things and relations are known, the model says which belong."""

from ridgeline import LLM, SamplingParams

text = "Ada Lovelace worked with Charles Babbage, who designed the Analytical Engine in London."
things = ["Ada Lovelace", "Charles Babbage", "the Analytical Engine", "London"]
asked = [
    ("Ada Lovelace", "worked with"),
    ("the Analytical Engine", "was designed by"),
    ("the Analytical Engine", "was designed in"),
]
prompts = [f"{text}\n\nIn short: {subject} {relation}" for subject, relation in asked]
choices = [[f" {thing}" for thing in things if thing != subject] for subject, _ in asked]
params = [SamplingParams(temperature=0, structured_outputs={"choice": some}) for some in choices]

with LLM("smollm2") as llm:
    for (subject, relation), out in zip(asked, llm.generate(prompts, params), strict=True):
        print(f"{subject} --{relation}-->{out.outputs[0].text}")
