"""The vocabulary of a tokenizer.json: checked, and the bytes that its pieces stand for.

Knows nothing of files and needs no library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ridgeline.model.files.tensors import ModelFileError

_MAX_IDS = 1 << 21
_MODELS = ("BPE", "WordPiece", "Unigram")


def checked(spec: dict[str, Any]) -> tuple[list[str | None], list[dict[str, Any]]]:
    """Return the pieces by id, None where an id has none, and the added tokens.

    What only encoding needs of a vocabulary is checked by ``library.new_library``.

    Raises:
        ModelFileError: the model is not supported, or its tokens contradict each other.
    """
    model, added = spec.get("model"), spec.get("added_tokens") or []
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in _MODELS:
        supported = ", ".join(_MODELS)
        raise ModelFileError(f"the tokenizer model is {kind!r:.40}; supported: {supported}")
    pieces = {"BPE": _of_bpe, "WordPiece": _of_wordpiece, "Unigram": _of_unigram}[kind](model)
    if not isinstance(added, list) or not all(
        isinstance(t, dict) and isinstance(t.get("content"), str) and t["content"] for t in added
    ):
        raise ModelFileError("added_tokens must be a list of tokens with content")
    _check_ids({t["content"]: t.get("id") for t in added})
    once = len({t["content"] for t in added}) == len({t["id"] for t in added}) == len(added)
    ids = [(t["id"], t["content"]) for t in added if t["id"] < len(pieces)]
    if not once or any(pieces[i] not in (None, content) for i, content in ids):
        raise ModelFileError("two tokens have the same id, or an added token stands twice")
    return pieces, added


def _of_bpe(model: dict[str, Any]) -> list[str | None]:
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ModelFileError("BPE with subword prefixes or word suffixes is not supported")
    if not isinstance(model.get("merges"), list):
        raise ModelFileError("the tokenizer model needs vocab (an object) and merges (a list)")
    return _of_wordpiece(model)


def _of_wordpiece(model: dict[str, Any]) -> list[str | None]:
    vocab = model.get("vocab")
    if isinstance(vocab, list) and set(map(type, vocab)) == {str}:  # what GGUF says
        return vocab
    if not isinstance(vocab, dict) or not vocab:
        raise ModelFileError("the tokenizer model needs vocab (an object)")
    return _by_id(vocab)


def _of_unigram(model: dict[str, Any]) -> list[str | None]:
    vocab, unknown = model.get("vocab"), model.get("unk_id")
    if not isinstance(vocab, list) or not vocab or not all(map(_is_scored, vocab)):
        raise ModelFileError("the tokenizer model needs vocab (a list of pieces with scores)")
    if type(unknown) is not int or not 0 <= unknown < len(vocab):
        raise ModelFileError(f"the unknown token's id {unknown!r:.40} is not in the vocabulary")
    return [piece for piece, _ in vocab]


def _is_scored(entry: Any) -> bool:
    """Return whether an entry of Unigram's vocabulary is a piece with its log probability."""
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    piece, score = entry
    return isinstance(piece, str) and type(score) in (int, float) and math.isfinite(score)


def _by_id(vocab: Mapping[str, Any]) -> list[str | None]:
    """Return the pieces of a vocabulary by id, None where an id has none."""
    _check_ids(vocab)
    pieces: list[str | None] = [None] * (max(vocab.values()) + 1)
    for piece, number in vocab.items():
        pieces[number] = piece
    if len(pieces) - pieces.count(None) < len(vocab):
        raise ModelFileError("two tokens have the same id")
    return pieces


