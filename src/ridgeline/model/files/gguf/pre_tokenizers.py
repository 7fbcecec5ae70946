# ruff: noqa: RUF001  # letters that look like others are what these patterns are about
"""How llama.cpp's named pre-tokenizers cut a text before byte-level BPE.

A name that is not here is refused: another pattern would give other ids, and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
# Words end where a small letter is followed by a capital one.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    _TEKKEN.replace("]+|", f"]+{_CONTRACTION}?|", 1)
    .replace("]*|", f"]*{_CONTRACTION}?|", 1)
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_KIMI = r"\p{Han}+|" + _O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]*", "]*")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_V3 = (
    r'[!"#$%&'
    r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The cased letters of Unicode 12, as DeepSeek's first tokenizer lists them.
_CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    r"ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-"
    r"ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-"
    r"𞥃"
)

# tokenizer.ggml.pre -> patterns that cut the text, one after the other.
SPLITS = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "qwen35": (
        _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),
    ),
    "seed-coder": (_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),),
    "llama-bpe": (_CL100K,),
    "dbrx": (_CL100K,),
    "glm4": (_CL100K,),
    "gpt-4o": (_O200K,),
    "tekken": (_TEKKEN,),
    "kimi-k2": (_KIMI,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    ),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "bloom": (_BLOOM,),
    "viking": (_BLOOM, r"\p{N}"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}
# Other names of each, which llama.cpp reads alike: converters have one for every vocabulary.
_OTHER_NAMES = {
    "gpt-2": "a.x-4.0 exaone4 gigachat granite-docling jais jina-de jina-es jina-v2-de jina-v2-es "
    "mellum modern-bert mpt olmo phi-2 roberta-bpe trillion",
    "smollm": "codeshell command-r exaone mellum2 minerva-7b refact starcoder",
    "qwen2": "deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo megrez solar-open stablelm2",
    "llama-bpe": "falcon-h1 falcon3 jina-v5-nano lfm2 llama-v3 llama3 midm-2.0 pixtral",
    "dbrx": "chatglm-bpe smaug-bpe",
    "gpt-4o": "kanana2 llama4 minimax-m2 talkie",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "gpt3-finnish poro-chat",
}
_KNOWN_NAMES = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
# Whose texts begin with BOS unless the file says otherwise, whose mask takes the white space before
# it, and which look for a whole word before merging.
BEGIN_WITH_BOS = ("llama-bpe", "tekken")
MASK_STRIPS = ("modern-bert", "jina-v2-de", "jina-v2-es", "roberta-bpe")
TAKE_WHOLE_WORDS = ("llama-bpe", "tekken", "glm4")


def pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """Return which pre-tokenizer a file names: its first name in ``SPLITS``, or as it is."""
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _KNOWN_NAMES.get(name, name)


def names_no_pre_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Return whether a file with byte-level BPE leaves open how its text is cut."""
    kind, name = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    return kind == "gpt2" and name is None
