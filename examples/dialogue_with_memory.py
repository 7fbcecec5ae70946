"""A dialogue that remembers: of all that was said, what fits a question best goes with it.

The history itself is not sent again, so a prompt stays short however long the dialogue becomes.
"""

from ridgeline import LLM, SamplingParams

said = [
    "I live in Oslo, near the harbour.",
    "My dog is called Bruno.",
    "I work as a nurse in a hospital.",
    "On Sundays I play the violin.",
]
# What must be in the answer to each question.
questions = {
    "In which city do I live?": "Oslo",
    "What is the name of my dog?": "Bruno",
    "Which instrument do I play?": "violin",
}
params = SamplingParams(temperature=0, max_tokens=24)

with LLM("all-minilm") as encoder, LLM("qwen2.5-coder:0.5b") as llm:
    for question, fact in questions.items():
        likeness = [out.outputs.score for out in encoder.score(question, said)]
        note = said[likeness.index(max(likeness))]
        chat = [
            {"role": "system", "content": f"The user once said: {note}"},
            {"role": "user", "content": question},
        ]
        [out] = llm.chat(chat, params)
        print(f"> {question}\n  remembered: {note}\n  {out.outputs[0].text}")
        assert fact in note, "the right sentence is remembered"
        assert fact in out.outputs[0].text, "and used"
