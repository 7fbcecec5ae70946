"""JSON that repeats itself: a constraint around another one, which ends lists and objects that do.

A grammar allows elements without end and does not know what has come, so small models write one and
the same for ever. Where the last elements of a list, or names of an object, are a few that have
come again and again, no comma may follow; where brackets are nested very deep, none may open. Only
the form itself can ask for more: if it leaves nothing else, as with ``minItems``, all goes on.
Elements that differ may be any number. Of a token only its text is known here.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import NamedTuple

from ridgeline.core.request import Constraint
from ridgeline.text.messages.message import MessageForm, MessageReader

LEAST_TIMES = 8  # a repeat is none before it has come so often,
LEAST_CHARS = 512  # and has taken this many characters: a row of zeros may be meant
MOST_APART = 16  # elements after which the first comes again
MOST_NESTED = 64  # brackets; few programs read more than about a hundred

_SPACE = " \n\r\t"


class _Open:
    """A list or an object that is open.

    Its units are the elements of a list, and the names of an object. By how many units apart equal
    ones are, ``runs`` has how many units have repeated one before, without a break, and ``sizes``
    the characters of these elements or members.
    """

    def __init__(self, start: int, is_object: bool) -> None:
        self.start, self.is_object = start, is_object  # where the unit begins in the text
        self.name: str | None = None  # of the member that is being read
        self.last: list[str] = []  # units, the last one first
        self.runs, self.sizes = [0] * MOST_APART, [0] * MOST_APART
        self.longest = 0  # of the runs

    def add(self, unit: str, num_chars: int) -> None:
        for i in range(MOST_APART):
            is_equal = i < len(self.last) and self.last[i] == unit
            self.runs[i] = self.runs[i] + 1 if is_equal else 0
            self.sizes[i] = self.sizes[i] + num_chars + 1 if is_equal else 0
        self.last = [unit, *self.last[: MOST_APART - 1]]
        self.longest = max(self.runs)

    def is_full(self, unit: str) -> bool:
        """Whether it ends with one more unit, if that is this one."""
        return any(
            earlier == unit and self._would_be_full(i, len(unit), 0)
            for i, earlier in enumerate(self.last)
        )

    def is_near(self, num_begun: int, num_chars: int) -> bool:
        """Whether it may be full behind the unit that is begun, or within ``num_chars`` more."""
        if self.longest + num_chars < LEAST_TIMES - 2:  # so it is with nearly every token
            return False
        return any(
            self._would_be_full(i, len(earlier) + num_begun, num_chars)
            for i, earlier in enumerate(self.last)
        )

    def _would_be_full(self, i: int, unit_chars: int, num_chars: int) -> bool:
        least = (LEAST_TIMES - 1) * (i + 1)
        num_repeated = self.runs[i] + 1 + num_chars
        return num_repeated >= least and self.sizes[i] + unit_chars + num_chars >= LEAST_CHARS


class JsonRepeats:
    """Reads one JSON value as it is written, without white space."""

    def __init__(self) -> None:
        """Begin before the value."""
        self._chars: list[str] = []
        self._open: list[_Open] = []
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> None:
        """Read on."""
        for char in text:
            if self._in_string:
                self._read_in_string(char)
            elif char not in _SPACE:
                self._read(char)

    def _read_in_string(self, char: str) -> None:
        self._chars.append(char)
        if self._is_escaped:
            self._is_escaped = False
        else:
            self._is_escaped, self._in_string = char == "\\", char != '"'

    def _read(self, char: str) -> None:
        top = self._open[-1] if self._open else None
        if char in "]}" and top:
            self._open.pop()
        elif char == "," and top:
            top.add(self._unit(top, ""), len(self._chars) - top.start)
            top.name = None
        elif char == ":" and top and top.is_object:
            top.name = self._unit(top, "")
        self._chars.append(char)
        if char in "[{":
            self._open.append(_Open(len(self._chars), char == "{"))
        elif char == "," and top:
            top.start = len(self._chars)
        self._in_string = char == '"'

    def _unit(self, one: _Open, more: str) -> str:
        """Return the unit that ``one`` is at, with ``more`` text behind what has come."""
        if one.name is not None:
            return one.name
        return "".join(self._chars[one.start :]) + more

    def is_near(self, text: str = "") -> bool:
        """Whether behind ``text`` something may be ruled out."""
        depth = len(self._open) + text.count("[") + text.count("{")
        if depth >= MOST_NESTED or len(text) >= LEAST_CHARS:
            return True
        num_now = len(self._chars)
        return any(one.is_near(num_now - one.start, len(text)) for one in self._open)

    def rules_out(self, text: str) -> bool:
        """Return whether ``text`` must not follow, for its first comma or a bracket."""
        depth, in_string, is_escaped, more = len(self._open), self._in_string, self._is_escaped, ""
        for char in text:
            if in_string:
                more += char
                in_string, is_escaped = is_escaped or char != '"', char == "\\" and not is_escaped
                continue
            if char in "[{":
                depth += 1
                if depth > MOST_NESTED:
                    return True
            elif char in "]}":
                depth -= 1
                if not depth:
                    return False
            elif char == "," and 0 < depth <= len(self._open):
                one = self._open[depth - 1]
                return one.is_full(self._unit(one, more))
            more += char if char not in _SPACE else ""
            in_string = char == '"'
        return False


class JsonTokens(NamedTuple):
    """The tokens of a vocabulary that may begin something in JSON, or end it.

    Attributes:
        breaks: those with a comma or an opening bracket, and their texts.
        closing: those that begin with a closing bracket, but for white space.
        blank: those of white space alone.
    """

    breaks: list[tuple[int, str]]
    closing: list[int]
    blank: list[int]


def json_tokens(texts: Iterable[str]) -> JsonTokens:
    """Return those among tokens of these texts, in the order of their ids."""
    breaks, closing, blank = list[tuple[int, str]](), list[int](), list[int]()
    for i, text in enumerate(texts):
        if "," in text or "[" in text or "{" in text:
            breaks.append((i, text))
        if text.lstrip(_SPACE)[:1] in ("]", "}"):
            closing.append(i)
        elif text and not text.strip(_SPACE):
            blank.append(i)
    return JsonTokens(breaks, closing, blank)


class EndingRepeats:
    """A ``core.request.Constraint`` around another, of an answer that is JSON or has some in it."""

    def __init__(
        self,
        inner: Constraint,
        spell: Callable[[int], bytes],
        tokens: JsonTokens,
        form: MessageForm | None = None,
        *,
        has_json: bool = True,
    ) -> None:
        """Watch an answer that keeps to ``inner``.

        Args:
            inner: the constraint.
            spell: returns the bytes of a token.
            tokens: those that matter.
            form: of a message whose calls are read; None where all of the answer is JSON.
            has_json: whether the message's text is JSON, too.
        """
        self._inner, self._spell, self._tokens = inner, spell, tokens
        self._form, self._has_json = form, has_json
        self._reader = MessageReader(form) if form else None
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._json = JsonRepeats()

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return self._inner.is_over

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        """Return a mask for the next token, and behind each draft (see ``num_valid``)."""
        first, *others = self._inner.masks(drafts)
        return (self._without_repeats(first) if self._json.is_near() else first, *others)

    def _without_repeats(self, mask: bytes) -> bytes:
        left, can_close = bytearray(mask), any(_is_set(mask, i) for i in self._tokens.closing)
        for token, text in self._tokens.breaks:
            is_needed = not can_close and text.lstrip(_SPACE).startswith(",")
            if _is_set(mask, token) and not is_needed and self._json.rules_out(text):
                left[token // 8] ^= 1 << token % 8
        solid = bytearray(left)
        for token in self._tokens.blank:
            if _is_set(solid, token):
                solid[token // 8] ^= 1 << token % 8
        return bytes(left) if any(solid) else mask

    def forced(self, most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that must follow, if they can be known."""
        tokens = self._inner.forced(most)
        return tokens[: self._num_far(tokens)]

    def num_valid(self, drafts: tuple[int, ...]) -> int:
        """Return how many of these tokens may follow: none where a repeat may end behind one."""
        return self._inner.num_valid(drafts[: self._num_far(drafts)])

    def _num_far(self, tokens: tuple[int, ...]) -> int:
        text = b"".join(map(self._spell, tokens)).decode(errors="replace")
        return 0 if self._json.is_near(text) else len(tokens)

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._inner.accept(token)
        text = self._decoder.decode(self._spell(token))
        if self._reader is None:
            self._json.feed(text)
            return
        for kind, piece in self._reader.feed(text):
            if kind == "call":
                self._json = JsonRepeats()
            elif kind == "arguments" or (kind == "content" and self._has_json):
                self._json.feed(piece)

    def fork(self) -> EndingRepeats:
        """Return another that has come as far, for an answer with the same beginning."""
        form, has_json = self._form, self._has_json
        other = EndingRepeats(
            self._inner.fork(), self._spell, self._tokens, form, has_json=has_json
        )
        memo = {id(one): one for one in (form.tools, form.reasoning)} if form else {}
        other._reader, other._json = deepcopy((self._reader, self._json), memo)
        other._decoder.setstate(self._decoder.getstate())
        return other


def _is_set(mask: bytes | bytearray, token: int) -> bool:
    at = token // 8
    return at < len(mask) and bool(mask[at] >> token % 8 & 1)
