"""The tokenizer that GGUF metadata describes, restated in the terms of a tokenizer.json.

Split patterns, merges and normalizer, which llama.cpp derives from a name ("qwen2", "llama"), are
spelled out here. This module knows neither files nor the tokenizers library;
``tokenizers.tokenizer`` loads the result exactly as it loads a tokenizer.json.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.gguf.pre_tokenizers import (
    MASK_STRIPS,
    SPLITS,
    TAKE_WHOLE_WORDS,
    pre_tokenizer,
)
from ridgeline.model.files.tensors import ModelFileError

Numbers = NDArray[Any]


class TokenType(IntEnum):
    """What ``tokenizer.ggml.token_type`` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MAX_PIECE_CHARS = 1024  # real vocabularies stop at 256; merges cost the square of a piece's length
_MOST_COMPARED_CHARS = 1 << 28  # the sum of those squares; Gemma's 262,144 pieces have 2^24
# Pairs of pieces whose union is a piece. Real vocabularies have 2 to 3 of them for each piece.
_MOST_PAIRS_PER_PIECE, _MOST_PAIRS = 8, 1 << 16

# Phi-3's control tokens remove the white space after them, except for these. GGUF cannot say so.
_PHI3_LEAVES_SPACE = ("<unk>", "<s>", "<|endoftext|>")


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
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), default=TokenType.NORMAL)
    if kind == "gpt2":
        spec = _byte_level(metadata, tokens)
    elif kind == "llama":
        scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
        starts = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        spec = _sentencepiece(metadata, tokens, _merges_of_scores(tokens, types, scores), starts)
    elif kind == "gemma4":  # SentencePiece whose file gives the merges themselves
        spec = _sentencepiece(metadata, tokens, _merges(metadata), starts_with_space=False)
    elif kind == "bert":
        spec = _wordpiece(metadata, tokens, types)
    elif kind == "t5":
        spec = _unigram(metadata, tokens, types)
    else:
        raise ModelFileError(
            f"tokenizer.ggml.model is {kind!r}; supported: gpt2 (byte-level BPE), llama "
            "and gemma4 (SentencePiece BPE), bert (WordPiece), t5 (Unigram)"
        )
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    # XLM-RoBERTa's, ModernBERT's and Jina's masks remove the white space before them.
    mask_strips = kind == "t5" or str(metadata.get("tokenizer.ggml.pre")) in MASK_STRIPS
    spec["added_tokens"] = [
        {
            "id": i,
            "content": tokens[i],
            "special": bool(types[i] != TokenType.USER_DEFINED),
            "single_word": False,
            "lstrip": tokens[i] in ("<mask>", "[MASK]") and mask_strips,
            "rstrip": strips and tokens[i] not in _PHI3_LEAVES_SPACE,
            "normalized": False,
        }
        for i in np.flatnonzero(
            np.isin(types, (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED))
        ).tolist()
    ]
    spec["model"] = {"type": "BPE", "vocab": tokens} | spec["model"]
    return spec


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = pre_tokenizer(metadata)
    if pre not in SPLITS:
        raise ModelFileError(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(SPLITS)}")
    merges = _merges(metadata)
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in SPLITS[pre]
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
        "model": {"merges": merges, "ignore_merges": pre in TAKE_WHOLE_WORDS},
    }


def _merges(metadata: Mapping[str, Any]) -> list[Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not set(map(type, merges)) <= {str}:
        raise ModelFileError("tokenizer.ggml.merges is missing or is not a list of strings")
    return merges


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], merges: list[Any], starts_with_space: bool
) -> dict[str, Any]:
    unknown = _unknown_id(metadata, len(tokens), 0)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    starts = [{"type": "Prepend", "prepend": "▁"}] if starts_with_space else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if starts_with_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*starts, spaces]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "merges": merges,
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": tokens[unknown],
        },
    }


