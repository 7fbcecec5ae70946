"""A summary repeats words of its text, so many tokens can be guessed: the same answer, sooner."""

import time

from ridgeline import LLM, SamplingParams

article = (
    "The lighthouse on Gull Island was built in 1873 by the engineer Tom Harker. For a hundred "
    "years its keepers lit the lamp by hand every evening. In 1974 the lamp was replaced by an "
    "electric one, and the last keeper, Rose Harker, moved to the mainland. Today the lighthouse "
    "is a museum that shows how the keepers lived."
)
messages = [{"role": "user", "content": f"Repeat this text, then sum it up:\n{article}"}]
params = SamplingParams(temperature=0, max_tokens=160)
answers = []

for drafts in ("off", None):  # None is the default: drafts where they pay
    with LLM("smollm2", speculative_config=drafts) as llm:
        llm.generate("Warm up.", params)
        begin_s = time.perf_counter()
        [out] = llm.chat(messages, params)
        seconds = time.perf_counter() - begin_s
        answers.append(out.outputs[0].token_ids)
        print(f"{len(answers[-1])} tokens in {seconds:.2f} s, {out.num_accepted_tokens} guessed")

assert answers[0] == answers[1], "drafts change no answer"
print(out.outputs[0].text)
