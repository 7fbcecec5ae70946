"""The table of a step's draws: parameters in, results out, one entry for each.

It knows nothing of kernels: those are in ``emit.draw``. Between two steps the processor's caches
hold weights, so entries are packed with ``struct``: every numpy function that must be loaded again
costs more.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.sampler.rule import WEIGHT_BITS, Row, Rule, log_sum_exp, ranked, rule
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import TokenLogprobs

# An entry's words, of 64 bits each, with how ``struct`` spells them. Addresses: ``history`` and
# ``suppressed`` of i32, ``biases`` of (i64, f64), ``top`` of ``num_top`` pairs (i32 id, f32 logit),
# ``mask`` of a bit for each id, 0 if there is none.
# ``depth`` is how far below the greatest logit ``least`` lies. ``num_top`` is -1 if
# log-probabilities are not needed. Without ``draws`` the token is given. The last six are results;
# ``token`` is -1 where no token may be chosen, and logits below ``lowest`` would not change it, nor
# would they if they were lower still.
_WORDS = {
    "row": "q", "draws": "q", "seed": "Q", "position": "q",
    "factor": "d", "top_k": "q", "share": "Q", "least": "q",
    "typical": "Q", "sigmas": "d", "chance": "q", "threshold": "Q", "depth": "d",
    "repetition": "d", "frequency": "d", "presence": "d",
    "history_len": "q", "prompt_len": "q", "num_biases": "q", "num_suppressed": "q", "num_top": "q",
    "history": "q", "biases": "q", "suppressed": "q", "top": "q", "mask": "q",
    "token": "q", "value": "d", "greatest": "d", "total": "q", "ahead": "q", "lowest": "d",
}  # fmt: skip
ENTRY = tuple(_WORDS)
ENTRY_BYTES = 8 * len(ENTRY)
_ENTRY, _RESULT = Struct("<" + "".join(_WORDS.values())), Struct("<qddqqd")
_RESULT_AT = ENTRY_BYTES - _RESULT.size
_BIAS, _PAIR = Struct("<qd"), Struct("<if")
_NO_RESULT = (0.0, 0.0, 0, 0, 0.0)
BLOCK_LOGITS = 512  # logits of a row that ``emit.draw`` reads together


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
        "draw_undo": 6 * vocab_size * 8,  # one for each kind of change
        "draw_masked": padded * 4 + 64,
    }


def padded_vocab(vocab_size: int) -> int:
    """Return the logits of a row, whole blocks."""
    return -(-vocab_size // BLOCK_LOGITS) * BLOCK_LOGITS


class _GrowingBuffer:
    """Bytes that kernels read, which grow as they are needed."""

    def __init__(self) -> None:
        self._take(4096)

    def _take(self, num_bytes: int) -> None:
        array: NDArray[np.uint8] = aligned(num_bytes, np.uint8)
        self.view, self.address = array.data, address(array)  # the view keeps the array

    def hold(self, num_bytes: int) -> None:
        """Make room; the old content is lost if it has to grow."""
        if num_bytes > len(self.view):
            self._take(2 * num_bytes)


class Draws:
    """The table of one step, while it is filled and when it holds results; used again.

    Entries of one row of logits follow each other and belong to one thread, because penalties
    change the row during the draw.
    """

    def __init__(self, vocab_size: int) -> None:
        """Begin empty."""
        self._vocab_size = vocab_size
        self._table, self._bounds, self._tokens, self._biases, self._pairs, self._mask_bytes = (
            _GrowingBuffer() for _ in range(6)
        )
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self._entries: list[tuple[tuple[float, ...], tuple[int, ...], int, int]] = []
        self._firsts: list[int] = []
        self._token_ids = array("i")  # histories and suppressed ids, one after another
        self._bias_pairs: list[tuple[int, float]] = []
        self._num_pairs = 0
        self._masks: list[bytes] = []
        self._needs_all = False  # logits, whatever they are

    @property
    def arrays(self) -> list[NDArray[np.uint8]]:
        """All memory that is kept from step to step."""
        parts = (self._table, self._bounds, self._tokens, self._biases, self._pairs)
        return [np.frombuffer(part.view, np.uint8) for part in (*parts, self._mask_bytes)]

    @property
    def num_rows(self) -> int:
        """Rows of logits that are drawn from."""
        return len(self._firsts)

    @property
    def is_bounded(self) -> bool:
        """Whether there is a single draw, which depends on a few of the likeliest tokens alone."""
        return len(self._entries) == 1 and not self._needs_all

    def add(self, rows: Sequence[Row], num_top: int | None) -> int:
        """Draw once for each of ``rows``, which differ in seed; return their row of logits."""
        (params, prompt_len, suppressed, _), _, _, history, _, banned, repeats = rows[0]
        tokens, biases = self._token_ids, self._bias_pairs
        history = history if params.penalises else ()
        places = 4 * len(tokens), 16 * len(biases), 4 * (len(tokens) + len(history))
        tokens.extend(history)
        num_biases, num_suppressed = len(repeats), len(banned)
        biases.extend((token, -amount) for token, amount in repeats)
        if params.logit_bias:
            num_biases += len(params.logit_bias)
            biases.extend(params.logit_bias.items())
        if rows[0].suppresses:
            num_suppressed += len(suppressed)
            tokens.extend(suppressed)
        tokens.extend(banned)
        how = _rule(
            params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p,
            params.top_n_sigma, params.xtc_probability, params.xtc_threshold,
        )  # fmt: skip
        if how.top_k >= self._vocab_size:
            how = how._replace(top_k=0)
        num_top = -1 if num_top is None else min(num_top, self._vocab_size)
        amounts = [amount for _, amount in biases[len(biases) - num_biases :]]
        self._needs_all |= num_top >= 0 or not (_looks_at_few(how) and _lowers(params, amounts))
        row_of_logits = self._next_row()
        mask = -1
        if rows[0].mask:
            mask = len(self._masks)
            self._masks.append(rows[0].mask)
        for row in rows:
            entry = (
                row_of_logits, 1, row.seed & 0xFFFFFFFFFFFFFFFF, row.position, *how, _depth(how),
                params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
                len(history), prompt_len, num_biases, num_suppressed, num_top,
            )  # fmt: skip
            self._enter(entry, places, mask, -1)
        return row_of_logits

    def rank(self, token: int, num_top: int) -> int:
        """Rank a token that is known; return its row of logits."""
        self._needs_all = True
        row_of_logits = self._next_row()
        entry = (row_of_logits, *[0] * 19, min(num_top, self._vocab_size))
        self._enter(entry, (0, 0, 0), -1, token)
        return row_of_logits

    def _next_row(self) -> int:
        self._firsts.append(len(self._entries))
        return len(self._firsts) - 1

    def _enter(
        self, entry: tuple[float, ...], places: tuple[int, ...], mask: int, token: int
    ) -> None:
        self._entries.append((entry, (*places, 8 * self._num_pairs), mask, token))
        self._num_pairs += max(int(entry[-1]), 0)

    def write(self) -> tuple[int, int]:
        """Write the table; return its address, and that of the list of each row's first entry.

        That list (i32) ends with the number of entries.
        """
        count = len(self._entries)
        self._table.hold(count * ENTRY_BYTES)
        self._pairs.hold(8 * self._num_pairs)
        _write_array(self._bounds, array("i", [*self._firsts, count]))
        _write_array(self._tokens, self._token_ids)
        self._biases.hold(16 * len(self._bias_pairs))
        for i, bias in enumerate(self._bias_pairs):
            _BIAS.pack_into(self._biases.view, 16 * i, *bias)
        bases = [part.address for part in (self._tokens, self._biases, self._tokens, self._pairs)]
        masks = self._write_masks()
        at = 0
        for entry, places, mask, token in self._entries:
            addresses = [base + place for base, place in zip(bases, places, strict=True)]
            addresses.append(masks[mask] if mask >= 0 else 0)
            _ENTRY.pack_into(self._table.view, at, *entry, *addresses, token, *_NO_RESULT)
            at += ENTRY_BYTES
        return self._table.address, self._bounds.address

    def _write_masks(self) -> list[int]:
        """Write all masks, each as long as a padded row; return their addresses."""
        size = padded_vocab(self._vocab_size) // 8
        self._mask_bytes.hold(size * len(self._masks))
        for i, mask in enumerate(self._masks):
            self._mask_bytes.view[size * i : size * (i + 1)] = mask[:size].ljust(size, b"\0")
        return [self._mask_bytes.address + size * i for i in range(len(self._masks))]

    def results(self) -> list[tuple[int | None, TokenLogprobs | None]]:
        """Return each entry's token and its log-probabilities, if they were wanted."""
        results: list[tuple[int | None, TokenLogprobs | None]] = []
        at = _RESULT_AT
        for entry, places, _, _ in self._entries:
            token, value, greatest, total, ahead, _ = _RESULT.unpack_from(self._table.view, at)
            at += ENTRY_BYTES
            num_top = int(entry[-1])
            if token < 0 or num_top < 0:
                results.append((None if token < 0 else token, None))
                continue
            is_finite = math.isfinite(greatest) and total > 0
            norm = log_sum_exp(greatest, total) if is_finite else math.nan
            begin = places[-1]
            part = self._pairs.view[begin : begin + 8 * num_top]
            top = sorted(_PAIR.iter_unpack(part), key=lambda pair: (-pair[1], pair[0]))
            results.append((token, ranked(token, value, ahead, norm, top)))
        return results


