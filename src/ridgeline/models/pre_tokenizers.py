"""How llama.cpp's named pre-tokenizers cut a text before byte-level BPE.

A name that is not here is refused: another pattern would give other ids, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> patterns that cut the text, one after the other.
SPLITS = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "llama-bpe": (_CL100K,),
    "dbrx": (_CL100K,),
}
# Other names of each, which llama.cpp reads alike: converters have one for every vocabulary.
_OTHER_NAMES = {
    "gpt-2": "a.x-4.0 exaone4 gigachat granite-docling jais jina-de jina-es jina-v2-de jina-v2-es "
    "mellum modern-bert mpt olmo phi-2 trillion",
    "smollm": "codeshell command-r exaone mellum2 minerva-7b refact starcoder",
    "qwen2": "deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo megrez solar-open stablelm2",
    "llama-bpe": "falcon-h1 falcon3 jina-v5-nano lfm2 llama-v3 llama3 midm-2.0 pixtral",
    "dbrx": "smaug-bpe",
}
_KNOWN_NAMES = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
# Whose texts begin with BOS, and who looks for a whole word before merging, unless a file says so.
BEGIN_WITH_BOS = ("llama-bpe",)
TAKE_WHOLE_WORDS = ("llama-bpe",)


def pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """Return which pre-tokenizer a file names: its first name in ``SPLITS``, or as it is."""
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _KNOWN_NAMES.get(name, name)
