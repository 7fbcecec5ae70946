"""What runs in the place of a well-known architecture that does not, for the message that says so.

One table for the names of Hugging Face's classes and of GGUF's ``general.architecture``.
"""

from __future__ import annotations

_BOTH_HALVES = "it has an encoder and a decoder; decoders such as Gemma 3 and Qwen3 run"
_SOUND = "it hears or speaks; no model of sound runs"
_MAMBA_1 = "Mamba-1's state has no heads; Mamba-2, Falcon-H1 and LFM2 run"
_RWKV = "its state is none of those that run; Mamba-2 and Qwen3-Next run"
_ALTUP = "it keeps several streams of activations (AltUp); Gemma 3 and Gemma 4 run"
_XIELU = "its activation has learnt numbers in each layer (xIELU); Llama, OLMo 2 and Qwen3 run"
_TURNED = "its experts are stored with inputs first; its GGUF files, and Qwen3-VL without them, run"

NEAREST = {
    **dict.fromkeys(
        (
            "T5ForConditionalGeneration", "MT5ForConditionalGeneration", "t5", "t5encoder",
            "BartForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel",
            "T5GemmaForConditionalGeneration", "M2M100ForConditionalGeneration",
        ),
        _BOTH_HALVES,
    ),
    **dict.fromkeys(("WhisperForConditionalGeneration", "whisper"), _SOUND),
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM", "mamba"), _MAMBA_1),
    **dict.fromkeys(
        ("RwkvForCausalLM", "Rwkv6ForCausalLM", "RWKV7ForCausalLM", "rwkv6", "rwkv7"), _RWKV
    ),
    **dict.fromkeys(("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM", "gemma3n"), _ALTUP),
    **dict.fromkeys(("ApertusForCausalLM", "apertus"), _XIELU),
    **dict.fromkeys(("Qwen3VLMoeForConditionalGeneration",), _TURNED),
}  # fmt: skip
