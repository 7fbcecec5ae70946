"""What the tokens before a draw ask of it: DRY's penalties, and bad words that are nearly there.

Short lists, in plain Python, for every backend: they depend on the history of one row alone. Ids
are the model's own; what texts mean in ids was decided at the edge (``core.step.TokenRules``).
"""

from __future__ import annotations

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import TokenRules

_MOST = 1024  # tokens: a longer repeat counts as so long; and places that are looked at

Ids = tuple[int, ...]


def repeats(
    history: Ids, params: SamplingParams, rules: TokenRules
) -> tuple[tuple[int, float], ...]:
    """Return tokens that would go on with a repeat, and what DRY subtracts from their logits.

    Of the places where the end of the text stood before, the longest match counts for the token
    that followed there: ``multiplier * base ** (length - allowed_length)``, multiplied out one
    factor after the other, so that it is the same number on any machine. (Weidmann, 2024; see
    ``SamplingParams``.) The time is linear in the tokens that are looked at.
    """
    last_n = params.dry_penalty_last_n
    window = history if last_n < 0 else history[-last_n:]
    longest = _unbroken(window, rules)
    if longest < params.dry_allowed_length:
        return ()
    lengths = _matches(window[::-1], longest)
    repeated = {token: n for token, n in lengths.items() if n >= params.dry_allowed_length}
    amounts = [float(params.dry_multiplier)]
    for _ in range(max(repeated.values(), default=0) - params.dry_allowed_length):
        amounts.append(amounts[-1] * params.dry_base)
    return tuple((token, amounts[n - params.dry_allowed_length]) for token, n in repeated.items())


def _unbroken(window: Ids, rules: TokenRules) -> int:
    """Return how many tokens at the end no breaker parts, at most ``_MOST``."""
    limit = min(len(window), _MOST)
    breakers, runs = rules.breakers, rules.break_runs
    if not breakers and not runs:
        return limit
    for count in range(limit):
        end = len(window) - count
        last = window[end - 1]
        if has(breakers, last):
            return count
        if any(window[max(0, end - len(run)) : end] == run for run in runs.get(last, ())):
            return count
    return limit


def has(ids: bytes, token: int) -> bool:
    """Return whether a set of ids, a bit for each, has a token."""
    return token >> 3 < len(ids) and bool(ids[token >> 3] >> (token & 7) & 1)


def _matches(text: Ids, max_length: int) -> dict[int, int]:
    """Return, by the token that followed, how much of the end of a text stood before.

    Args:
        text: the tokens, the last one first.
        max_length: lengths end here.

    Only places where the last token stood are looked at, the nearest first, with the rule of the Z
    algorithm (Main and Lorentz, 1984): what lies in a match that is known is not compared again.
    """
    length_at: dict[int, int] = {}
    lengths: dict[int, int] = {}
    place = left = right = 0
    for _ in range(min(text.count(text[0]) - 1, _MOST)):
        place = text.index(text[0], place + 1)
        length = min(length_at.get(place - left, 0), right - place) if place < right else 0
        if place + length >= right:
            limit = min(max_length, len(text) - place)
            while length < limit and text[length] == text[place + length]:
                length += 1
            left, right = place, place + length
        length_at[place] = length
        lengths[text[place - 1]] = max(length, lengths.get(text[place - 1], 0))
    return lengths


def forbidden(history: Ids, prompt_len: int, rules: TokenRules) -> Ids:
    """Return the tokens that would complete a bad word; the word begins in the answer."""
    tokens = list(rules.banned)
    answer_len = len(history) - prompt_len
    if answer_len > 0:
        for word in rules.bad.get(history[-1], ()):
            begun = len(word) - 1
            if begun <= answer_len and history[-begun:] == word[:-1]:
                tokens.append(word[-1])
    return tuple(dict.fromkeys(tokens))
