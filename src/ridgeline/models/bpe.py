"""The tokenizers library's BPE for a tokenizer.json, with control tokens under private names.

It checks nothing that ``tokenizer.py`` has checked, and knows neither files nor what ids mean.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import tokenizers

from ridgeline.models.weights import ModelFileError

_HABITS = ("fuse_unk", "byte_fallback", "ignore_merges")  # of BPE, besides what is ours to decide
_MARKS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


def _added_token(token: dict[str, Any], private: dict[str, str]) -> tokenizers.AddedToken:
    marks = {name: token[name] for name in _MARKS if name in token}
    return tokenizers.AddedToken(private.get(token["content"], token["content"]), **marks)


def new_library(
    spec: dict[str, Any],
    model: dict[str, Any],
    vocab: dict[str, int],
    added: list[dict[str, Any]],
    private: dict[str, str],
) -> tokenizers.Tokenizer:
    """Return the library's tokenizer, control tokens renamed.

    Left out: decoder and post-processor (ours to do), truncation, padding, dropout (they would
    change the ids), and merges that would make a control token of text.

    Args:
        spec: the contents of a tokenizer.json.
        model: its model, a BPE.
        vocab: ids by piece.
        added: its added tokens.
        private: new names of control tokens, by the old ones.

    Raises:
        ModelFileError: the merges are no pairs, or the library refuses what it is given.
    """
    try:
        pairs = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
        wholes = [left + right for left, right in pairs]
    except (TypeError, ValueError):
        raise ModelFileError("the tokenizer model's merges must be pairs of pieces") from None
    # Nearly always none, and to ask for all at once takes a quarter of the time.
    if not private.keys().isdisjoint(chain(chain.from_iterable(pairs), wholes)):
        both = zip(pairs, wholes, strict=True)
        pairs = [pair for pair, whole in both if private.keys().isdisjoint((*pair, whole))]
    renamed = dict(vocab)
    for token in added:
        renamed.pop(token["content"], None)
        renamed[private.get(token["content"], token["content"])] = token["id"]
    unknown = model.get("unk_token")
    habits = {name: model[name] for name in _HABITS if model.get(name) is not None}
    steps = {
        "version": "1.0",
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": spec.get("pre_tokenizer"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        # As objects: to write and read a vocabulary as JSON takes three times as long.
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
    except BaseException as error:  # the library's panics are no Exceptions
        line = str(error).partition("\n")[0][:200]
        raise ModelFileError(f"the tokenizers library refuses this tokenizer: {line}") from error
    for token in added:
        if library.token_to_id(private.get(token["content"], token["content"])) != token["id"]:
            raise ModelFileError(f"the added token {token['content']!r} does not get its id")
    return library
