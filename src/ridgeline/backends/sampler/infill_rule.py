"""llama.cpp's sampler for the middle of a text (Gerganov, 2024): few tokens are left to draw from.

It ends an answer early: code that an editor shows must rather be short than wrong. A pure function
of a row's candidates, for every backend; it knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.step import TokenRules

_SHARES = 5  # a candidate with less than this part of the whole is dropped


def narrowed(
    ids: Sequence[int], weights: Sequence[int], rules: TokenRules
) -> tuple[list[int], list[int]]:
    """Return the candidates that are left, ascending, and their weights.

    If the ends together weigh more than a third of the other candidates' mean, only they stay. Else
    what begins with another candidate, or is its beginning, adds its weight to the heavier of the
    two. Of these, those with a fifth of the whole stay, and of those, those with a fair share of
    what stays. Ends stay; where nothing else does, the first of all ends is left alone.

    Args:
        ids: candidates.
        weights: of each, above 0.
        rules: texts of tokens, and which end a text.
    """
    order = sorted(zip(ids, weights, strict=True), key=lambda pair: (-pair[1], pair[0]))
    total = sum(weights)
    ends = {token: weight for token, weight in order if token in rules.ends}
    num_ends = sum(ends.values())
    if 3 * num_ends * len(order) > total - num_ends:
        return _ascending(ends)
    merged = _merged(order, rules)
    left = {i: weight for i, weight in merged.items() if i in ends or weight * _SHARES >= total}
    num_texts = len(left.keys() - ends.keys())
    if not num_texts:
        return ([rules.ends[0]], [1]) if rules.ends else _ascending(merged)
    total, share = sum(left.values()), num_texts + 1
    return _ascending({i: w for i, w in left.items() if i in ends or w * share >= total})


def _merged(order: Sequence[tuple[int, int]], rules: TokenRules) -> dict[int, int]:
    """Return candidates, heaviest first, without those whose weight another one has taken."""
    texts, left = rules.texts, dict(order)
    for first, _ in order:
        for second, _ in order:
            if first not in left:
                break
            if first == second or second not in left or not texts[first]:
                continue
            if texts[second].startswith(texts[first]):
                kept, gone = (second, first) if left[second] > left[first] else (first, second)
                left[kept] += left.pop(gone)
    return left


def _ascending(candidates: dict[int, int]) -> tuple[list[int], list[int]]:
    ids = sorted(candidates)
    return ids, [candidates[token] for token in ids]
