"""Text to token ids and back, from a tokenizer.json or from GGUF metadata.

The ``tokenizers`` library cuts text into ids. This module keeps apart what the library mixes up:
text that merely spells a control token, and the control token itself. Going back, it works on the
exact bytes that each token stands for, so that streamed text equals whole text by construction.
It knows nothing of models, requests or templates.

How the two are kept apart: inside the library each control token is renamed to a spelling made of
Unicode noncharacters that text cannot guess. ``encode(parse_special=True)`` turns public spellings
into private ones first; without that step a control token cannot come out of any text. Where a text
spells control tokens is found in time that grows with the text, however many there are: a pattern
that lists them all would be compiled for seconds, and try each of them at each place.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
import stat
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any

from ridgeline.model.files.gguf.tokenizer import tokenizer_json
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.text.tokenizers.cost_check import Apart, is_bounded
from ridgeline.text.tokenizers.vocabulary import checked, ids_behind, reader

_MOST_CHARS = 256  # of one; real ones have some 30
_MAX_FILE_BYTES = 128 << 20  # the largest in use today have 35 MB
# Noncharacters (U+FDD0..U+FDEF) are Unicode's own "never interchanged, for internal use".
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_BREAK = "\ufdd0"  # stands inside a spelling that is text
# Begins the private name of a control token. Drawn again in each process, so no text has it.
_PRIVATE = "".join(chr(secrets.choice(range(0xFDD2, 0xFDF0))) for _ in range(16))


class Spellings:
    """Some tokens' spellings, found in texts."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """Take them. Raises ModelFileError for one that is longer than any control token."""
        self._sorted = sorted(set(spellings))
        self._longest = max(map(len, self._sorted), default=0)
        if self._longest > _MOST_CHARS:
            raise ModelFileError(
                f"a control token has {self._longest:,} characters: at most {_MOST_CHARS} are taken"
            )
        firsts = "".join(sorted({spelling[0] for spelling in self._sorted}))
        self._firsts = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")

    def replaced(self, text: str, names: Mapping[str, str], unless_before: str = "") -> str:
        """Return a text with names in place of spellings, from the left, the longest that fits.

        One that stands right before ``unless_before`` does not count.
        """
        parts, done = list[str](), 0
        for place in self._places(text):
            if place >= done and (spelling := self._at(text, place, unless_before)):
                parts += (text[done:place], names[spelling])
                done = place + len(spelling)
        return "".join(parts) + text[done:]

    def starts(self, text: str) -> list[int]:
        """Return, in order, every place where a spelling begins, overlapping ones too.

        One may also begin at the end, and be completed by what follows the text.
        """
        places = {place for place in self._places(text) if self._at(text, place)}
        body = text.rstrip()  # a template may trim, so that its own text follows the last character
        for place in range(max(0, len(body) - self._longest), len(body)):
            end = body[place:]
            after = bisect_left(self._sorted, end)
            if after < len(self._sorted) and self._sorted[after].startswith(end):
                places.add(place)
        return sorted(places)

    def _places(self, text: str) -> Iterator[int]:
        return (match.start() for match in self._firsts.finditer(text))

    def _at(self, text: str, place: int, unless_before: str = "") -> str:
        """Return the longest spelling that begins at a place; "" if none does."""
        ahead = text[place : place + self._longest]
        while ahead:
            # Of all that are sorted before what is there, the last has most in common with it.
            spelling = self._sorted[bisect_right(self._sorted, ahead) - 1]
            if not ahead.startswith(spelling):
                ahead = commonprefix([ahead, spelling]) if spelling < ahead else ""  # noqa: RUF071
            elif unless_before and text.startswith(unless_before, place + len(spelling)):
                ahead = spelling[:-1]
            else:
                return spelling
        return ""


def load_tokenizer(
    source: Path | Mapping[str, Any],
    bos_id: int | None = None,
    begin_ids: tuple[int, ...] = (),
    end_ids: tuple[int, ...] | None = None,
    eos_ids: Sequence[int] = (),
    named_in: str = "",
) -> Tokenizer:
    """Load from the path of a tokenizer.json, or from GGUF metadata (``tokenizer.ggml.*``).

    Args:
        source: the file, or the metadata.
        bos_id: token that begins a text, None where the model has none.
        begin_ids: what ``encode`` puts in front unless told otherwise.
        end_ids: what it puts behind a text unless told otherwise, None for what the source says.
        eos_ids: tokens that end an answer.
        named_in: the chat template. Added tokens that it names are control tokens, as are special
            ones, BOS and ``eos_ids``; all others, such as Gemma's ``<table>``, are text, wherever
            they stand.

    Raises:
        ModelFileError: damaged, hostile or not supported; the message says what.
    """
    if isinstance(source, Mapping):
        return Tokenizer(tokenizer_json(source), bos_id, begin_ids, end_ids, eos_ids, named_in)
    try:
        tokenizer = Tokenizer(read_spec(source), bos_id, begin_ids, end_ids, eos_ids, named_in)
        tokenizer.prepare()  # a damaged file must fail here, not at the first text
    except ModelFileError as error:
        raise ModelFileError(f"{source}: {error}") from error.__cause__
    return tokenizer


