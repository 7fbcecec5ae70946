"""Grammars: what an answer may look like, as masks over the vocabulary.

Beside ``text.grammar.process`` the only importer of llguidance. A grammar is compiled in that
process first, which may take too long or die; what came back whole is compiled here. Each answer
gets a copy, which advances with its tokens. It knows nothing of requests.

Grammars are kept by the memory that they take: what the process measured, and what answers add,
since copies share what the library finds out on the way.
"""

from __future__ import annotations

import json
import os
import threading
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ridgeline.system.process import BUSY_TIMES, Children
from ridgeline.text.grammar import GrammarError, NotCached
from ridgeline.text.grammar.process import LIMITS, Vocabulary
from ridgeline.text.json_schema import WHITESPACE
from ridgeline.text.tokenizers.tokenizer import Tokenizer

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_KNOWS_PAGES = hasattr(resource, "RUSAGE_THREAD")  # of one thread: on Linux
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if _KNOWS_PAGES else 0
_PROGRAM = Path(__file__).with_name("process.py")
_CACHE_BYTES = 32 << 20  # of memory
_LEAST_BYTES = 1 << 12  # of an entry, an error among them
_UNKNOWN_BYTES = 1 << 20  # where the process cannot measure


class Source(NamedTuple):
    """A grammar as it is compiled: ``kind`` is json, regex, lark or grammar (of any notation).

    Attributes:
        kind: the notation.
        text: the grammar.
        whitespace: of a JSON schema: the regular expression of white space, empty for none.
        frame: a grammar in Lark's notation around it, which calls it ``@body``.
        schemas: what the frame calls ``@s0``, ``@s1`` and so on (``messages.tool_grammar``), as a
            list in JSON.
    """

    kind: str
    text: str
    whitespace: str = WHITESPACE
    frame: str = ""
    schemas: str = ""


