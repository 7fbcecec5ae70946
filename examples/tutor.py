"""A tutor: the model solves each task itself, Python compares, and a wrong answer gets a hint.

A small model would invent hints that are wrong. So Python makes some that are true, and the model
picks the one that fits what it has been shown.
"""

from ridgeline import LLM, SamplingParams

# What a pupil answered, and whether that is right.
answers = {(7, 8): (54, False), (6, 7): (42, True), (9, 3): (27, True), (9, 6): (56, False)}
number = SamplingParams(temperature=0, structured_outputs={"regex": "[0-9]{1,3}"})
shown = (
    "Task: 6 x 8\nHint: First take 5 x 8, then add 8.\n\n"
    "Task: 9 x 4\nHint: First take 10 x 4, then take 4 away.\n\n"
)

with LLM("qwen2.5-coder:0.5b") as llm:
    chats = [
        [{"role": "user", "content": f"What is {a} x {b}? Answer with the number alone."}]
        for a, b in answers
    ]
    solved = [int(out.outputs[0].text) for out in llm.chat(chats, number)]
    for (task, (answer, is_right)), result in zip(answers.items(), solved, strict=True):
        a, b = task
        assert (answer == result) == is_right, f"{a} x {b}: the tutor thinks {result}"
        if answer == result:
            print(f"{a} x {b} = {answer}: right")
            continue
        hints = [
            f" First take {a - 1} x {b}, then add {b}.",
            f" First take {a} x {b - 1}, then add {a}.",
            f" First take 10 x {b}, then take {(10 - a) * b} away.",
        ]
        params = SamplingParams(temperature=0, structured_outputs={"choice": hints})
        [out] = llm.generate(f"{shown}Task: {a} x {b}\nHint:", params)
        print(f"{a} x {b} = {answer}: not yet.{out.outputs[0].text}")
        assert out.outputs[0].text in hints
        assert f"{result}" not in out.outputs[0].text, "a hint is not the answer"
