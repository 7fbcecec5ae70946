"""The tokenizers library's BPE for a tokenizer.json, with control tokens under private names.

Building one takes a third of a start, so it waits for the first text. Knows nothing of files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import tokenizers

from ridgeline.models.tensors import ModelFileError

_SURROGATE = re.compile("[\ud800-\udfff]")
_HABITS = ("fuse_unk", "byte_fallback", "ignore_merges")  # of BPE, besides what we set
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
        found = next(number for piece, number in ids.items() if _SURROGATE.search(piece))
        raise ModelFileError(f"token {found} has a lone surrogate") from None
    return ids


def new_library(
    spec: dict[str, Any],
    pieces: Sequence[str | None],
    added: list[dict[str, Any]],
    private: dict[str, str],
) -> tokenizers.Tokenizer:
    """Return the library's tokenizer, control tokens renamed.

    Left out: decoder and post-processor (ours to do), truncation, padding, dropout (they would
    change the ids), and merges that would make a control token of text.

    Args:
        spec: the contents of a tokenizer.json.
        pieces: its vocabulary by id, None where an id has no piece.
        added: its added tokens.
        private: new names of control tokens, by the old ones.

    Raises:
        ModelFileError: tokens contradict each other, the merges are no pairs, or the library
            refuses them.
    """
    renamed = _renamed(pieces, added, private)
    model = spec["model"]
    try:
        pairs = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
        wholes = [left + right for left, right in pairs]
    except (TypeError, ValueError):
        raise ModelFileError("the tokenizer model's merges must be pairs of pieces") from None
    # Nearly always there is none, and asking for all at once takes a quarter of the time.
    if not private.keys().isdisjoint(chain(chain.from_iterable(pairs), wholes)):
        both = zip(pairs, wholes, strict=True)
        pairs = [pair for pair, whole in both if private.keys().isdisjoint((*pair, whole))]
    unknown = model.get("unk_token")
    habits = {name: model[name] for name in _HABITS if model.get(name) is not None}
    steps = {
        "version": "1.0",
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": spec.get("pre_tokenizer"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        # As objects: writing and reading a vocabulary as JSON takes three times as long.
        unknown = private.get(unknown, unknown) if isinstance(unknown, str) else None
        bpe = tokenizers.models.BPE(renamed, pairs, unk_token=unknown, **habits)
        library = tokenizers.Tokenizer(bpe)
        cutting = tokenizers.Tokenizer.from_str(json.dumps(steps))
        for part in ("normalizer", "pre_tokenizer"):
            if (step := getattr(cutting, part)) is not None:
                setattr(library, part, step)
        # After the normalizer: some of them are looked for in normalized text.
        library.add_tokens([_added_token(t, private) for t in added])
        library.encode("a b", add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        line = str(error).partition("\n")[0][:200]
        raise ModelFileError(f"the tokenizers library refuses this tokenizer: {line}") from error
    for token in added:
        if library.token_to_id(private.get(token["content"], token["content"])) != token["id"]:
            raise ModelFileError(f"the added token {token['content']!r} does not get its id")
    return library