class Grammars:
    """Compiles grammars for one model. Any thread may call; what is kept waits for no compiling."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        *,
        max_bytes: int = 64 << 10,
        timeout_s: float = 2.0,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to constrain answers that end with any of ``eos_ids``.

        A grammar may have ``max_bytes`` of text and take ``timeout_s`` of a processor to compile,
        however long that is on a machine that has more to do. ``give_back``
        returns freed memory to the system. Raises ValueError for a model without an
        end-of-sequence token: its answers could not end.
        """
        if not eos_ids:
            raise ValueError("this model has no end-of-sequence token, so no grammar can end")
        self._tokenizer, self._eos_ids = tokenizer, list(eos_ids)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._give_back = give_back
        self._lock = threading.Lock()  # around the cache, never for longer than a moment
        self._grammars: OrderedDict[Source, _Grammar] = OrderedDict()
        self._freed_bytes = 0  # since it was given back
        self._children = Children(_PROGRAM, self._greeting)
        self._building = threading.Lock()
        self._library: LLTokenizer | None = None

    def constraint(self, source: Source, *, may_compile: bool = True) -> NewState:
        """Return what begins an answer. Raises GrammarError, with the reason, if nothing can.

        Raises NotCached if it had to be compiled and must not be (``may_compile``).
        """
        num_bytes = _size(source)
        if num_bytes > self._max_bytes:
            raise GrammarError(
                f"the grammar has {num_bytes} bytes: at most {self._max_bytes} "
                f"(--max-grammar-bytes)",
                "too_long",
            )
        grammar = self._lookup(source)
        if grammar is None:
            if not may_compile:
                raise NotCached
            grammar = self._compiled(source)
            self._store(source, grammar)
        matcher = grammar.matcher
        if isinstance(matcher, GrammarError):
            raise GrammarError(str(matcher), matcher.reason)  # not itself: it would keep traces
        return NewState(matcher, frozenset(self._eos_ids), grammar)

    def close(self) -> None:
        """End the processes, if there are such."""
        self._children.close()

    @property
    def cached_bytes(self) -> int:
        """The memory that cached grammars take, as far as it is known."""
        with self._lock:
            return sum(one.num_bytes for one in self._grammars.values())

    def _lookup(self, source: Source) -> _Grammar | None:
        with self._lock:
            if source in self._grammars:
                self._grammars.move_to_end(source)
            return self._grammars.get(source)

    def _store(self, source: Source, grammar: _Grammar) -> None:
        """Keep a grammar, and no longer those that were used longest ago if it is too much."""
        with self._lock:
            self._grammars[source] = grammar
            num_bytes = sum(one.num_bytes for one in self._grammars.values())  # they may have grown
            while num_bytes > _CACHE_BYTES:
                freed = self._grammars.popitem(last=False)[1].num_bytes
                num_bytes -= freed
                self._freed_bytes += freed
            is_much = self._freed_bytes > _CACHE_BYTES // 4
            if is_much:
                self._freed_bytes = 0
        if is_much:
            self._give_back()

    def _compiled(self, source: Source) -> _Grammar:
        """Return a grammar, or why it is none.

        Raises GrammarError if it takes too long, and ChildProcessError if nothing can be compiled,
        or not in time: the machine is too busy.
        """
        request = {**source._asdict(), "schemas": json.loads(source.schemas or "[]")}
        request["limit_s"], limit_s = self._timeout_s, BUSY_TIMES * self._timeout_s
        try:
            answer: dict[str, Any] | None = self._children.ask(request, limit_s)
        except ChildProcessError as error:
            raise ChildProcessError(f"grammars cannot be compiled now: {error}") from None
        if answer is None:
            raise GrammarError(
                f"the grammar takes more than {self._timeout_s:g} s of computing or 1 GiB to "
                "compile (--grammar-timeout)",
                "too_slow",
            )
        least_bytes = _LEAST_BYTES + _size(source)
        if "error" in answer:
            return _Grammar(GrammarError(answer["error"], "invalid"), least_bytes)
        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(self._tokens(), answer["grammar"], log_level=0, limits=limits)
        built_bytes = least_bytes + (answer["built_bytes"] or _UNKNOWN_BYTES)
        return _Grammar(matcher, built_bytes, answer["mask_bytes"], tuple(answer["ignored"]))

    # --- the vocabulary ------------------------------------------------------------------------

    def _facts(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of each token, and the ids that are no text."""
        tokenizer = self._tokenizer
        ids = range(tokenizer.vocab_size)
        special = [token for token in ids if tokenizer.is_special(token)]
        return [tokenizer.token_bytes(token) for token in ids], special

    def _greeting(self) -> dict[str, Any]:
        """Return what the process must know before the first grammar."""
        tokens, special = self._facts()
        return {
            "tokens": [b64encode(token).decode() for token in tokens],
            "special_ids": special,
            "eos_ids": self._eos_ids,
        }

    def _tokens(self) -> LLTokenizer:
        tokenizer = self._tokenizer

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, parse_special=False, add_bos=False)

        with self._building:
            if self._library is None:
                vocabulary = Vocabulary(*self._facts(), self._eos_ids[0], encode)
                self._library = LLTokenizer(
                    TokenizerWrapper(vocabulary),
                    n_vocab=tokenizer.vocab_size,
                    eos_token=self._eos_ids,
                )
            return self._library


class _Grammar:
    """A grammar in the cache, or why it is none, and the memory that it takes.

    Attributes:
        grown_bytes: what masks have added.
        ignored: paths of what its schemas say and it does not hold to.
    """

    def __init__(
        self,
        matcher: LLMatcher | GrammarError,
        built_bytes: int,
        mask_bytes: int = 0,
        ignored: tuple[str, ...] = (),
    ) -> None:
        """Keep what takes ``built_bytes``, and ``mask_bytes`` more with its first mask."""
        self.matcher, self.ignored = matcher, ignored
        self._built_bytes, self._mask_bytes, self.grown_bytes = built_bytes, mask_bytes, 0

    @property
    def num_bytes(self) -> int:
        return self._built_bytes + max(self._mask_bytes, self.grown_bytes)


@dataclass(frozen=True, slots=True)
class NewState:
    """What begins an answer."""

    matcher: LLMatcher
    eos_ids: frozenset[int]
    grammar: _Grammar

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of what the grammar's schemas say and it does not hold to."""
        return self.grammar.ignored

    def __call__(self) -> GrammarState:
        """Begin one."""
        return GrammarState(self.matcher.deep_copy(), self.eos_ids, self.grammar)


class GrammarState:
    """How far one answer has come: a ``core.request.Constraint``."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], grammar: _Grammar) -> None:
        """Begin with a matcher of its own, a copy of that of the cached ``grammar``."""
        self._matcher, self._eos_ids, self._grammar = matcher, eos_ids, grammar

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        """Return a mask for the next token, and behind each draft; what fails allows nothing."""
        before = _touched_bytes()
        masks = [_mask(self._matcher)]
        if drafts:
            self._add_masks_behind(drafts, masks)
        self._grammar.grown_bytes += _touched_bytes() - before
        return tuple(masks)

    def _add_masks_behind(self, drafts: tuple[int, ...], masks: list[bytes]) -> None:
        ahead = self._matcher.deep_copy()  # what fails behind a draft is no fault of the answer
        for draft in drafts:
            if draft in self._eos_ids or not ahead.validate_tokens([draft]):
                break
            ahead.consume_token(draft)
            masks.append(_mask(ahead))
        masks += [masks[-1]] * (len(drafts) + 1 - len(masks))  # behind one that cannot be right

    def forced(self, most: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens that must follow, if they can be known."""
        return tuple(self._matcher.compute_ff_tokens()[:most])

    def num_valid(self, drafts: tuple[int, ...]) -> int:
        """Return how many of these tokens may follow, one after the other."""
        return self._matcher.deep_copy().validate_tokens(list(drafts))

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._matcher.consume_token(token)

    def fork(self) -> GrammarState:
        """Return another that has come as far, for an answer with the same beginning."""
        return GrammarState(self._matcher.deep_copy(), self._eos_ids, self._grammar)


def _touched_bytes() -> int:
    """Return the memory that this thread was the first to touch; 0 where that is not known.

    So is all that the process grows by; memory that was freed and is used again is not.
    """
    return _PAGE_BYTES * resource.getrusage(resource.RUSAGE_THREAD).ru_minflt if _KNOWS_PAGES else 0


def _mask(matcher: LLMatcher) -> bytes:
    """Return a bit for each token that may come next: none if the library fails, here or before.

    It says so only afterwards. The mask that it returns then would let the answer end.
    """
    mask: bytes = matcher.compute_bitmask()
    return b"\0" if matcher.is_error() else mask


def _size(source: Source) -> int:
    text = source.text + source.frame + source.schemas
    return len(text.encode("utf-8", errors="surrogatepass"))
