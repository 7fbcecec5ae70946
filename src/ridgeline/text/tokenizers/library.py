"""The tokenizers library's tokenizer for a tokenizer.json, control tokens under private names.

Building one takes a third of a start, so it waits for the first text. Knows nothing of files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from ridgeline.model.files.tensors import ModelFileError

# Texts come one at a time: for one the library would start its threads, and complain of each fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SURROGATE = re.compile("[\ud800-\udfff]")
# What the models of a tokenizer.json say, besides vocabulary, merges and unknown token. Sampling
# (dropout, alpha) is left out: it would change the ids from call to call.
_HABITS = {
    "BPE": ("fuse_unk", "byte_fallback", "ignore_merges"),
    "WordPiece": ("continuing_subword_prefix", "max_input_chars_per_word"),
    "Unigram": ("byte_fallback",),
}
_MARKS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


def _added_token(token: dict[str, Any], private: dict[str, str]) -> tokenizers.AddedToken:
    marks = {name: token[name] for name in _MARKS if name in token}
    return tokenizers.AddedToken(private.get(token["content"], token["content"]), **marks)


def _renamed(
    pieces: Sequence[str | None], added: list[dict[str, Any]], private: dict[str, str]
) -> dict[str, int]:
    """Return the ids of all tokens by their names in the library, or raise ModelFileError."""
    ids = {piece: i for i, piece in enumerate(pieces) if piece is not None}
    if len(ids) < len(pieces) - pieces.count(None):
        raise ModelFileError("the vocabulary has the same token twice")
    for token in added:
        content, number = token["content"], token["id"]
        if ids.pop(content, number) != number:
            raise ModelFileError("an added token has another id than in the vocabulary")
        ids[private.get(content, content)] = number
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        bad_id = next(number for piece, number in ids.items() if _SURROGATE.search(piece))
        raise ModelFileError(f"token {bad_id} has a lone surrogate") from None
    return ids


def _bpe(
    merges: list[Any], names: dict[str, int], private: dict[str, str], **habits: Any
) -> tokenizers.models.Model:
    """Return a BPE model without the merges that would make a control token of text."""
    try:
        pairs = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in merges]
    except TypeError:
        raise ModelFileError("the tokenizer model's merges must be pairs of pieces") from None
    build = tokenizers.models.BPE
    try:
        return build(names, pairs, **habits)  # it says what is no pair
    except Exception:
        # Nearly always there is none, and looking for them first takes a fifth of the time.
        others = [pair for pair in pairs if private.keys().isdisjoint((*pair, "".join(pair)))]
        if len(others) == len(pairs):
            raise
    return build(names, others, **habits)


def _model(
    model: dict[str, Any], renamed: dict[str, int], private: dict[str, str]
) -> tokenizers.models.Model:
    """Return the library's model of tokens that have these names.

    As objects: writing and reading a vocabulary as JSON takes three times as long.
    """
    kind = model.get("type", "BPE")
    habits = {name: model[name] for name in _HABITS[kind] if model.get(name) is not None}
    unknown = model.get("unk_token")
    unknown = private.get(unknown, unknown) if isinstance(unknown, str) else None
    if kind == "Unigram":
        names = {number: name for name, number in renamed.items()}
        scored = [(names[i], float(score)) for i, (_, score) in enumerate(model["vocab"])]
        return tokenizers.models.Unigram(scored, unk_id=model.get("unk_id"), **habits)
    if kind == "WordPiece":
        if unknown not in renamed:
            raise ModelFileError("the unknown token is not in the vocabulary")
        return tokenizers.models.WordPiece(renamed, unk_token=unknown, **habits)
    return _bpe(model["merges"], renamed, private, unk_token=unknown, **habits)


def new_library(
    spec: dict[str, Any],
    pieces: Sequence[str | None],
    added: list[dict[str, Any]],
    private: dict[str, str],
) -> tokenizers.Tokenizer:
    """Return the library's tokenizer, control tokens renamed.

    Left out: decoder and post-processor (ours to do), truncation, padding, sampling (they would
    change the ids), and merges that would make a control token of text.

    Args:
        spec: the contents of a tokenizer.json.
        pieces: its vocabulary by id, None where an id has no piece.
        added: its added tokens.
        private: new names of control tokens, by the old ones.

    Raises:
        ModelFileError: tokens contradict each other, the merges are no pairs, the normalizer would
            change a control token, or the library refuses them.
    """
    renamed = _renamed(pieces, added, private)
    steps = {
        "version": "1.0",
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": spec.get("pre_tokenizer"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        library = tokenizers.Tokenizer(_model(spec["model"], renamed, private))
        cutting = tokenizers.Tokenizer.from_str(json.dumps(steps))
        for part in ("normalizer", "pre_tokenizer"):
            if (step := getattr(cutting, part)) is not None:
                setattr(library, part, step)
        # After the normalizer: some of them are looked for in normalized text.
        library.add_tokens([_added_token(t, private) for t in added])
        library.encode("a b", add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit, ModelFileError):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        raise ModelFileError(
            f"the tokenizers library refuses this tokenizer: {first_line(error)}"
        ) from error
    for token in added:
        content, name = token["content"], private.get(token["content"], token["content"])
        if library.token_to_id(name) != token["id"]:
            raise ModelFileError(f"the added token {content!r} does not get its id")
        # Some normalizers drop noncharacters: text could spell what is left of a private name.
        normalized = token.get("normalized") and content in private and library.normalizer
        if normalized and name not in normalized.normalize_str(name):
            raise ModelFileError(f"the normalizer changes the added token {content!r}")
    return library


def ids_of(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of a text; other threads run meanwhile. Raises ValueError if it fails."""
    try:
        # ``encode`` notes where each token stood, which takes as long as the ids themselves, and
        # keeps the interpreter until it has them all.
        (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        raise ValueError(f"the tokenizer fails on this text: {first_line(error)}") from None
    return ids


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line."""
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
