"""Which tokenizers take time and memory in proportion to a text, as their parts show; and the rest.

Those are built and used in this process. All others run in one of their own, which may be stopped
(``text.tokenizers.process``): the cost of an unknown pattern is not known without running it.
"""

from __future__ import annotations

import math
import struct
import threading
from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ridgeline.model.files.gguf.pre_tokenizers import SPLITS
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.system.process import BUSY_TIMES, Child, Overdue

_PROGRAM = Path(__file__).with_name("process.py")
_MAX_BUILDING_S, _MAX_ENCODING_S = 10.0, 6.0  # of computing, as the process has it
# How many characters of text one character may become: the most of what real ones do is some 60.
_MOST_GROWTH = 256
_MOST_DEPTH = 4
_MOST_PIECE_CHARS = 1024  # of Unigram, whose time is a text's length times a piece's
_MOST_WORD_CHARS = 1024  # of WordPiece, whose time is the square of a word's length
_MOST_ADDED_CHARS = 1 << 18  # of all added tokens; looking for them takes memory for each
# How many characters one becomes at most: Unicode's decompositions have up to 18, and lower case 3.
_GROWTH = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Strip": 1, "StripAccents": 1,
    "Nmt": 1, "BertNormalizer": 12, "ByteLevel": 4,
}  # fmt: skip
_PLAIN_CUTS = (
    "ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace", "Punctuation",
    "Digits", "UnicodeScripts", "CharDelimiterSplit",
)  # fmt: skip
# Patterns that were looked at: none repeats what repeats, and none looks back.
_KNOWN_PATTERNS = frozenset(one for patterns in SPLITS.values() for one in patterns) | {
    " {2,}", r"\s+", r"\s+$", r"^\s+", r"\d", r"\d+", r"\p{N}", r"\p{N}{1,3}", r"[0-9]", "\n",
    r"[^\S\n]+", r"\d{1,3}", r"[\r\n]", r" ",
}  # fmt: skip


def is_bounded(
    spec: dict[str, Any], pieces: Sequence[str | None], added: list[dict[str, Any]]
) -> bool:
    """Return whether the parts of a tokenizer.json show that its time and memory are bounded.

    What cannot be read is not: then the library says what is wrong, where it can be stopped.
    """
    try:
        growth = math.prod(map(_growth, _flat(spec.get("normalizer"), "normalizers")))
        cuts = _flat(spec.get("pre_tokenizer"), "pretokenizers")
        return (
            growth <= _MOST_GROWTH
            and all(map(_is_plain_cut, cuts))
            and _is_plain_model(spec["model"], pieces)
            and sum(len(token["content"]) for token in added) <= _MOST_ADDED_CHARS
        )
    except (LookupError, TypeError, ValueError, AttributeError, struct.error):
        return False


def _flat(part: Any, key: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, those of sequences in their order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    if depth == _MOST_DEPTH:
        raise ValueError("sequences of sequences")
    for step in part[key]:
        yield from _flat(step, key, depth + 1)


def _growth(step: dict[str, Any]) -> float:
    """Return how many characters a step may make of one; infinity where it cannot be told."""
    kind = step["type"]
    if kind == "Replace":
        return _replaced(step["pattern"], step["content"])
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest_of_charsmap(b64decode(step["precompiled_charsmap"], validate=True))
    return _GROWTH.get(kind, math.inf)


def _replaced(pattern: dict[str, str], content: str) -> float:
    if "Regex" in pattern:
        return max(1, len(content)) if pattern["Regex"] in _KNOWN_PATTERNS else math.inf
    return (
        max(1, math.ceil(len(content) / len(pattern["String"]))) if pattern["String"] else math.inf
    )


def _longest_of_charsmap(data: bytes) -> float:
    """Return the most characters that a precompiled map puts in place of some.

    It is a trie, its length before it, then texts that end with a zero byte.
    """
    (trie_bytes,) = struct.unpack_from("<I", data)
    if trie_bytes % 4 or trie_bytes + 4 > len(data):
        return math.inf
    return max(1, *map(len, data[4 + trie_bytes :].split(b"\0")))


def _is_plain_cut(step: dict[str, Any]) -> bool:
    if step["type"] != "Split":
        return step["type"] in _PLAIN_CUTS
    pattern = step["pattern"]
    return bool(pattern.get("String")) or pattern.get("Regex") in _KNOWN_PATTERNS


def _is_plain_model(model: dict[str, Any], pieces: Sequence[str | None]) -> bool:
    kind = model.get("type", "BPE")
    if kind == "WordPiece":
        return bool(model.get("max_input_chars_per_word", 100) <= _MOST_WORD_CHARS)
    return kind != "Unigram" or max(map(len, filter(None, pieces))) <= _MOST_PIECE_CHARS


class Apart:
    """A tokenizer in a process of its own, with limits on its time and memory. Thread-safe."""

    def __init__(
        self,
        spec: dict[str, Any],
        pieces: Sequence[str | None],
        added: list[dict[str, Any]],
        private: dict[str, str],
    ) -> None:
        """Build it. Raises ModelFileError if it is refused, or takes more than it may."""
        model = spec["model"]
        if isinstance(model, dict) and model.get("type") != "Unigram":
            model = {key: value for key, value in model.items() if key != "vocab"}
        needed = {key: spec.get(key) for key in ("normalizer", "pre_tokenizer")} | {"model": model}
        self._lock, self._is_built = threading.Lock(), False
        self._child = Child(_PROGRAM, lambda: [needed, pieces, added, private])
        try:
            self.ids_of("a b")
        except ValueError as error:
            raise ModelFileError(str(error)) from None

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises ValueError if it takes more time or memory than it may: then the next text waits
        until the tokenizer is built again. Raises ChildProcessError if it cannot be any more, or
        not in time: the machine is too busy.
        """
        with self._lock:
            limit_s = _MAX_ENCODING_S if self._child.is_running else _MAX_BUILDING_S
            try:
                answer: dict[str, Any] | None = self._child.ask(text, BUSY_TIMES * limit_s)
            except ChildProcessError as error:
                if self._child.has_started or isinstance(error, Overdue):
                    raise ChildProcessError(f"texts cannot be read now: {error}") from None
                raise ValueError(f"the tokenizer fails: {error}") from None
        if answer is None:
            raise ValueError(
                f"the tokenizer fails: it takes more time or memory than any needs, for a text of "
                f"{len(text):,} characters"
            )
        if "error" in answer:
            raise ValueError(answer["error"])
        ids: list[int] = answer["ids"]
        return ids