def _wordpiece(metadata: Mapping[str, Any], tokens: list[str], types: Numbers) -> dict[str, Any]:
    """BERT's: converters write the beginning of a word as ``▁word`` and what continues it bare."""
    lowers = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    strips = bool(metadata.get("tokenizer.ggml.normalizer.strip_accents", lowers))
    controls = (types == TokenType.CONTROL) | (types == TokenType.UNKNOWN)
    pieces = [
        token if is_control else token[1:] if token.startswith("▁") else f"##{token}"
        for token, is_control in zip(tokens, controls.tolist(), strict=True)
    ]
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips,
            "lowercase": lowers,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "vocab": pieces,
            "unk_token": pieces[_unknown_id(metadata, len(tokens), 100)],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }


def _unigram(metadata: Mapping[str, Any], tokens: list[str], types: Numbers) -> dict[str, Any]:
    """T5's and XLM-RoBERTa's: the likeliest pieces of each word, ``▁`` in front of it."""
    for key in ("add_space_prefix", "remove_extra_whitespaces"):
        if not metadata.get(f"tokenizer.ggml.{key}", True):
            raise ModelFileError(f"tokenizer.ggml.{key} is false, which is not supported for t5")
    if (types == TokenType.BYTE).any():
        raise ModelFileError("tokenizer.ggml.tokens has bytes, which is not supported for t5")
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens)).astype(np.float64)
    normal = types == TokenType.NORMAL
    if not normal.any():
        raise ModelFileError("tokenizer.ggml.token_type has no normal token")
    # The lowest score decides what an unknown character costs; only text has one.
    scores[~normal] = scores[normal].min()
    # Words have no spaces, so that a piece with one is never found in a text.
    unused = (types == TokenType.UNUSED).tolist()
    pieces = [
        f" {token}" if is_unused else token for token, is_unused in zip(tokens, unused, strict=True)
    ]
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    normalizer = None
    if charsmap is not None:
        data = np.asarray(charsmap).astype(np.uint8).tobytes()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": b64encode(data).decode()}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, spaces],
        },
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "vocab": [list(entry) for entry in zip(pieces, scores.tolist(), strict=True)],
            "unk_id": _unknown_id(metadata, len(tokens), 2),
        },
    }


def _unknown_id(metadata: Mapping[str, Any], num_tokens: int, default: int) -> int:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", default)
    if not isinstance(unknown, int) or not 0 <= unknown < num_tokens:
        raise ModelFileError(f"tokenizer.ggml.unknown_token_id {unknown} is not a token")
    return unknown


def _merges_of_scores(tokens: list[str], types: Numbers, scores: Numbers) -> list[tuple[str, str]]:
    """Return every pair of pieces whose concatenation is a piece, the best score of it first.

    SentencePiece joins the neighbours whose union scores highest; a BPE library joins those whose
    pair stands first in a list. Only normal pieces take part: text must never merge into ``</s>``.
    """
    normal = {
        tokens[i]: float(scores[i]) for i in np.flatnonzero(types == TokenType.NORMAL).tolist()
    }
    if any(len(piece) > _MAX_PIECE_CHARS for piece in normal):
        raise ModelFileError(
            f"tokenizer.ggml.tokens has a piece above {_MAX_PIECE_CHARS} characters"
        )
    if sum(len(piece) ** 2 for piece in normal) > _MOST_COMPARED_CHARS:
        raise ModelFileError("tokenizer.ggml.tokens has longer pieces than any vocabulary in use")
    # Pieces are sorted, not pairs: a piece's pairs have its score, and a sort keeps their order.
    by_score = sorted(normal, key=normal.__getitem__, reverse=True)
    same = {piece: piece for piece in normal}  # so that a pair holds no text of its own
    pairs = (
        (left, right)
        for piece in by_score
        for k in range(1, len(piece))
        if (left := same.get(piece[:k])) and (right := same.get(piece[k:]))
    )
    most = _MOST_PAIRS_PER_PIECE * len(normal) + _MOST_PAIRS
    merges = list(islice(pairs, most + 1))
    if len(merges) > most:
        raise ModelFileError(
            f"tokenizer.ggml.tokens has pieces that other pieces make in more than {most:,} ways: "
            "no vocabulary in use has as many"
        )
    return merges


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
