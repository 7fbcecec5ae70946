"""Search by meaning: the sentence nearest to each question, by the cosine of their vectors."""

from ridgeline import LLM

sentences = [
    "The match was decided by a goal in the last minute.",
    "Knead the dough for ten minutes and let it rise.",
    "Interest rates rose for the third time this year.",
    "The telescope found water on a distant planet.",
]
questions = ["How do I bake bread?", "What do astronomers do?", "Who won the football game?"]

with LLM("all-minilm") as llm:
    for question in questions:
        scores = [out.outputs.score for out in llm.score(question, sentences)]
        best = max(range(len(sentences)), key=scores.__getitem__)
        print(f"{scores[best]:.2f}  {question}  {sentences[best]}")
