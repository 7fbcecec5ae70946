"""Many prompts at once: they share every step, and come back in order. Shows a progress bar.

All begin with the same lines, so the KV cache of those is shared too.
"""

from ridgeline import LLM, SamplingParams

shown = "Q: What is the capital of Spain?\nA: Madrid\n"
countries = ["France", "Italy", "Japan", "Egypt", "Peru", "Norway", "Kenya", "India"]
prompts = [f"{shown}Q: What is the capital of {country}?\nA:" for country in countries]
params = SamplingParams(temperature=0, max_tokens=12, stop="\n")

with LLM("smollm2") as llm:
    for country, out in zip(countries, llm.generate(prompts, params), strict=True):
        print(f"{country:7} {out.outputs[0].text.strip()}")
