"""Numbers of schemas, as regular expressions of how an answer may write them.

Bounds are decimal, of any size, and exact. Where a schema sets none, digits have one: a small model
writes zeros for ever otherwise. What a program reads into binary floating point is inside of the
bounds as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import NamedTuple

from ridgeline.text.json_schema.charsets import literal

_MOST_BEFORE, _MOST_BEHIND = 20, 17  # digits before and behind the point, if bounds need no more
_EXPONENT = r"(?:[eE](?:-[0-9]{1,3}|\+?(?:2[0-7][0-9]|[01]?[0-9]{1,2})))?"  # none overflows
_EXACT = Context(prec=2_000)
_MOST_DIGITS = 400
_WHOLE_FROM = 2**53  # from here on, floating point has no fractions, and not all whole numbers
_MOST_LISTED = 200
_LIBRARY_DIGITS = 18  # of bounds that the library's own numbers take

Number = int | float | Decimal


class NoNumbers(ValueError):
    """Numbers of which no regular expression can be made."""


class Range(NamedTuple):
    """Which numbers a schema allows.

    Attributes:
        is_integer: whether it has whole ones alone.
        low: no number is below, None for no bound.
        high: none is above.
        above: all numbers are greater.
        below: all are less.
        multiples: each number is a multiple of all of these.
        not_in: these it does not have.
    """

    is_integer: bool = False
    low: Decimal | None = None
    high: Decimal | None = None
    above: Decimal | None = None
    below: Decimal | None = None
    multiples: tuple[Decimal, ...] = ()
    not_in: tuple[Decimal, ...] = ()

    def has(self, number: Number) -> bool:
        """Return whether it has a number."""
        value = decimal(number)
        return (
            (not self.is_integer or value == value.to_integral_value())
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and all(not Fraction(value) % Fraction(step) for step in self.multiples)
            and value not in self.not_in
        )


ANY_NUMBER = Range()


class WrittenNumber(NamedTuple):
    """How numbers are written.

    Attributes:
        terminal: in Lark's notation, empty if there are none.
        schema: instead of it, a schema that the library itself reads rightly.
    """

    terminal: str = ""
    schema: dict[str, object] | None = None


def decimal(number: Number) -> Decimal:
    """Return a number of a schema exactly as its shortest spelling says it; 0 for -0.0."""
    if not number:
        return Decimal(0)
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def bound(number: Number, stricter: Callable[[Decimal, Decimal], Decimal]) -> Decimal:
    """Return a bound that holds as it is spelled, and as the double that programs read of it.

    They compare whole numbers with that exactly: 10**30 is less than what 1e30 is read as.

    Args:
        number: what a schema says.
        stricter: max of lower bounds, min of upper ones.
    """
    spelled = decimal(number)
    if isinstance(number, float) and _WHOLE_FROM <= abs(number) < math.inf:
        return stricter(spelled, Decimal(number))
    return spelled


def written(numbers: Range) -> WrittenNumber:
    """Return how the numbers of a range are written. Raises NoNumbers."""
    step = _common(numbers.multiples)
    is_integer = numbers.is_integer or (step is not None and step.denominator == 1)
    low, high, num_behind = _bounds(numbers, is_integer)
    if step is not None and not num_behind:  # of whole numbers there is a least common multiple
        step = Fraction(step.numerator)
    if low is not None and high is not None and low > high:
        return WrittenNumber()
    if step is None or step == 1:
        return WrittenNumber(_excluding(_range(low, high, num_behind), numbers.not_in))
    if low is not None and high is not None:
        first = math.ceil(Fraction(low) / step)
        last = math.floor(Fraction(high) / step)
        if last - first < _MOST_LISTED:
            multiples = [_decimal_of(i * step) for i in range(first, last + 1)]
            texts = [f"{one:f}" for one in multiples if one not in numbers.not_in]
            return WrittenNumber(alternatives(texts))
    if step.denominator == 1:
        return WrittenNumber(schema=_by_library(low, high, step.numerator, numbers.not_in))
    return WrittenNumber(_excluding(_of_fractions(low, high, num_behind, step), numbers.not_in))


def alternatives(texts: Iterable[str]) -> str:
    """Return the terminal of any of some texts, empty for none."""
    options = "|".join(map(literal, texts))
    return f"/(?:{options})/" if options else ""


def _common(steps: Sequence[Decimal]) -> Fraction | None:
    """Return the least common multiple. Raises NoNumbers if a number is none of these."""
    common: Fraction | None = None
    for one in map(Fraction, steps):
        if one <= 0:
            raise NoNumbers("it must be more than 0")
        if common is not None:
            scale = math.lcm(common.denominator, one.denominator)
            one = Fraction(math.lcm(int(common * scale), int(one * scale)), scale)
        common = one
    return common


def _bounds(numbers: Range, is_integer: bool) -> tuple[Decimal | None, Decimal | None, int]:
    """Return the least and the greatest number that can be written, and digits after the point."""
    bounds = [one for one in (numbers.low, numbers.high, numbers.above, numbers.below)
             if one is not None]  # fmt: skip
    for one in bounds:
        if not one.is_finite() or abs(one.adjusted()) > _MOST_DIGITS:
            raise NoNumbers(f"{one} is too long a number")
    if is_integer or any(abs(one) >= _WHOLE_FROM for one in bounds):
        num_behind = 0
    else:
        num_behind = max([_MOST_BEHIND, *(-_exponent(one) for one in bounds)])
    for one in numbers.not_in:  # in floating point nothing else may be the same
        places = -decimal(math.ulp(float(one))).adjusted() - 1
        num_behind = max(0, min(num_behind, places))
    grain = Decimal(1).scaleb(-num_behind)
    lows, highs = list[Decimal](), list[Decimal]()
    if numbers.low is not None:
        lows.append(_rounded(numbers.low, grain, ROUND_CEILING))
    if numbers.above is not None:
        lows.append(_beyond(numbers.above, grain, 1))
    if numbers.high is not None:
        highs.append(_rounded(numbers.high, grain, ROUND_FLOOR))
    if numbers.below is not None:
        highs.append(_beyond(numbers.below, grain, -1))
    return max(lows, default=None), min(highs, default=None), num_behind


def _beyond(bound: Decimal, grain: Decimal, sign: int) -> Decimal:
    """Return the next number that is beyond a bound, in decimals and in floating point."""
    rounding = ROUND_FLOOR if sign > 0 else ROUND_CEILING
    beyond = _EXACT.add(_rounded(bound, grain, rounding), sign * grain)
    if grain == 1:
        return beyond
    next_float = decimal(math.nextafter(float(bound), sign * math.inf))
    next_float = _rounded(next_float, grain, ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    return max(beyond, next_float) if sign > 0 else min(beyond, next_float)


def _rounded(value: Decimal, grain: Decimal, rounding: str) -> Decimal:
    return value.quantize(grain, rounding, _EXACT)


def _exponent(value: Decimal) -> int:
    exponent = value.normalize(_EXACT).as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent


def _decimal_of(value: Fraction) -> Decimal:
    return _EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))


def _range(low: Decimal | None, high: Decimal | None, num_behind: int) -> str:
    """Return the terminal of the numbers between two, both among them."""
    behind = rf"(?:\.[0-9]{{1,{num_behind}}})?" if num_behind else ""
    if low is None and high is None:
        exponent = _EXPONENT if num_behind else ""
        return f"/-?(?:0|[1-9][0-9]{{0,{_MOST_BEFORE - 1}}}){behind}{exponent}/"
    parts = []
    if high is None or high >= 0:
        parts.append(_positive(max(low or Decimal(0), Decimal(0)), high, num_behind))
    if low is None or low < 0:
        least = Decimal(1) if not num_behind else Decimal(0)  # no -0 among whole numbers
        least = least if high is None or high >= 0 else high.copy_negate()
        most = None if low is None else low.copy_negate()  # a minus would round to 28 digits
        parts.append(f'"-" ({_positive(least, most, num_behind)})')
    return " | ".join(parts)


def _positive(low: Decimal, high: Decimal | None, num_behind: int) -> str:
    """Return the terminal of numbers without a sign, from ``low`` on."""
    before = max([_MOST_BEFORE, *(one.adjusted() + 1 for one in (low, high or low))])
    terminal = f"/{_at_least(low, before, num_behind)}/"
    return terminal if high is None else f"{terminal} & /{_at_most(high, num_behind)}/"


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, behind = f"{value:f}".partition(".")
    return whole, behind.rstrip("0")


def _behind(num_behind: int, digits: str = "") -> str:
    """Return the rest of digits behind a point."""
    return f"[0-9]{{0,{num_behind - len(digits)}}}"


def _at_least(low: Decimal, num_before: int, num_behind: int) -> str:
    whole, behind = _digits(low)
    free = rf"(?:\.[0-9]{{1,{num_behind}}})?" if num_behind else ""
    options = []
    if len(whole) < num_before:
        options.append(f"[1-9][0-9]{{{len(whole)},{num_before - 1}}}{free}")
    options += [
        f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{len(whole) - i - 1}}}{free}"
        for i, digit in enumerate(whole)
        if digit < "9"
    ]
    if not behind:
        return "|".join((*options, f"{whole}{free}"))
    parts = [
        f"{behind[:i]}[{int(digit) + 1}-9]{_behind(num_behind, behind[: i + 1])}"
        for i, digit in enumerate(behind)
        if digit < "9"
    ]
    parts.append(behind + _behind(num_behind, behind))
    return "|".join((*options, rf"{whole}\.(?:{'|'.join(parts)})"))


def _at_most(high: Decimal, num_behind: int) -> str:
    whole, behind = _digits(high)
    free = rf"(?:\.[0-9]{{1,{num_behind}}})?" if num_behind else ""
    options = [f"0{free}"] if whole != "0" else []
    if len(whole) > 1:
        options.append(f"[1-9][0-9]{{0,{len(whole) - 2}}}{free}")
    for i, digit in enumerate(whole):
        least = 1 if i == 0 else 0
        if int(digit) > least:
            rest = f"[0-9]{{{len(whole) - i - 1}}}"
            options.append(f"{whole[:i]}[{least}-{int(digit) - 1}]{rest}{free}")
    if not num_behind:
        return "|".join((*options, whole))
    parts = [
        f"{behind[:i]}[0-{int(digit) - 1}]{_behind(num_behind, behind[: i + 1])}"
        for i, digit in enumerate(behind)
        if digit > "0"
    ]
    parts += [behind[:i] for i in range(1, len(behind))]  # ends before: less
    parts.append(f"{behind}0{{{0 if behind else 1},{num_behind - len(behind)}}}")
    return "|".join((*options, rf"{whole}(?:\.(?:{'|'.join(parts)}))?"))


def _excluding(terminal: str, numbers: Iterable[Decimal]) -> str:
    """Return a terminal without any spelling of some numbers."""
    spellings = []
    for one in numbers:
        whole, behind = _digits(one.copy_abs())
        sign = "-" if one < 0 else "-?" if not one else ""
        zeros = rf"\.{behind}0*" if behind else r"(?:\.0*)?"
        spellings.append(f"{sign}{whole}{zeros}")
    if not spellings:
        return terminal
    excluded = f"& ~/(?:{'|'.join(spellings)})/ & ~/.*[eE].*/"
    return f"({terminal}) {excluded}"


def _of_fractions(
    low: Decimal | None, high: Decimal | None, num_behind: int, step: Fraction
) -> str:
    """Return the terminal of multiples that only the digits behind the point tell."""
    places = 1
    while (step * 10**places).denominator != 1:
        places += 1
        if places > num_behind:
            raise NoNumbers(f"no grammar knows the multiples of {float(step):g}")
    size, count = int(step * 10**places), 10**places
    if size == 1:
        digits = f"[0-9]{{1,{places}}}"
    elif count % size or count // size > _MOST_LISTED:
        raise NoNumbers(f"no grammar knows the multiples of {float(step):g}")
    else:
        texts = (f"{i:0{places}d}".rstrip("0") or "0" for i in range(0, count, size))
        digits = "|".join(texts)
    terminal = rf"/-?[0-9]+(?:\.(?:(?:{digits})0*))?/"
    return f"({_range(low, high, num_behind)}) & {terminal}"


def _by_library(
    low: Decimal | None, high: Decimal | None, step: int, not_in: Iterable[Decimal]
) -> dict[str, object]:
    most = 10**_LIBRARY_DIGITS
    if step >= 1 << 32 or any(not Fraction(one) % step for one in not_in):
        raise NoNumbers(f"no grammar knows the multiples of {step}")
    least = -most if low is None else max(-most, int(low))
    greatest = most if high is None else min(most, int(high))
    if least > greatest:
        raise NoNumbers(f"no grammar knows multiples of {step} from {least} on")
    # The library compares bounds in floating point.
    if any(int(float(one)) != one for one in (least, greatest)):
        raise NoNumbers(f"no grammar knows multiples of {step} from {least} to {greatest}")
    return {"type": "integer", "multipleOf": step, "minimum": least, "maximum": greatest}
