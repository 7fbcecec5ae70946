"""Search by meaning: the sentence nearest to each question, by the cosine of their vectors."""

from ridgeline import LLM

sentences = [
    "The match was decided by a goal in the last minute.",
    "Knead the dough for ten minutes and let it rise.",
    "Interest rates rose for the third time this year.",
    "The telescope found water on a distant planet.",
]
# Each with the number of the sentence that answers it.
questions = {
    "How do I bake bread?": 1,
    "What do astronomers do?": 3,
    "Who won the football game?": 0,
}

with LLM("all-minilm") as llm:
    for question, number in questions.items():
        scores = [out.outputs.score for out in llm.score(question, sentences)]
        best = max(range(len(sentences)), key=scores.__getitem__)
        print(f"{scores[best]:.2f}  {question}  {sentences[best]}")
        assert best == number
