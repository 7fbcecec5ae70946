"""One prompt, one answer."""

from ridgeline import LLM, SamplingParams

with LLM("smollm2") as llm:
    [out] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    print(out.prompt + out.outputs[0].text)
    assert "Paris" in out.outputs[0].text
