"""Which row of the tables a file goes by, and what is said of a file that goes by none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.fields import const, flag
from ridgeline.model.files.families.inherit import tables_of
from ridgeline.model.files.families.tables import (
    decoders,
    encoders,
    experts,
    gemma,
    layer_norm,
    plan_only,
    recurrent,
)
from ridgeline.model.files.tensors import Tensor

TABLES = tables_of((
    *decoders.ROWS, *gemma.ROWS, *layer_norm.ROWS, *experts.ROWS, *recurrent.ROWS, *encoders.ROWS,
    *plan_only.ROWS,
))  # fmt: skip
HF_FAMILIES, GGUF_FAMILIES = TABLES.hf, TABLES.gguf
COUNTED = HF_FAMILIES | TABLES.counted
OF_ANSWERS = ("ForCausalLM", "LMHeadModel")
_OF_ENCODERS = (
    "ForMaskedLM", "ForNextSentencePrediction", "ForPreTraining", "ForQuestionAnswering",
    "ForTokenClassification",
)  # fmt: skip
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HEADS = "attention.head_count"
# What runs in the place of a well-known architecture that does not, by the names of Hugging Face's
# classes and of GGUF's ``general.architecture``. For any other the name that is spelt most alike is
# all that is known.
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


def architecture(values: Mapping[str, Any]) -> Any:
    """Return the first name under a config's ``architectures``, else the class of its type."""
    named = first_class(values)
    half = values.get("text_config")
    text = half if type(half) is dict else {}
    return named or class_of_type(values) or class_of_type(text) or named


def first_class(values: Mapping[str, Any]) -> Any:
    """Return the first name under a config's ``architectures``, None if there is none."""
    named = values.get("architectures")
    return named[0] if type(named) is list and named else named or None


def family_of(
    values: Mapping[str, Any], families: Mapping[str, Family] = HF_FAMILIES
) -> Family | None:
    """Return the family of a config, which may have a table of its own for some of its models."""
    name, is_headless = _family_name(architecture(values), families)
    half = values.get("text_config")
    text = half if type(half) is dict else values
    has_experts = text.get("enable_moe_block") is True or text.get("num_local_experts")
    has_experts = has_experts or _has_expert_halves(text)
    counts = (text.get(key) for key in _NUM_EXPERTS)
    has_many = any(isinstance(count, int | float) and count > 1 for count in counts)
    has_latents = bool(text.get("kv_lora_rank"))
    has_latent_experts = (has_latents and has_many) or bool(text.get("moe_latent_size"))
    kinds = {
        "of latent experts": has_latent_experts,
        "of experts": has_experts,
        "of groups": text.get("new_decoder_architecture") is True or "n_head_kv" in text,
        "of keys by head": text.get("multi_query") is False,
        "of latents": has_latents,
        "of many experts": has_many,
    }
    names = [f"{name} {kind}" for kind, is_one in kinds.items() if is_one]
    family = next((families[one] for one in (*names, name) if one in families), None)
    return _without_head(family) if family is not None and is_headless else family


def _family_name(name: Any, families: Mapping[str, Family]) -> tuple[str, bool]:
    """Return the name in the tables for a class's, and whether the head of that one is missing."""
    name = str(name)
    if name in families:
        return name, False
    for suffix in _OF_ENCODERS:
        of_states = name.removesuffix(suffix) + "Model"
        if name.endswith(suffix) and of_states in families:
            return of_states, False
    of_answers = [name.removesuffix("Model") + suffix for suffix in OF_ANSWERS]
    matches = [other for other in of_answers if name.endswith("Model") and other in families]
    return (matches[0], True) if matches else (name, False)


def _without_head(family: Family) -> Family:
    """Return a family of decoders whose files have no head; ``is_causal`` may say false of them."""
    facts = {**family.facts, "tied_embeddings": const(True), "has_head": const(False)}
    if family.has_attention:
        facts["mixer.causal"] = flag("is_causal", default=True)
    return replace(family, facts=facts, ignored_keys=(*family.ignored_keys, "tie_word_embeddings"))


