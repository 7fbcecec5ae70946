"""What sampling parameters say of tokens, from texts to a model's own ids.

The core and the backends know nothing of text: which tokens are bad words, which break what DRY
takes for repeated, and which are allowed, is decided here, once for each request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import TokenRules
from ridgeline.text.tokenizers.tokenizer import Tokenizer

_MOST_NARROWED = 256  # candidates: each is compared with each
_BETWEEN = b"\xff"  # stands in no text, so nothing is found across two tokens

Ids = tuple[int, ...]


class Lexicon:
    """The texts of a tokenizer's tokens, and which of them a text concerns."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...], vocab_size: int) -> None:
        """Take the tokenizer, the ids that end a text, and how many ids the model has.

        The texts of all tokens are made when they are first needed.
        """
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._breakers = lru_cache(maxsize=32)(self._find_breakers)

    def rules(self, params: SamplingParams, *, narrows: bool = False) -> TokenRules:
        """Return what ``params`` say of tokens; with ``narrows`` also for ``sampler.rule``.

        Raises ValueError, which begins with the field at fault, for a text that is none, if no
        token is left that may begin the answer, and with ``narrows`` if more can than are compared.
        """
        if narrows and not 1 <= params.top_k <= _MOST_NARROWED:
            raise ValueError(f"samplers names infill, which needs top_k from 1 to {_MOST_NARROWED}")
        words = self._spellings(params.bad_words)
        self._check_some_left(params, words)
        breakers: bytes = b""
        runs: dict[int, tuple[Ids, ...]] = {}
        if params.uses_dry:
            breakers, runs = self._breakers(tuple(params.dry_sequence_breakers))
        return TokenRules(
            allowed=_bits(params.allowed_token_ids or ()),
            banned=tuple(word[0] for word in words if len(word) == 1),
            bad=_grouped((word for word in words if len(word) > 1), key=-2),
            breakers=breakers,
            break_runs=runs,
            texts=self._pieces if narrows else (),
            ends=(*self._eos_ids, *params.stop_token_ids) if narrows else (),
        )

    def _check_some_left(self, params: SamplingParams, words: list[Ids]) -> None:
        left = dict.fromkeys(params.allowed_token_ids or ())
        if not left:
            return
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids))
        taken = {
            "bad_words": [word[0] for word in words if len(word) == 1],
            "min_tokens": ends if params.min_tokens else (),
        }
        for field, tokens in taken.items():
            left = {token: None for token in left if token not in tokens}
            if not left:
                raise ValueError(
                    f"allowed_token_ids has only tokens that {field} excludes: allow more"
                )

    def _spellings(self, texts: Iterable[str]) -> list[Ids]:
        """Return the tokens of texts, each as it begins a text and as it follows a space."""
        spellings: dict[Ids, None] = {}
        for text in texts:
            bare = text.lstrip(" ") or text
            for spelling in (bare, f" {bare}"):
                ids = tuple(self._tokenizer.encode(spelling, add_bos=False))
                if ids:
                    spellings[ids] = None
        return list(spellings)

    def _find_breakers(self, texts: tuple[str, ...]) -> tuple[bytes, dict[int, tuple[Ids, ...]]]:
        runs = (ids for ids in self._spellings(texts) if len(ids) > 1)
        tokens = {token: None for text in texts for token in self._tokens_with(text.encode())}
        return _bits(tokens), _grouped(runs, key=-1)

    def _tokens_with(self, text: bytes) -> Iterator[int]:
        """Yield the tokens whose texts have ``text`` in them."""
        joined, starts = self._texts
        at = joined.find(text)
        while at >= 0:
            token = bisect_right(starts, at) - 1
            yield token
            at = joined.find(text, starts[token + 1])

    @cached_property
    def _pieces(self) -> tuple[bytes, ...]:
        """The text of each token, none of control tokens and of ids that the tokenizer lacks."""
        tokenizer = self._tokenizer
        pieces = tuple(
            b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        )
        return pieces + (b"",) * (self._vocab_size - len(pieces))

    @cached_property
    def _texts(self) -> tuple[bytes, list[int]]:
        """The texts of all tokens, one after another, and where each begins."""
        tokens = range(self._tokenizer.vocab_size)
        texts = [self._tokenizer.token_bytes(token) + _BETWEEN for token in tokens]
        return b"".join(texts), [0, *accumulate(map(len, texts))]


def _grouped(runs: Iterable[Ids], key: int) -> dict[int, tuple[Ids, ...]]:
    """Return runs of tokens by one of their tokens."""
    groups: dict[int, tuple[Ids, ...]] = {}
    for ids in runs:
        groups[ids[key]] = (*groups.get(ids[key], ()), ids)
    return groups


def _bits(tokens: Iterable[int]) -> bytes:
    """Return a set of ids as ``TokenRules`` has it."""
    ids = list(tokens)
    bits = bytearray(max(ids, default=-1) // 8 + 1)
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)
