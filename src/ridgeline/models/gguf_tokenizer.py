"""The tokenizer that GGUF metadata describes, restated in the terms of a tokenizer.json.

Split patterns, merges and normalizer, which llama.cpp derives from a name ("qwen2", "llama"), are
spelled out here. This module knows neither files nor the tokenizers library; ``text.tokenizer``
loads the result exactly as it loads a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.tensors import ModelFileError

Numbers = NDArray[Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_MAX_PIECE_CHARS = 1024  # real vocabularies stop at 256; merges cost the square of a piece's length

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> patterns that cut the text, one after the other.
_SPLITS = {
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

# Phi-3's control tokens remove the white space after them, except for these. GGUF cannot say so.
_PHI3_LEAVES_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """Return which pre-tokenizer a file names: its first name in ``_SPLITS``, or as it is."""
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _KNOWN_NAMES.get(name, name)


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a tokenizer.json for the ``tokenizer.ggml.*`` keys of ``metadata``.

    The vocabulary alone differs: it stays the list of tokens, by id. ``general.architecture``
    says whether it is Phi-3's.

    Raises:
        ModelFileError: the keys are missing, contradict each other, or name a tokenizer that is
            not supported.
    """
    kind = str(metadata.get("tokenizer.ggml.model"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or set(map(type, tokens)) != {str}:
        raise ModelFileError("tokenizer.ggml.tokens is missing or is not a list of strings")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), default=_NORMAL)
    if kind == "gpt2":
        spec = _byte_level(metadata, tokens)
    elif kind == "llama":
        spec = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelFileError(
            f"tokenizer.ggml.model is {kind!r}; supported: gpt2 (byte-level BPE), llama "
            "(SentencePiece BPE)"
        )
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    spec["added_tokens"] = [
        {
            "id": i,
            "content": tokens[i],
            "special": bool(types[i] != _USER_DEFINED),
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and tokens[i] not in _PHI3_LEAVES_SPACE,
            "normalized": False,
        }
        for i in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    ]
    spec["model"] |= {"type": "BPE", "vocab": tokens}
    return spec


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = pre_tokenizer(metadata)
    if pre not in _SPLITS:
        raise ModelFileError(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_SPLITS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not set(map(type, merges)) <= {str}:
        raise ModelFileError("tokenizer.ggml.merges is missing or is not a list of strings")
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in _SPLITS[pre]
    ]
    bytes_step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_step]},
        "decoder": bytes_step,
        "model": {"merges": merges, "ignore_merges": pre == "llama-bpe"},
    }


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Numbers
) -> dict[str, Any]:
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ModelFileError(f"tokenizer.ggml.unknown_token_id {unknown} is not a token")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    starts = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*starts, spaces]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "merges": _merges_of_scores(tokens, types, scores),
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": tokens[unknown],
        },
    }


def _merges_of_scores(tokens: list[str], types: Numbers, scores: Numbers) -> list[list[str]]:
    """Return every pair of pieces whose concatenation is a piece, the best score of it first.

    SentencePiece joins the neighbours whose union scores highest; a BPE library joins those whose
    pair stands first in a list. Only normal pieces take part: text must never merge into ``</s>``.
    """
    normal = {tokens[i]: float(scores[i]) for i in np.flatnonzero(types == _NORMAL).tolist()}
    if any(len(piece) > _MAX_PIECE_CHARS for piece in normal):
        raise ModelFileError(
            f"tokenizer.ggml.tokens has a piece above {_MAX_PIECE_CHARS} characters"
        )
    found = [
        (-score, left, right)
        for piece, score in normal.items()
        for k in range(1, len(piece))
        if (left := piece[:k]) in normal and (right := piece[k:]) in normal
    ]
    found.sort(key=lambda item: item[0])
    return [[left, right] for _, left, right in found]


def _numbers(
    metadata: Mapping[str, Any], key: str, count: int, default: float | None = None
) -> Numbers:
    """Return ``metadata[key]`` as ``count`` numbers, or ``default`` that often if it is missing."""
    values = metadata.get(key)
    if values is None and default is not None:
        return np.full(count, default)
    if not isinstance(values, list | np.ndarray) or len(values) != count:
        raise ModelFileError(f"{key} must hold one number for each of the {count} tokens")
    numbers = np.asarray(values)
    if numbers.ndim != 1 or numbers.dtype.kind not in "buif" or np.isnan(numbers).any():
        raise ModelFileError(f"{key} holds something that is not a number")
    return numbers
