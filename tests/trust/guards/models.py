"""Tiny guard models with random weights, each with the architecture and the template of its family.

The templates have the structure of the families' own: variables, roles, markers and ends. Policies
are shortened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from ridgeline.trust import guards
from tests.model.files.tiny import CONFIG, hf_weights
from tests.model.files.vocabularies import byte_level

_TASK = (
    "Task: Check if there is unsafe content in '\" + role + \"' messages in conversations.\\n\\n"
    "<BEGIN UNSAFE CONTENT CATEGORIES>\\n"
)
_END = (
    '<END CONVERSATION>\\n\\nProvide your safety assessment for ONLY THE LAST " + role + "'
    " message.<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
)
_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{% set role = 'User' %}"
    "{% else %}{% set role = 'Agent' %}{% endif %}"
)
_ROLE = "{% if messages|length % 2 == 0 %}{% set role = 'Agent' %}{% else %}{% set role = 'User' %}"
_HEAD = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n"
_HAZARDS = "".join(f"S{i}: {name}.\\n" for i, name in enumerate("abcdefghijklmn", 1))

LLAMA_GUARD_8B = (
    _ROLE + '{% endif %}{{ " ' + _HEAD + _TASK + _HAZARDS + "<END UNSAFE CONTENT CATEGORIES>\\n\\n"
    '<BEGIN CONVERSATION>\\n\\n" }}{% for message in messages %}' + _ALTERNATE + "{{ role + ': ' + "
    "message['content'].strip() + '\\n\\n' }}{% endfor %}{{ \"" + _END + '" }}'
)
# That of the 1B model, and of Llama Guard 4: content is a list of parts, and categories a variable.
LLAMA_GUARD_1B = (
    _ROLE + "{% endif %}{% if not categories is defined %}{% set categories = "
    "{" + ", ".join(f"'S{i}': 'Hazard.'" for i in range(1, 14)) + "} %}{% endif %}"
    '{{ "' + _HEAD + _TASK + '" }}{% for key in categories %}{% if key not in '
    "excluded_category_keys %}{{ key + ': ' + categories[key] + '\\n' }}{% endif %}{% endfor %}"
    '{{ "<END UNSAFE CONTENT CATEGORIES>\\n\\n<BEGIN CONVERSATION>\\n\\n" }}'
    "{% for message in messages %}" + _ALTERNATE + "{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ role + ': ' + content['text'] | trim + '\\n\\n' }}"
    '{% endfor %}{% endfor %}{{ "' + _END + '" }}'
)
# As Llama 4's prompts, with its headers; the rest is that of the 1B model.
LLAMA_GUARD_4 = LLAMA_GUARD_1B
for _theirs, _ours in (("start_header_id", "header_start"), ("end_header_id", "header_end")):
    LLAMA_GUARD_4 = LLAMA_GUARD_4.replace(_theirs, _ours)
LLAMA_GUARD_4 = LLAMA_GUARD_4.replace("eot_id", "eot").replace(
    "'S13': 'Hazard.'", "'S13': 'Hazard.', 'S14': 'Hazard.'"
)
SHIELD_GEMMA = (
    "{{ bos_token }}{% if not guideline %}{{ raise_exception('guideline is missing') }}{% endif %}"
    "You are a policy expert.\n\n<start_of_turn>\nHuman Question: {{ messages[0]['content'] }}\n"
    "<end_of_turn>\n\n{% if messages|length == 2 %}<start_of_turn>\nChatbot Response: "
    "{{ messages[1]['content'] }}\n<end_of_turn>\n\n{% endif %}Our safety principle:\n\n* "
    "{{ guideline }}\n\nAnswer with 'Yes' or 'No'.\n\n"
)
RISKS = (
    *("harm", "social_bias", "jailbreak", "profanity", "sexual_content", "unethical_behavior"),
    "violence",
)
GRANITE_GUARDIAN = (
    "{% set risk_bank = {"
    + ", ".join(f"'{name}': 'The text has {name}.'" for name in RISKS)
    + "} %}{% if guardian_config and guardian_config['risk_name'] not in risk_bank %}"
    "{{ raise_exception('new risk name') }}{% endif %}"
    "{% set risk = guardian_config['risk_name'] if guardian_config else 'harm' %}"
    "{% if messages|length > 2 %}{{ raise_exception('these are tools') }}{% endif %}"
    "{{ '<|start_of_role|>user<|end_of_role|>You are a safety agent.\\n\\n<start_of_turn>\\n' }}"
    "{% for message in messages %}{{ message.role | capitalize + ' Message: ' + message.content }}"
    "{{ '\\n' }}{% endfor %}{{ '<end_of_turn>\\n\\n- ' + risk_bank[risk] + \"\\n\\nYour answer "
    "must be either 'Yes' or 'No'.<|end_of_text|>\\n\" }}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
VIOLATIONS = (
    *("Violent", "Non-violent Illegal Acts", "Sexual Content or Sexual Acts", "PII"),
    *("Suicide & Self-Harm", "Unethical Acts", "Politically Sensitive Topics"),
    *("Copyright Violation", "Jailbreak"),
)
QWEN3_GUARD = (
    "{{ '<|im_start|>user\\n# Task Instructions:\\nCategories:\\n"
    + "\\n".join(VIOLATIONS)
    + "\\n\\n<BEGIN CONVERSATION>\\n' }}{% for m in messages %}"
    "{{ m.role | upper + ': ' + m.content + '\\n\\n' }}{% endfor %}"
    "{{ '<END CONVERSATION>\\n\\nSafety: Safe, Unsafe or Controversial<|im_end|>\\n' }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}"
)
WILDGUARD = (Path(guards.__file__).parent / "wildguard.jinja").read_text()  # ours: it has none
_CONTROLS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|header_start|>", "<|header_end|>", "<|eot|>"),
    *("[INST]", "[/INST]"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
)
# What the families' vocabularies have as one token, or as several that differ in the first.
_WORDS = (
    *("\n\n", "safe", "unsafe", "10", "11", "12", "13", "14", "Yes", "No", "Safety", " Safe"),
    *(
        " Un",
        " Controvers",
        " Violent",
        " Non",
        " Sexual",
        " P",
        " Suicide",
        " Polit",
        " Copyright",
    ),
    *(" Jail", " yes", " no"),
)
# Of Llama Guard 4: a dense model, pruned from one with experts.
_DENSE = {"model_type": "llama4_text", "moe_layers": [], "head_dim": 8}
_DENSE |= {"intermediate_size_mlp": CONFIG["intermediate_size"]}
_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


class GuardModel(NamedTuple):
    """A family's architecture and template."""

    template: str
    config: dict[str, Any]


