"""What runs in the place of a well-known architecture that does not, for the message that says so.

One table for the names of Hugging Face's classes and of GGUF's ``general.architecture``. For any
other the name that is spelt most alike is all that is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ROWS = {
    "T5ForConditionalGeneration MT5ForConditionalGeneration T5GemmaForConditionalGeneration "
    "BartForConditionalGeneration MBartForConditionalGeneration MarianMTModel "
    "M2M100ForConditionalGeneration t5 t5encoder": (
        "it has an encoder and a decoder; decoders such as Gemma 3 and Qwen3 run"
    ),
    "WhisperForConditionalGeneration whisper": "it hears or speaks; no model of sound runs",
    "MambaForCausalLM FalconMambaForCausalLM mamba": (
        "Mamba-1's state has no heads; Mamba-2, Falcon-H1 and LFM2 run"
    ),
    "JambaForCausalLM jamba": "it has layers of Mamba-1; Bamba, Granite 4.0 H and Falcon-H1 run",
    "RwkvForCausalLM Rwkv6ForCausalLM RWKV7ForCausalLM rwkv6 rwkv7": (
        "its state is none of those that run; Mamba-2 and Qwen3-Next run"
    ),
    "KimiLinearForCausalLM kimi-linear": (
        "each channel of its state decays by itself; Qwen3-Next runs"
    ),
    "Gemma3nForConditionalGeneration Gemma3nForCausalLM gemma3n": (
        "it keeps several streams of activations (AltUp); Gemma 3 and Gemma 4 run"
    ),
    "ApertusForCausalLM apertus": (
        "its activation has learnt numbers in each layer (xIELU); Llama, OLMo 2 and Qwen3 run"
    ),
    "GPTBigCodeForCausalLM starcoder": (
        "it is a GPT-2 whose heads share one key; StarCoder2, which followed it, runs"
    ),
    "GPTJForCausalLM gptj": "GPT-NeoX (Pythia), which followed it, and GPT-2 run",
    "GPTNeoForCausalLM": "GPT-NeoX (Pythia), which followed it, and GPT-2 run",
    "CodeGenForCausalLM": "it is a GPT-J; StarCoder2 and Qwen2.5-Coder run",
    "DeepseekV32ForCausalLM deepseek32": (
        "an indexer chooses what a token sees; DeepSeek V3 and V3.1 (DeepseekV3ForCausalLM) run"
    ),
    "GlmMoeDsaForCausalLM glm-dsa": (
        "an indexer chooses what a token sees; GLM-4.5, 4.6 and 4.7-Flash run"
    ),
    "KimiK25ForConditionalGeneration": (
        "it sees; Kimi K2, of text alone (DeepseekV3ForCausalLM), runs"
    ),
    "DbrxForCausalLM dbrx": "it clamps queries, keys and values; Mixtral and Qwen3-MoE run",
    "LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaLlamaForCausalLM": (
        "it sees; its text half is the Llama, Mistral or Qwen2 that it was made of, which runs"
    ),
    "LlavaOnevisionForConditionalGeneration": "it sees; its text half, Qwen2, runs",
    "MllamaForConditionalGeneration mllama": (
        "some of its layers look at pictures; its text half, Llama 3.1, runs"
    ),
    "PaliGemmaForConditionalGeneration": "it sees; its text half, Gemma or Gemma 2, runs",
    "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration": (
        "it sees; its text half, Llama 3 or SmolLM2, runs"
    ),
    "InternVLChatModel InternVLForConditionalGeneration": (
        "it sees; the text halves of Qwen2.5-VL, Qwen3-VL and Gemma 3 run"
    ),
    "Phi3VForCausalLM Phi4MMForCausalLM": "it sees; its text half, Phi-3 or Phi-4-mini, runs",
    "Qwen2_5OmniModel Qwen2_5OmniForConditionalGeneration": (
        "it hears and speaks; the text half of Qwen2.5-VL runs"
    ),
    "Qwen3OmniMoeForConditionalGeneration": "it hears and speaks; Qwen3-MoE runs",
    "Qwen3VLMoeForConditionalGeneration": (
        "its experts are stored with inputs first; its GGUF files, and Qwen3-VL without them, run"
    ),
    "AlbertModel AlbertForMaskedLM": "its layers share their weights; BERT and DistilBERT run",
    "DebertaModel DebertaV2Model DebertaV2ForMaskedLM DebertaV2ForSequenceClassification": (
        "its scores are of contents and positions apart; RoBERTa, MPNet and ModernBERT run"
    ),
    "ElectraModel ElectraForPreTraining": "BERT, RoBERTa and ModernBERT run",
    "JinaBertModel JinaBertForMaskedLM jina-bert-v2": (
        "it is a BERT whose scores lose by distance; Nomic, ModernBERT and bge-m3 run"
    ),
    "NewModel": "gte's own code; Nomic, ModernBERT and bge-m3 run",
}
NEAREST = {name: reason for names, reason in _ROWS.items() for name in names.split()}


def advice(name: str, known: Iterable[str]) -> str:
    """Return what an architecture is and what runs instead, or the name that is spelt most alike.

    ``known`` are the names that run; nothing is returned if none is like it.
    """
    if name in NEAREST:
        return NEAREST[name]
    by_stem = {_stem(other): other for other in known}
    alike = difflib.get_close_matches(_stem(name[:80]), by_stem, 1, 0.75)
    return f"of what runs {by_stem[alike[0]]!r} is nearest by name" if alike else ""


def _stem(name: str) -> str:
    """Return what two names are compared by: what all end in says nothing."""
    for suffix in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model"):
        name = name.removesuffix(suffix)
    return name.lower()
