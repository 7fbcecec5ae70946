"""Translation of several sentences at once: two translated ones show what is wanted."""

from ridgeline import LLM, SamplingParams

shown = (
    "English: The cat sleeps.\nSpanish: El gato duerme.\n\n"
    "English: Thank you very much.\nSpanish: Muchas gracias.\n\n"
)
# What must be in each translation.
sentences = {
    "Good morning, my name is Anna.": ("Buenos días", "nombre", "Anna"),
    "The book is on the table.": ("libro", "mesa"),
    "The weather is nice today.": ("hoy",),
}
params = SamplingParams(temperature=0, max_tokens=30, stop="\n")

with LLM("qwen2.5-coder:0.5b") as llm:
    prompts = [f"{shown}English: {sentence}\nSpanish:" for sentence in sentences]
    outputs = llm.generate(prompts, params)
for (sentence, words), out in zip(sentences.items(), outputs, strict=True):
    translation = out.outputs[0].text.strip()
    print(f"{sentence} -> {translation}")
    assert all(word in translation for word in words), words
