"""What a step's draws are told, and what they say: a table with one entry for each.

It knows arrays, no kernels: those are in ``draw``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.memory import address
from ridgeline.backends.sampling import Row, log_sum_exp, ranked, rule
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import TokenLogprobs

# An entry's words, of 64 bits each. Addresses: ``history`` and ``suppressed`` of i32, ``biases`` of
# (i64, f64), ``top`` of ``num_top`` pairs (i32 id, f32 logit). ``num_top`` is -1 where nobody wants
# log-probabilities. Without ``draws`` the token is given. The last five are what it says; ``token``
# is -1 where no token may be chosen.
DRAW = (
    "row", "draws", "seed", "position", "factor", "top_k", "share", "least",
    "history", "history_len", "prompt_len", "repetition", "frequency", "presence",
    "biases", "num_biases", "suppressed", "num_suppressed", "num_top", "top",
    "token", "value", "greatest", "total", "ahead",
)  # fmt: skip
_FLOATS = ("factor", "repetition", "frequency", "presence", "value", "greatest")
_TYPE_OF = {"seed": "<u8", "share": "<u8", **dict.fromkeys(_FLOATS, "<f8")}
ENTRY = np.dtype([(name, _TYPE_OF.get(name, "<i8")) for name in DRAW])
_PAIR = np.dtype([("id", "<i4"), ("logit", "<f4")])
_BIAS = np.dtype([("id", "<i8"), ("bias", "<f8")])
_RESULTS = ["token", "value", "greatest", "total", "ahead"]

LOGIT_ROWS = 64  # most rows of logits at once that rank a prompt
BLOCK_LOGITS = 512  # of a row, that ``draw`` walks through together

Entry = tuple[float, ...]


def scratch_bytes(vocab_size: int) -> dict[str, int]:
    """Return the bytes of each buffer that a thread needs."""
    padded = padded_vocab(vocab_size)
    return {
        "draw_cells": 64,
        "draw_peaks": padded // 32 * 4,
        "draw_sums": (padded // BLOCK_LOGITS + 1) * 8,
        "draw_ids": padded * 4 + 64,
        "draw_values": padded * 4 + 64,
        "draw_weights": padded * 8 + 128,
        "draw_counts": vocab_size * 4,  # zero between draws
        "draw_undo": 3 * vocab_size * 8,
    }


def padded_vocab(vocab_size: int) -> int:
    """Return the logits of a row, whole blocks."""
    return -(-vocab_size // BLOCK_LOGITS) * BLOCK_LOGITS


class Draws:
    """The table of one step, while it is filled, and what it says afterwards.

    Entries of one row of logits follow each other and belong to one thread, for penalties change
    the row while they are drawn.
    """

    def __init__(self, vocab_size: int) -> None:
        """Begin empty."""
        self._vocab_size = vocab_size
        self._entries: list[Entry] = []
        self._bounds: list[int] = []
        self._tops: list[int] = []
        self._num_pairs = 0
        self._tokens = array("i")  # histories and suppressed ids, one after another
        self._biases: list[tuple[int, float]] = []

    @property
    def num_rows(self) -> int:
        """Rows of logits that are drawn from."""
        return len(self._bounds)

    def add(self, rows: Sequence[Row], num_top: int | None) -> int:
        """Draw once for each of ``rows``, which differ in seed; return their row of logits."""
        params, prompt_len, suppressed = rows[0].sampling
        first = len(self._tokens)
        self._tokens.extend(rows[0].history)
        history_len = len(self._tokens) - first
        num_suppressed = len(suppressed) if rows[0].suppresses else 0
        if num_suppressed:
            self._tokens.extend(suppressed)
        first_bias = len(self._biases)
        if params.logit_bias:
            self._biases.extend(params.logit_bias.items())
        factor, top_k, share, least = _rule(
            params.temperature, params.top_k, params.top_p, params.min_p
        )
        top_k = 0 if top_k >= self._vocab_size > 1 else top_k
        place = self._next_row()
        for row in rows:
            self._entries.append((
                place, 1, row.seed & 0xFFFFFFFFFFFFFFFF, row.position,
                factor, top_k, share, least, 4 * first, history_len, prompt_len,
                params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
                16 * first_bias, len(self._biases) - first_bias,
                4 * (first + history_len), num_suppressed,
                *self._top(num_top), -1, 0.0, 0.0, 0, 0,
            ))  # fmt: skip
        return place

    def rank(self, token: int, num_top: int) -> int:
        """Rank a token that is known; return its row of logits."""
        place = self._next_row()
        self._entries.append((place, *[0] * 17, *self._top(num_top), token, 0.0, 0.0, 0, 0))
        return place

    def _next_row(self) -> int:
        self._bounds.append(len(self._entries))
        return len(self._bounds) - 1

    def _top(self, num_top: int | None) -> tuple[int, int]:
        """Return ``num_top`` and where its pairs go."""
        begin = self._num_pairs
        self._tops.append(min(num_top or 0, self._vocab_size))
        self._num_pairs += self._tops[-1]
        return (-1, 0) if num_top is None else (self._tops[-1], 8 * begin)

    def table(self) -> NDArray[np.void]:
        """Return the entries; what they point to stays as long as this object."""
        table = np.array(self._entries, ENTRY)
        self._token_memory = np.frombuffer(self._tokens or array("i", [0]), np.int32)
        self._bias_memory = np.array(self._biases, _BIAS)
        self._pairs = np.zeros(self._num_pairs + 1, _PAIR)
        for names, memory in (
            (("history", "suppressed"), self._token_memory),
            (("biases",), self._bias_memory),
            (("top",), self._pairs),
        ):
            for name in names:
                table[name] += address(memory)
        self._table = table
        return table

    def bounds(self) -> NDArray[np.int32]:
        """Return the first entry of each row of logits, and the end of them all; kept likewise."""
        self._ends = np.array([*self._bounds, len(self._entries)], np.int32)
        return self._ends

    def results(self) -> list[tuple[int | None, TokenLogprobs | None]]:
        """Return each entry's token and its log-probabilities, if they were wanted."""
        found: list[tuple[int | None, TokenLogprobs | None]] = []
        if not self._entries:
            return found
        pairs: list[tuple[int, float]] = self._pairs.tolist()  # type: ignore[assignment]
        begin = 0
        wants = self._table["num_top"].tolist()
        for i, (token, value, greatest, total, ahead) in enumerate(self._table[_RESULTS].tolist()):
            top = pairs[begin : begin + self._tops[i]]
            begin += self._tops[i]
            if token < 0 or wants[i] < 0:
                found.append((None if token < 0 else token, None))
                continue
            is_finite = math.isfinite(greatest) and total > 0
            norm = log_sum_exp(greatest, total) if is_finite else math.nan
            top.sort(key=lambda pair: (-pair[1], pair[0]))
            found.append((token, ranked(token, value, ahead, norm, top)))
        return found


@lru_cache(maxsize=256)
def _rule(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, int, int, int]:
    return rule(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