def _looks_at_few(rule: Rule) -> bool:
    """Whether a draw depends on the likeliest tokens alone: a few, or all from a weight on."""
    by_weight = rule.least > 1 and not (rule.share or rule.typical)
    return (rule.top_k > 0 or by_weight) and not rule.sigmas


def _lowers(params: SamplingParams, biases: Sequence[float]) -> bool:
    """Whether penalties and biases leave each logit where it is, or lower it."""
    lowers = params.repetition_penalty >= 1
    lowers &= params.frequency_penalty >= 0 and params.presence_penalty >= 0
    return lowers and max(biases, default=0.0) <= 0


def _depth(rule: Rule) -> float:
    """Return how far below the greatest logit a logit's weight falls below ``least``.

    It is larger than that by what rounding may take; infinite where each weight counts.
    """
    if rule.least <= 1:
        return math.inf
    return (WEIGHT_BITS - math.log2(rule.least) + 1e-6) / rule.factor


def _write_array(memory: _GrowingBuffer, values: array[int]) -> None:
    content = values.tobytes()
    memory.hold(len(content))
    memory.view[: len(content)] = content


@lru_cache(maxsize=256)
def _rule(
    temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float,
    top_n_sigma: float, xtc_probability: float, xtc_threshold: float,
) -> Rule:  # fmt: skip
    return rule(
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p,
            top_n_sigma=top_n_sigma, xtc_probability=xtc_probability, xtc_threshold=xtc_threshold,
        )
    )  # fmt: skip
