"""Grammars: what an answer may look like, as masks over the vocabulary.

Beside ``text.grammar_process`` the only importer of llguidance. A grammar is compiled in that
process first, which may take too long or die; what came back whole is compiled here. Each answer
gets a copy, which advances with its tokens. It knows nothing of requests.
"""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ridgeline.text.child import Child
from ridgeline.text.grammar_error import GrammarError
from ridgeline.text.grammar_process import LIMITS, Vocabulary
from ridgeline.text.tokenizer import Tokenizer

_PROGRAM = Path(__file__).with_name("grammar_process.py")
_KEPT_BYTES = 4 << 20  # of sources whose grammars are kept


class Source(NamedTuple):
    """A grammar as it is compiled: ``kind`` is json, regex, lark or grammar (of any notation).

    ``options`` are the library's for a JSON schema, as JSON. ``frame`` is a grammar in Lark's
    notation around it, which calls it ``@body``.
    """

    kind: str
    text: str
    options: str = "{}"
    frame: str = ""


class Grammars:
    """Compiles grammars for one model. Any thread may call; one call is served at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        *,
        max_bytes: int = 64 << 10,
        timeout_s: float = 2.0,
    ) -> None:
        """Prepare to constrain answers that end with any of ``eos_ids``.

        A grammar may have ``max_bytes`` of text and take ``timeout_s`` to compile. Raises
        ValueError for a model without an end-of-sequence token: its answers could not end.
        """
        if not eos_ids:
            raise ValueError("this model has no end-of-sequence token, so no grammar can end")
        self._tokenizer, self._eos_ids = tokenizer, list(eos_ids)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[Source, LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._child = Child(_PROGRAM, self._greeting)
        self._library: LLTokenizer | None = None

    def constraint(self, source: Source) -> Callable[[], GrammarState]:
        """Return what begins an answer. Raises GrammarError, with the reason, if nothing can."""
        num_bytes = _size(source)
        if num_bytes > self._max_bytes:
            raise GrammarError(
                f"the grammar has {num_bytes} bytes: at most {self._max_bytes} "
                f"(--max-grammar-bytes)",
                "too_long",
            )
        with self._lock:
            if source not in self._kept:
                self._kept[source] = self._compiled(source)
                self._kept_bytes += num_bytes
                while self._kept_bytes > _KEPT_BYTES:
                    self._kept_bytes -= _size(self._kept.popitem(last=False)[0])
            self._kept.move_to_end(source)
            matcher = self._kept[source].deep_copy()
        eos_ids = frozenset(self._eos_ids)
        return lambda: GrammarState(matcher.deep_copy(), eos_ids)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._child.close()

    def _compiled(self, source: Source) -> LLMatcher:
        asked = {**source._asdict(), "options": json.loads(source.options)}
        try:
            answer: dict[str, str] | None = self._child.ask(asked, self._timeout_s)
        except ChildProcessError as error:
            raise ValueError(f"grammars cannot be compiled: {error}") from None
        if answer is None:
            raise GrammarError(
                f"the grammar takes more than {self._timeout_s:g} s or 1 GiB to compile", "too_slow"
            )
        if "error" in answer:
            raise GrammarError(answer["error"], "invalid")
        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self._tokens(), answer["grammar"], log_level=0, limits=limits)

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
        if self._library is None:
            tokenizer = self._tokenizer

            def encode(text: str) -> list[int]:
                return tokenizer.encode(text, parse_special=False, add_bos=False)

            vocabulary = Vocabulary(*self._facts(), self._eos_ids[0], encode)
            self._library = LLTokenizer(
                TokenizerWrapper(vocabulary), n_vocab=tokenizer.vocab_size, eos_token=self._eos_ids
            )
        return self._library


class GrammarState:
    """How far one answer has come: a ``core.request.Constraint``."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        """Begin with a matcher of its own."""
        self._matcher, self._eos_ids = matcher, eos_ids

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        """Return a mask for the next token, and behind each draft; what fails allows nothing."""
        masks = [_mask(self._matcher)]
        ahead = self._matcher.deep_copy()  # what fails behind a draft is no fault of the answer
        for draft in drafts:
            if draft in self._eos_ids or not ahead.validate_tokens([draft]):
                break
            ahead.consume_token(draft)
            masks.append(_mask(ahead))
        masks += [masks[-1]] * (len(drafts) + 1 - len(masks))  # behind one that cannot be right
        return tuple(masks)

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
        return GrammarState(self._matcher.deep_copy(), self._eos_ids)


def _mask(matcher: LLMatcher) -> bytes:
    """Return a bit for each token that may come next: none if the library fails, here or before.

    It says so only afterwards. The mask that it returns then would let the answer end.
    """
    mask: bytes = matcher.compute_bitmask()
    return b"\0" if matcher.is_error() else mask


def _size(source: Source) -> int:
    return len((source.text + source.frame).encode("utf-8", errors="surrogatepass"))