def read_spec(path: Path) -> dict[str, Any]:
    """Return the contents of a tokenizer.json of bounded size.

    Raises:
        ModelFileError: not a regular file, too large, or not a JSON object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise ModelFileError(f"not a file of at most {_MAX_FILE_BYTES >> 20} MiB")
        spec = json.loads(path.read_bytes())
    except ModelFileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot be read as JSON: {error}") from error
    if not isinstance(spec, dict):
        raise ModelFileError("does not hold a JSON object")
    return spec


class Tokenizer:
    """Text <-> token ids.

    Attributes:
        bos_id: token that begins a text, or None.
        begin_ids: what ``encode`` puts in front unless told otherwise: most often ``bos_id``.
        end_ids: what ``encode`` puts behind a text unless told otherwise: an encoder's [SEP].
        vocab_size: one more than the highest id. A model may have more rows than that.
        building: what the library's tokenizer is built in, if that is still to come.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        bos_id: int | None = None,
        begin_ids: tuple[int, ...] = (),
        end_ids: tuple[int, ...] | None = None,
        eos_ids: Sequence[int] = (),
        named_in: str = "",
    ):
        self._pieces, added = checked(spec)  # turned into bytes one by one, when asked for
        self._strip_space, self._gap, self._bytes_of = reader(spec)
        self._added = {token["id"]: token["content"].encode() for token in added}
        self.vocab_size = max([len(self._pieces) - 1, *self._added]) + 1
        for first in (*begin_ids, *([] if bos_id is None else [bos_id])):
            if not 0 <= first < self.vocab_size:
                raise ModelFileError(f"the BOS id {first} is not in the vocabulary")
        self.bos_id, self.begin_ids = bos_id, begin_ids
        self.end_ids = ids_behind(spec) if end_ids is None else end_ids
        if self.end_ids and max(self.end_ids) >= self.vocab_size:
            raise ModelFileError(f"the id {max(self.end_ids)}, behind a text, is no token")

        special = [token for token in added if token.get("special")]
        self._special_ids = frozenset(token["id"] for token in special)
        # Runs of spaces, of ▁ and of line ends are text (Gemma's are added tokens).
        roles = {bos_id, *begin_ids, *self.end_ids, *eos_ids}
        control = [
            t
            for t in added
            if t.get("special")
            or ((t["id"] in roles or t["content"] in named_in) and t["content"].strip("▁ \t\r\n"))
        ]
        if self._bytes_of("▁") == b" ":
            plain = self._added.keys() - {t["id"] for t in control}
            self._added |= {i: self._added[i].replace("▁".encode(), b" ") for i in plain}
        self._private = {t["content"]: f"{_PRIVATE}{t['id']};" for t in control}
        self._controls = Spellings(self._private)
        self._specials = Spellings(token["content"] for token in special)
        self._parts: tuple[Any, ...] = (spec, self._pieces, added, self._private)
        self._built: Callable[[str], list[int]] | None = None
        self.building: Callable[[], AbstractContextManager[object]] = nullcontext
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Build the library's tokenizer now; else the first text waits for it. Ids need none.

        Raises:
            ModelFileError: the tokenizers library refuses this tokenizer, or it takes more time
                or memory than any needs; so may ``encode``.
        """
        self._library()

    def _library(self) -> Callable[[str], list[int]]:
        """Return what gives the ids of a text: the library here, or in a process of its own."""
        with self._lock:
            if self._built is None:
                with self.building():
                    if is_bounded(*self._parts[:3]):
                        from ridgeline.text.tokenizers import library

                        self._built = partial(library.ids_of, library.new_library(*self._parts))
                    else:
                        self._built = Apart(*self._parts).ids_of
                    self._parts = ()  # a vocabulary's worth of memory
            return self._built

    def encode(
        self, text: str, *, parse_special: bool = True, add_bos: bool | None = None
    ) -> list[int]:
        """Return the ids of ``text``.

        Args:
            text: any text without lone surrogates.
            parse_special: whether the spelling of a control token is that token; otherwise it is
                text like any other.
            add_bos: whether to begin with ``begin_ids``, or with BOS where there are none (never
                doubled), and to end with ``end_ids``; None takes the model's habit.

        Raises:
            ValueError: ``text`` has a lone surrogate, or takes more time or memory than it may.
        """
        if parse_special:
            text = self._controls.replaced(text, self._private)
        return self._ids(text, add_bos) + list(self.end_ids if add_bos is not False else ())

    def shield(self, text: str, *, special_only: bool = False) -> str:
        """Return ``text`` marked so that ``encode_shielded`` takes none of it for a control token.

        Text that could become one together with the text that follows is marked too. Noncharacters
        are replaced by U+FFFD, as Unicode recommends for those that come from outside.

        Args:
            text: text from outside, about to be mixed with trusted text.
            special_only: mark only tokens that ``decode`` skips.
        """
        text = _NONCHARACTERS.sub("\ufffd", text)
        starts = (self._specials if special_only else self._controls).starts(text)
        cuts = [0, *(start + 1 for start in starts), len(text)]
        return _BREAK.join(text[a:b] for a, b in pairwise(cuts))

    @staticmethod
    def unshield(text: str) -> str:
        """Return ``text`` without the marks of ``shield``."""
        return text.replace(_BREAK, "")

    def encode_shielded(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the ids of trusted text with shielded parts: only the trusted spells control.

        Raises:
            ValueError: ``text`` has a lone surrogate.
        """
        # A token of one character has no inside for _BREAK; then _BREAK follows it.
        text = self._controls.replaced(text, self._private, unless_before=_BREAK)
        return self._ids(self.unshield(text), add_bos)

    def _ids(self, text: str, add_bos: bool | None) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate at character {error.start}") from None
        ids = self._library()(text)
        first = list(self.begin_ids if add_bos is not False else ())
        if add_bos and not first and self.bos_id is not None:
            first = [self.bos_id]
        return ids if ids[: len(first)] == first else first + ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 come out as U+FFFD."""
        decoder = self.new_decoder(skip_special=skip_special)
        return "".join(map(decoder, ids)) + decoder.flush()

    def new_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special: bool = True,
        shown: Collection[int] = (),
    ) -> Decoder:
        """Return a decoder for tokens that continue ``prompt_ids`` (its last few are enough).

        A prompt that ends inside a character is completed by the first tokens of the answer. Of
        special tokens ``shown`` are not skipped.
        """
        skipped = self._special_ids.difference(shown) if skip_special else frozenset[int]()
        tail = b""  # three bytes decide what UTF-8 may come next
        for token_id in reversed(prompt_ids):
            tail = (b"" if token_id in skipped else self.token_bytes(token_id)) + tail
            if len(tail) > 3:
                break
        return Decoder(self, skipped, tail)

    def special_id(self, spelling: str) -> int | None:
        """Return the id of the special token that is spelled so, if there is one."""
        data = spelling.encode()
        return next((token for token in self._special_ids if self._added[token] == data), None)

    def is_special(self, token_id: int) -> bool:
        """Return whether ``decode`` leaves the token out of the text."""
        return token_id in self._special_ids

    def control_id(self, spelling: str) -> int | None:
        """Return the id of the added token with this spelling, None if there is none."""
        wanted = spelling.encode()
        return next((i for i, content in self._added.items() if content == wanted), None)

    def piece(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it (``Ġis`` for " is"); None if there is none."""
        added: bytes | None = self._added.get(token_id)
        if added is not None:
            return added.decode()
        pieces: Sequence[str | None] = self._pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; ``b""`` for an id that is not a token.

        A control token stands for its spelling.
        """
        added = self._added.get(token_id)
        if added is not None or not 0 <= token_id < len(self._pieces):
            return added or b""
        return self._bytes_of(self._pieces[token_id] or "")


class Decoder:
    """Token ids in, final text out, never half a character.

    All that it returned, plus ``flush()``, is the text of all tokens given.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], before: bytes):
        self._token_bytes = tokenizer.token_bytes
        self._gap, self._controls = tokenizer._gap, tokenizer._added.keys()
        self._skipped = skipped
        self._at_start = tokenizer._strip_space and not before
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(before)
        self._is_begun = not self.is_whole  # what the text before left open

    def __call__(self, token_id: int) -> str:
        """Return the text that this token makes final; may be empty."""
        data = b"" if token_id in self._skipped else self._token_bytes(token_id)
        if self._gap and data and token_id in self._controls:
            data = self._gap + data
        if self._at_start and data:
            data = data.removeprefix(b" ")  # SentencePiece puts a space before every text
            self._at_start = False
        if self._is_begun and data:
            self._is_begun = False
            if not 0x80 <= data[0] < 0xC0:  # it does not go on: what was begun is no text of ours
                self._utf8.reset()
        return self._utf8.decode(data)

    @property
    def is_whole(self) -> bool:
        """Whether the last token ended where a character ends."""
        return not self._utf8.getstate()[0]

    def flush(self) -> str:
        """Return U+FFFD for a character that was begun here and will not end, or nothing."""
        return "" if self._is_begun else self._utf8.decode(b"", final=True)