MODELS = {
    "Llama Guard 3 8B": GuardModel(LLAMA_GUARD_8B, {}),
    "Llama Guard 3 1B": GuardModel(LLAMA_GUARD_1B, {}),
    "Llama Guard 4": GuardModel(LLAMA_GUARD_4, {"architectures": ["Llama4ForCausalLM"]}),
    "ShieldGemma": GuardModel(
        SHIELD_GEMMA,
        {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}
        | {"tie_word_embeddings": True},
    ),
    "Granite Guardian": GuardModel(
        GRANITE_GUARDIAN,
        {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 2.0}
        | {"logits_scaling": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5},
    ),
    "WildGuard": GuardModel(WILDGUARD, {"architectures": ["MistralForCausalLM"]}),
    "Qwen3Guard": GuardModel(QWEN3_GUARD, {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}),
}


def write_guard(path: Path, name: str, **config: Any) -> Path:
    """Write a guard of one of ``MODELS`` to a directory that is made for it."""
    template, own = MODELS[name]
    path.mkdir(parents=True)
    spec, vocab_size = _tokenizer()
    whole = CONFIG | {"max_position_embeddings": 4096, "vocab_size": vocab_size} | own | config
    if "Llama4" in whole["architectures"][0]:
        whole |= _DENSE
        renamed = hf_weights(whole)
        weights = {name.replace(".mlp.", ".feed_forward."): one for name, one in renamed.items()}
    else:
        weights = hf_weights(whole, norms="Qwen3" in whole["architectures"][0])
    if "Gemma2" in whole["architectures"][0]:
        for i in range(whole["num_hidden_layers"]):
            for norm in _NORMS:
                weights[f"model.layers.{i}.{norm}.weight"] = np.ones(32, np.float32)
        del weights["lm_head.weight"]
    for one, values in weights.items():  # tame ones, or verdicts would be certain
        if values.ndim == 2:
            weights[one] = values * np.float32(1.5 / values.shape[-1] ** 0.5)
    save_file(weights, path / "model.safetensors")
    files = {
        "config": whole | {"eos_token_id": 0, "bos_token_id": None},
        "tokenizer": spec,
        "tokenizer_config": {"chat_template": template, "add_bos_token": False},
    }
    for file, content in files.items():
        (path / f"{file}.json").write_text(json.dumps(content))
    return path


def _tokenizer() -> tuple[dict[str, Any], int]:
    """Return a tokenizer.json with the words of verdicts, and the number of its tokens."""
    spec = json.loads(json.dumps(byte_level()))
    vocab, merges = spec["model"]["vocab"], [tuple(pair) for pair in spec["model"]["merges"]]
    for word in _WORDS:
        pieces = [*word.replace(" ", "\u0120").replace("\n", "\u010a")]
        for pair in merges:
            for i in range(len(pieces) - 2, -1, -1):
                if (pieces[i], pieces[i + 1]) == pair:
                    pieces[i : i + 2] = ["".join(pair)]
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = ["".join(pieces[:2])]
            vocab.setdefault(pieces[0], len(vocab))
    spec["model"]["merges"] = [list(pair) for pair in merges]
    last = spec["added_tokens"][-1]
    controls = [last | {"content": one, "special": True} for one in _CONTROLS]
    for one in (added := [*spec["added_tokens"], *controls]):
        one["id"] = vocab.get(one["content"], -1)
    others = [one for one in added if one["id"] < 0]
    for i, one in enumerate(others, len(vocab)):
        one["id"] = i
    spec["added_tokens"] = added
    return spec, len(vocab) + len(others)