def _has_expert_halves(values: Any) -> bool:
    """Return whether a config names a layer of experts alone."""
    names = values.get("layers_block_type")
    by_letter = values.get("hybrid_override_pattern")
    of_names = type(names) is list and "moe" in names
    return of_names or (type(by_letter) is str and "E" in by_letter)


def class_of_type(values: Mapping[str, Any]) -> str:
    """Return the class of a config's ``model_type``, "" if it is not known."""
    return TABLES.class_of_type.get(str(values.get("model_type")), "")


def family_of_gguf(
    metadata: Mapping[str, Any], raw: Mapping[str, Tensor], where: str
) -> tuple[ConfigReader, Family]:
    """Return what a GGUF file says, and its family. Raises ModelFileError if none has its name."""
    name = ConfigReader(metadata, where).text("general.architecture")
    meta = ConfigReader(metadata, where, prefix=f"{name}.", tensors=raw.keys())
    if name not in GGUF_FAMILIES:
        refuse_unknown(meta, name, GGUF_FAMILIES)
    family = GGUF_FAMILIES[name]
    if meta.get("expert_count") and f"{name} of experts" in GGUF_FAMILIES:
        family = GGUF_FAMILIES[f"{name} of experts"]
    unsaid = {meta.prefix + key: value for key, value in family.defaults.items()}
    numbers = {meta.prefix + _HEADS: _one_number(meta, _HEADS)}
    heads = {key: value for key, value in numbers.items() if value is not None}
    return replace(meta, values={**unsaid, **metadata, **heads}), family


def _one_number(meta: ConfigReader, key: str) -> Any:
    """Return a value, and of a list of equal numbers for all layers the number."""
    stored = meta.values.get(meta.prefix + key)
    if not isinstance(stored, np.ndarray | list):
        return stored
    distinct = set(np.asarray(stored).tolist())
    if len(distinct) != 1:
        meta.fail(f"{meta.prefix}{key} differs from layer to layer, which is not supported")
    return distinct.pop()


def _keys_of(families: Iterable[Family], counted: Iterable[Family] = ()) -> frozenset[str]:
    """Return the keys by which any of these families goes, or that it refuses.

    Of families that are only ``counted`` those too that change no size.
    """
    keys = {key for one in counted for key in one.ignored_keys}
    aliases: dict[str, str] = {}
    for one in (*families, *counted):
        keys.update(*(reader.keys for reader in one.facts.values()))
        keys |= {*one.refused_keys, *one.required, *one.rope_keys}
        keys |= {one.attention_layers, one.dense_layers, one.experts_every}
        aliases |= one.aliases
    return frozenset(keys | {key for key, usual in aliases.items() if usual in keys}) - {""}


# Keys that change what a model computes, in files of some family.
CHANGING_IN_HF = _keys_of(HF_FAMILIES.values(), TABLES.counted.values())
CHANGING_IN_GGUF = _keys_of(GGUF_FAMILIES.values())


def refuse_unknown(
    config: ConfigReader, name: Any, families: Mapping[str, Family], *, own_code: bool = False
) -> NoReturn:
    """Raise ModelFileError: say what runs in its place, and where all that runs is listed.

    ``own_code`` says that the model brings code, which is never run.
    """
    problem = f"architecture {repr(name)[:80]} is not supported"
    if own_code:
        problem += ", and its own code (auto_map) is never run"
    names = (key for key in families if " " not in key)
    if type(name) is str and (words := _advice(name, names)):
        problem += f": {words}"
    config.fail(f"{problem}; ridgeline models --families lists what runs")


def _advice(name: str, names: Iterable[str]) -> str:
    """Return what an architecture is and what runs instead, or the name that is spelt most alike.

    ``names`` are those that run; nothing is returned if none is like it.
    """
    if name in NEAREST:
        return NEAREST[name]
    by_stem = {_stem(other): other for other in names}
    alike = difflib.get_close_matches(_stem(name[:80]), by_stem, 1, 0.75)
    return f"of what runs {by_stem[alike[0]]!r} is nearest by name" if alike else ""


def _stem(name: str) -> str:
    """Return what two names are compared by: what all end in says nothing."""
    for suffix in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model"):
        name = name.removesuffix(suffix)
    return name.lower()
