"""Letters of other alphabets that a reader takes for Latin ones, each in the case that looks so.

A capital may look like a Latin letter where its small form does not: Cyrillic U+041D is an H to its
reader, U+043D is not. Which letters these are, Unicode's table of confusables says (UTS #39); here
are those of the Greek, Cyrillic, Armenian, Cherokee and Lisu alphabets, and a few Latin ones.
"""

from __future__ import annotations

import re
from functools import cache

_OTHERS = {
    "a": "\u0251\u03b1\u0430",
    "b": "\u042c\u13cf",
    "c": "\u0441",
    "d": "\u0501\u13e7",
    "e": "\u0435\u04bd",
    "g": "\u0261\u0581",
    "h": "\u04bb\u0570\u13c2",
    "i": "\u0131\u0269\u03b9\u0456\u13a5",
    "j": "\u03f3\u0458",
    "l": "\u01c0\u04c0\u04cf\ua4f2",
    "n": "\u0578\u057c",
    "o": "\u03bf\u043e\u0585",
    "p": "\u03c1\u0440",
    "q": "\u051b\u0563\u0566",
    "r": "\u0433\u13b1",
    "s": "\u0455",
    "u": "\u03c5\u057d",
    "v": "\u03bd\u0475",
    "w": "\u051d\u0461\u0561",
    "x": "\u0445",
    "y": "\u0443\u04af\u03b3",
    "A": "\u0391\u0410\u13aa\ua4ee",
    "B": "\u0392\u0412\u13f4\ua4d0",
    "C": "\u0421\u13df\ua4da",
    "D": "\u13a0\ua4d3",
    "E": "\u0395\u0415\u13ac\ua4f0",
    "F": "\u03dc\ua4dd",
    "G": "\u050c\u13c0\u13f3\ua4d6",
    "H": "\u0397\u041d\u13bb\ua4e7",
    "I": "\u0399\u0406\u04c0\ua4f2",
    "J": "\u037f\u0408\u13ab\ua4d9",
    "K": "\u039a\u041a\u13e6\ua4d7",
    "L": "\u13de\ua4e1",
    "M": "\u039c\u041c\u13b7\ua4df",
    "N": "\u039d\ua4e0",
    "O": "\u039f\u041e\u0555\ua4f3",
    "P": "\u03a1\u0420\u13e2\ua4d1",
    "R": "\u13a1\u13d2\ua4e3",
    "S": "\u0405\u054f\u13d5\u13da\ua4e2",
    "T": "\u03a4\u0422\u13a2\ua4d4",
    "U": "\u054d\ua4f4",
    "V": "\u0474\u13d9\ua4e6",
    "W": "\u051c\u13b3\u13d4\ua4ea",
    "X": "\u03a7\u0425\ua4eb",
    "Y": "\u03a5\u0423\u04ae\u13a9\u13bd\ua4ec",
    "Z": "\u0396\u13c3\ua4dc",
}
LATIN = str.maketrans({other: latin for latin, others in _OTHERS.items() for other in others})
_GROUPS = [latin + others for latin, others in _OTHERS.items()]


@cache
def like(symbol: str) -> str:
    """Return a class, as ``re`` writes it, of what is read as a symbol in any case."""
    forms = {symbol, symbol.lower(), symbol.upper()}
    groups = [group for group in _GROUPS if any(form in group for form in forms)]
    others = "".join(groups)
    return f"{re.escape(symbol)}|(?-i:[{others}])" if others else re.escape(symbol)


@cache
def like_class(characters: str) -> str:
    """Return a class of what only looks like a letter of one; none if there are no such letters.

    Both are as ``re`` writes them.
    """
    if characters.startswith("[^"):
        return ""
    match = re.compile(characters, re.DOTALL | re.IGNORECASE).match
    alike = "".join(group for group in _GROUPS if any(map(match, group)))
    outside = "".join(char for char in alike if not match(char))
    return f"(?-i:[{outside}])" if outside else ""
