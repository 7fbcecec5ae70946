"""By how much a forecast must be sooner than a deadline: learnt from promises, kept and broken.

A forecast is multiplied by exp(mean + width spread) of the last relative errors, over all horizons.
The width follows what became of promises: it grows with each that breaks and shrinks a little with
each that is kept, so that in the long run few break, however errors are distributed and whatever
the load asks for (adaptive conformal inference: Gibbs and Candes, NeurIPS 2021). Where promises
break all the same, none are made until those that would have been made are kept again. There is no
clock in it: the same outcomes in the same order give the same margin.
"""

from __future__ import annotations

from collections import deque
from math import exp, inf, log, sqrt

_LEAST, _MOST = 1.0, 4.0  # bounds of what a forecast is multiplied by
_NUM_ERRORS = 25  # relative errors that mean and spread are taken of
_NUM_PRIOR, _PRIOR_SD = 4, 0.1  # errors that are believed beside those seen; of their log
_TARGET = 0.004  # share of promises that may break: then any 500 have five at most, by chance too
_STEP = 0.6  # by which a broken promise widens the margin, in spreads
_WIDTHS = 0.5, 5.0  # bounds of the width
_FIRST_WIDTH = 2.2
_NUM_JUDGED = 500  # outcomes that are looked back at
_MOST_BROKEN, _FEW_BROKEN = 5, 2  # of these: promises end at the one, and begin again at the other


class PromiseMargin:
    """What forecasts are multiplied by, and whether promises are made at all.

    Attributes:
        factor: what a forecast is multiplied by.
        are_promises_made: False where too many were broken of late. What would be promised is
            judged all the same.
    """

    def __init__(self) -> None:
        """Begin without a forecast."""
        self._errors = deque[float](maxlen=_NUM_ERRORS)  # of logarithms
        self._width = _FIRST_WIDTH
        self._broken = deque[bool](maxlen=_NUM_JUDGED)
        self.are_promises_made = True
        self.factor = self._factor()

    def note(self, foreseen_s: float, happened_s: float) -> None:
        """Add what was predicted, without margin, and what it became."""
        if 0 < foreseen_s < inf and 0 < happened_s < inf:
            self._errors.append(log(happened_s / foreseen_s))
            self.factor = self._factor()

    def judge(self, *, is_broken: bool) -> None:
        """Add what became of a promise, or of what would be one if any were made."""
        self._broken.append(is_broken)
        narrowest, widest = _WIDTHS
        self._width = min(widest, max(narrowest, self._width + _STEP * (is_broken - _TARGET)))
        limit = _MOST_BROKEN if self.are_promises_made else _FEW_BROKEN + 1
        self.are_promises_made = sum(self._broken) < limit
        self.factor = self._factor()

    def _factor(self) -> float:
        count = len(self._errors) + _NUM_PRIOR
        mean = sum(self._errors) / count
        squares = sum((error - mean) ** 2 for error in self._errors)
        spread = sqrt((squares + _NUM_PRIOR * _PRIOR_SD**2) / count)
        return min(_MOST, max(_LEAST, exp(max(0.0, mean) + self._width * spread)))
