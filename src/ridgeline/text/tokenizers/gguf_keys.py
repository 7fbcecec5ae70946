"""A tokenizer.json as the keys of a GGUF file, from which llama.cpp and this engine make its ids.

Such a file names its pre-tokenizer, and SentencePiece's pieces have scores in place of merges. The
name is that of the first one that cuts a text of many scripts alike; what has been found must
give the same ids of that text, and of the whole vocabulary read as text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tokenizers

from ridgeline.model.files.gguf.pre_tokenizers import SPLITS, TAKE_WHOLE_WORDS
from ridgeline.model.files.gguf.tokenizer import TokenType, tokenizer_json
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.text.tokenizers.tokenizer import Tokenizer
from ridgeline.text.tokenizers.vocabulary import checked

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PROBE = unicodedata.normalize("NFC", (
    "The cat's 3 mats, they'LL say: I'd've!  1234567 3.14 x²  \n\n \t camelCaseWords HTTPServer\r\n"
    "def f(a, b=[1, 2]):\n        return {'x': a ** 2, \"y\": b[-1:]}  # café naïve Größe\n"
    "東京は日本の首都です。 한국어 Привет, мир! नमस्ते "
    "العربية עברית ไทย Ελληνικά ½ € ™ … — “quotes”\n"
    "   trailing   \n\n\n///===>>> <br/> $100,000.00 a_b-c+d 100km/h "
    "🙂👩‍👩‍👧 🇫🇷 \u00a0 e\u0301\u0300 "
))  # fmt: skip


def gguf_vocabulary(
    spec: Mapping[str, Any],
    own: Tokenizer,
    loaded: Callable[[Mapping[str, Any]], Tokenizer],
    vocab_size: int,
) -> dict[str, Any]:
    """Return the keys ``tokenizer.ggml.*`` of a vocabulary; which tokens begin texts is not said.

    Args:
        spec: the contents of a tokenizer.json.
        own: the tokenizer that was loaded of it.
        loaded: loads such keys, with the same control tokens.
        vocab_size: rows of the model's embedding; ids behind the vocabulary's are never met.

    Raises:
        ModelFileError: no GGUF file can say how it makes ids of texts.
    """
    pieces, added = checked(dict(spec))
    size = max([len(pieces), *(token["id"] + 1 for token in added)])
    if spec["model"].get("type", "BPE") != "BPE" or size > vocab_size:
        raise ModelFileError(
            "its tokenizer cannot be written into a GGUF file: it must be BPE, with at most as "
            f"many tokens as the {vocab_size:,} rows of the embedding"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = np.full(vocab_size, TokenType.UNUSED, np.int32)
    for i, piece in enumerate(pieces):
        if piece is not None:
            tokens[i], types[i] = piece, TokenType.NORMAL
    for token in added:
        tokens[token["id"]] = token["content"]
        is_special = token.get("special")
        types[token["id"]] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    is_sentencepiece = bool(spec["model"].get("byte_fallback"))
    changes = _sentencepiece(spec, tokens, types) if is_sentencepiece else _byte_level(spec)
    text = _PROBE + own.decode(range(own.vocab_size), skip_special=True)
    wanted = own.encode(text, parse_special=False, add_bos=False)
    for change in changes:
        tokenizer = loaded(values | change)
        if tokenizer.encode(text, parse_special=False, add_bos=False) == wanted:
            return values | change
    raise ModelFileError(
        "its tokenizer cannot be written into a GGUF file: no pre-tokenizer that these files name "
        "gives the same ids"
    )


def _byte_level(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys of each known pre-tokenizer that cuts text as this one does."""
    model = spec["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    wanted = _cut(spec)
    looks = bool(model.get("ignore_merges"))
    names = sorted(SPLITS, key=lambda name: (name in TAKE_WHOLE_WORDS) != looks)
    probe = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    return [
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.merges": pairs,
        }
        for name in names
        if _cut(tokenizer_json({**probe, "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": name}))
        == wanted
    ]


def _cut(spec: Mapping[str, Any]) -> list[str]:
    """Return the parts that a tokenizer.json cuts the text of many scripts into."""
    steps = {
        "version": "1.0",
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": spec.get("pre_tokenizer"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(steps))
    text = library.normalizer.normalize_str(_PROBE) if library.normalizer else _PROBE
    if library.pre_tokenizer is None:
        return [text]
    return [part for part, _ in library.pre_tokenizer.pre_tokenize_str(text)]


def _sentencepiece(
    spec: Mapping[str, Any], tokens: list[str], types: np.ndarray[Any, np.dtype[np.int32]]
) -> list[dict[str, Any]]:
    """Return the keys with a space in front of a text, and those without.

    A piece is made the sooner the higher its score: merges stand in that order.
    """
    model = spec["model"]
    ids = {token: i for i, token in enumerate(tokens)}
    unknown = ids.get(str(model.get("unk_token")), 0)
    types[[i for token, i in ids.items() if _BYTE.fullmatch(token)]] = TokenType.BYTE
    types[unknown] = TokenType.UNKNOWN
    scores = np.full(len(tokens), -float(len(tokens)), np.float32)
    pieces = dict.fromkeys(
        "".join(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]
    )
    for rank, piece in enumerate(pieces):
        scores[ids.get(piece, unknown)] = -float(rank)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": unknown,
    }
    return [keys | {"tokenizer.ggml.add_space_prefix": starts} for starts in (True, False)]