def _check_ids(ids: Mapping[str, Any]) -> None:
    """Raise ModelFileError for a token whose id is not an id."""
    for piece, number in ids.items():
        if type(number) is not int or not 0 <= number < _MAX_IDS:
            raise ModelFileError(f"token {piece[:40]!r} has the id {number!r:.40}")


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a pipeline part: of its sequence, or itself."""
    if not isinstance(part, dict):
        return []
    steps = part.get(key) if part.get("type") == "Sequence" else [part]
    return [s for s in steps if isinstance(s, dict)] if isinstance(steps, list) else []


def ids_behind(spec: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that the post-processor of a tokenizer.json puts behind a single text.

    Raises:
        ModelFileError: it cannot be read.
    """
    ids: list[Any] = []
    try:
        for step in _steps(spec.get("post_processor"), "processors"):
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                ids = [step["sep"][1]]
            elif step["type"] == "TemplateProcessing":
                parts = step["single"]
                whole = ["Sequence" in part for part in parts].index(True)
                names = [part["SpecialToken"]["id"] for part in parts[whole + 1 :]]
                ids = [number for name in names for number in step["special_tokens"][name]["ids"]]
    except (KeyError, IndexError, TypeError, ValueError):
        raise ModelFileError("the post-processor is not one that can be read") from None
    _check_ids({f"{number!r:.20}, behind a text,": number for number in ids})
    return tuple(ids)


class VocabularyReader(NamedTuple):
    """How pieces become text.

    Attributes:
        strips: whether a text loses its first space.
        gap: what stands between text and a control token that is shown.
        bytes_of: returns the bytes that a piece stands for.
    """

    strips: bool
    gap: bytes
    bytes_of: Callable[[str], bytes]


def reader(spec: dict[str, Any]) -> VocabularyReader:
    """Return how the decoder of a tokenizer.json turns pieces into text.

    Raises:
        ModelFileError: the decoder is not supported.
    """
    steps = {str(step.get("type")): step for step in _steps(spec.get("decoder"), "decoders")}
    metaspace, replace = steps.get("Metaspace", {}), steps.get("Replace", {})
    if "ByteLevel" in steps:
        return VocabularyReader(False, b"", _byte_level_bytes)
    if "WordPiece" in steps:
        step = steps["WordPiece"]
        prefix, cleanup = step.get("prefix", "##"), step.get("cleanup", True)
        return VocabularyReader(True, b" ", lambda piece: _word_bytes(piece, prefix, cleanup))
    if metaspace.get("replacement") == "▁":
        scheme = metaspace.get("prepend_scheme", "always")
        strip = scheme != "never" and metaspace.get("add_prefix_space") is not False
    elif replace.get("pattern") == {"String": "▁"}:
        strip = "Strip" in steps
    else:
        raise ModelFileError(
            f"the tokenizer's decoder is {[*steps]!r:.80}; supported: ByteLevel, WordPiece, "
            "Metaspace with '▁', Replace of '▁'"
        )
    falls_back = "ByteFallback" in steps
    bytes_by_name = {f"<0x{b:02X}>": bytes([b]) for b in range(256)} if falls_back else {}

    def bytes_of(piece: str) -> bytes:
        return bytes_by_name.get(piece) or piece.replace("▁", " ").encode()

    return VocabularyReader(strip, b"", bytes_of)


# What the library's clean-up makes of one word with the space before it; words have none inside.
_TIGHT = {f" {mark}": mark for mark in (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")}


def _word_bytes(piece: str, prefix: str, cleanup: bool) -> bytes:
    """Return the text of a WordPiece: what continues a word, or a space and the word."""
    if prefix and piece.startswith(prefix):
        return piece.removeprefix(prefix).encode()
    word = f" {piece}"
    if cleanup:
        for space, tight in _TIGHT.items():
            word = word.replace(space, tight)
    return word.encode()


def _byte_alphabet() -> dict[int, int]:
    """Return GPT-2's alphabet for the 256 bytes: code point to byte, for ``str.translate``.

    Printable Latin-1 stands for itself, the others in order for U+0100 and on. A character outside
    of the alphabet becomes, or is, one beyond Latin-1.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {256 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not in the alphabet: the piece means itself, as in the library
        return piece.encode()
