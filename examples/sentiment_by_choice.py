"""Sentiment of many reviews at once: each answer is one of three words and nothing else.

Six labelled reviews come first, since a small model needs to be shown what is meant. Their words
are those that people use: a model of this size finds "okay" where it never finds "neutral".
"""

from ridgeline import LLM, SamplingParams

sentiment = {" bad": "negative", " great": "positive", " okay": "neutral"}
labelled = [
    ("I have never slept so badly.", " bad"),
    ("It was okay.", " okay"),
    ("I have never been so happy in a hotel.", " great"),
    ("An ordinary hotel.", " okay"),
    ("The rooms were dirty.", " bad"),
    ("We loved every minute.", " great"),
]
reviews = {
    "The soup was cold and the waiter rude.": "negative",
    "What a wonderful evening, we will be back!": "positive",
    "It was all right.": "neutral",
    "I have never eaten so well in my life.": "positive",
}
shown = "".join(f"Review: {review}\nSentiment:{word}\n\n" for review, word in labelled)
prompts = [f"{shown}Review: {review}\nSentiment:" for review in reviews]
params = SamplingParams(temperature=0, structured_outputs={"choice": list(sentiment)})

with LLM("smollm2") as llm:
    outputs = llm.generate(prompts, params)
found = {
    review: sentiment[out.outputs[0].text] for review, out in zip(reviews, outputs, strict=True)
}
for review, label in found.items():
    print(f"{label:9} {review}")
assert found == reviews, "the right label of each"
