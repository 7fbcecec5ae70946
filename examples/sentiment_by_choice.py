"""Sentiment of many reviews at once: each answer is one of three words and nothing else."""

from ridgeline import LLM, SamplingParams

reviews = [
    "The soup was cold and the waiter rude.",
    "What a wonderful evening, we will be back!",
    "It was all right.",
    "I have never eaten so well in my life.",
]
choice = ["positive", "negative", "neutral"]
params = SamplingParams(temperature=0, structured_outputs={"choice": choice})
chats = [
    [{"role": "user", "content": f"Is this review positive, negative or neutral?\n{review}"}]
    for review in reviews
]

with LLM("smollm2") as llm:
    for review, out in zip(reviews, llm.chat(chats, params), strict=True):
        print(f"{out.outputs[0].text:9} {review}")
