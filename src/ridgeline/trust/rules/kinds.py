"""Kinds of text that rules know by name: personal data, and keys that open something.

All dashes, dots and gaps between digits count as one. An expression describes the whole extent, and
``check`` refuses what only looks like it.
"""

from __future__ import annotations

import re
import unicodedata
from ipaddress import IPv6Address
from itertools import pairwise

from ridgeline.trust.text_rules.folding import folded, is_seen
from ridgeline.trust.text_rules.look_alikes import LATIN
from ridgeline.trust.text_rules.patterns import TextPattern

_LONG_KEY = 16_384  # characters: a token with many claims, a key of 8,192 bits
_DASHES = r"\-\u02d7\u2010-\u2015\u2043\u2212"
_GAP = rf"[\s.{_DASHES}]"
_SPLIT = rf"[\s.,*_/{_DASHES}]{{0,3}}"  # between the digits of a card
# Digits that a card's number has, by its first ones: travel, Mastercard and Mir, American Express,
# Visa, Maestro and Mastercard, Discover and UnionPay and Maestro.
_CARDS = {
    "1": (15,),
    "2": range(16, 20),
    "3": range(14, 20),
    "4": (13, 16, 19),
    "5": range(12, 20),
    **dict.fromkeys(("51", "52", "53", "54", "55"), (16,)),
    "6": range(12, 20),
}
# Characters of an account's number, by its country (ISO 13616).
_IBANS = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18
    DO28 EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23
    IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27
    MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19
    SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30
"""
_IBAN_SIZES = {country: int(size) for country, size in re.findall(r"(..)(\d\d)", _IBANS)}
_LEAST_GROUP = 3  # digits of a card that are written together, but for the last ones
_PHONES = range(9, 16)  # digits of a number that is written with its 0
_MOST_BYTE = 255
_SECRET = 40  # characters of a secret key of AWS
_LEAST_TURNS = 12  # from one case to another, or to a digit: paths and names have fewer


def _plain(text: str) -> str:
    return "".join(map(folded, text)).translate(LATIN)


def _digits(text: str) -> str:
    return "".join(str(unicodedata.digit(char)) for char in _plain(text) if char.isdecimal())


def _is_card(text: str) -> bool:
    """Whether digits are grouped as on cards, and the last one is right (ISO/IEC 7812)."""
    groups = re.findall(r"\d+", _plain(text))
    digits = _digits(text).lstrip("0")
    are_single = all(len(group) == 1 for group in groups)
    if not are_single and min(map(len, groups[:-1]), default=_LEAST_GROUP) < _LEAST_GROUP:
        return False
    if len(digits) not in _CARDS.get(digits[:2], _CARDS.get(digits[:1], ())):
        return False
    numbers = list(map(int, digits))
    doubled = [2 * digit - 9 * (digit > 4) for digit in numbers[-2::-2]]
    return (sum(numbers[::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """Whether the length and the check digits of an account's number are right (ISO 13616)."""
    plain = "".join(filter(str.isalnum, _plain(text))).upper()
    if len(plain) != _IBAN_SIZES.get(plain[:2], len(plain)):
        return False
    moved = plain[4:] + plain[:4]
    return moved.isascii() and int("".join(str(int(char, 36)) for char in moved)) % 97 == 1


def _is_phone(text: str) -> bool:
    """Whether a number has a country's code, or an area's as it is written in its country."""
    return "+" in _plain(text) or len(_digits(text)) in _PHONES


def _is_ssn(text: str) -> bool:
    """Whether no part is all zeros, which no number has."""
    digits = _digits(text)[-9:]
    return "0" * 9 not in (digits[:3] * 3, digits[3:5] * 4 + "0", digits[5:] * 2 + "0")


def _is_address(text: str) -> bool:
    """Whether numbers are bytes, or groups an address of IPv6, and no name of a program's parts."""
    plain = _plain(text).partition("%")[0]
    if ":" not in plain:
        return all(int(part) <= _MOST_BYTE for part in _digits_of(plain))
    try:
        IPv6Address(plain)
    except ValueError:
        return False
    return any(map(str.isdecimal, plain))


def _digits_of(plain: str) -> list[str]:
    return re.findall(r"\d+", plain)


def _is_aws(text: str) -> bool:
    """Whether a long text without a name is as random as a secret key."""
    visible = "".join(filter(is_seen, unicodedata.normalize("NFKC", text)))
    if len(visible) != _SECRET:
        return True  # it has its name, or the form of an id
    kinds = [char.islower() + 2 * char.isupper() + 4 * char.isdecimal() for char in visible]
    turns = sum(one != other for one, other in pairwise(kinds) if one and other)
    return {1, 2, 4} <= set(kinds) and turns >= _LEAST_TURNS


# Between a name and what it names, as in settings: name = "...", "name": "...", name is ...
_NAMED = r"[\"']?\s*(?:[:=]|is)?\s*[\"']?"

KINDS = {
    # The part before the @ may begin inside of a longer word, so that the rest is found anyway.
    "email": TextPattern(
        r"""(?:[\w.!#$%&'*+/=?^`{|}~-]+|"[^"@\s]+(?: [^"@\s]+)*")@"""
        r"""(?:[\w-]+(?:[.\u3002][\w-]+)+|localhost|\[(?:ipv6:)?[\da-fv.:]+\])""",
        apart="",
        most=320,
    ),
    "card": TextPattern(rf"\d(?:{_SPLIT}\d){{11,21}}", apart="1", check=_is_card),
    "iban": TextPattern(
        rf"[A-Z]{{2}}\d{{2}}(?:{_GAP}{{0,2}}[A-Z0-9]){{11,30}}", apart="a1", check=_is_iban
    ),
    "phone": TextPattern(
        rf"\+(?:[\s()./{_DASHES}]{{0,4}}\d){{8,15}}"
        rf"|00[1-9](?:[\s()./{_DASHES}]{{0,4}}\d){{7,13}}"
        rf"|(?:1{_GAP})?(?:\([2-9]\d\d\){_GAP}{{0,2}}|[2-9]\d\d{_GAP})[2-9]\d\d{_GAP}\d{{4}}"
        rf"|(?:\(0[1-9]\d{{0,4}}\){_GAP}{{0,2}}|0[1-9]\d{{0,4}}(?:{_GAP}|/))"
        rf"\d{{3,8}}(?:{_GAP}\d{{2,5}}){{0,3}}"
        rf"|0[1-9](?:{_GAP}\d\d){{4}}",
        apart="a1",
        check=_is_phone,
    ),
    "us_ssn": TextPattern(
        rf"(?:\d{{3}}{_GAP}\d{{2}}{_GAP}\d{{4}}"
        rf"|(?:ssn|social security(?: (?:number|no\.?))?)[\s:#]*(?:is )?\d{{9}})",
        apart="a1",
        check=_is_ssn,
    ),
    "ip": TextPattern(
        r"\d{1,3}(?:\.\d{1,3}){3}"
        r"|[\da-f]{0,4}(?:(?::[\da-f]{0,4}){2,7}|(?::[\da-f]{0,4}){1,6}:\d{1,3}(?:\.\d{1,3}){3})"
        r"(?:%[\w.-]+)?",
        apart="a1",
        check=_is_address,
    ),
    "aws_key": TextPattern(
        r"(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AIPA|ANPA|ANVA|AROA|APKA|ASCA)[A-Z0-9]{16,17}"
        rf"|secret_?(?:access_?)?key{_NAMED}[\w/+]{{40}}|[A-Za-z0-9/+]{{40}}",
        apart="a1",
        check=_is_aws,
    ),
    "github_token": TextPattern(
        r"gh[opsur]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}", apart="a1"
    ),
    "secret_key": TextPattern(
        r"sk-(?:[A-Za-z0-9]+[_-]+)*[A-Za-z0-9]{16,}(?:[_-]+[A-Za-z0-9]+)*"
        r"|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"
        r"|xox[abeoprs]-(?:[A-Za-z0-9]+-)*[A-Za-z0-9]{10,}(?:-[A-Za-z0-9]+)*"
        r"|AIza[\w-]{35}|hf_[A-Za-z0-9]{30,}|glpat-[\w-]{20,}|npm_[A-Za-z0-9]{36}",
        apart="a1",
        most=1024,
    ),
    "jwt": TextPattern(
        r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # signed
        r"|eyJ[\w-]{8,}\.[\w-]*\.[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # encrypted
        r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.?",
        apart="a1",
        most=_LONG_KEY,
    ),
    # To its last line; if that is missing, as far as there are lines of a key.
    "private_key": TextPattern(
        r"-{4,5} ?BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)? ?-{4,5}"
        r"(?:(?:[^-]|-[^-])*-{4,5} ?END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)? ?-{4,5}"
        r"|(?:(?:\s|\\[nr])*[A-Za-z0-9+/=]{20,})*)"
        r"|PuTTY-User-Key-File-[1-3]: .*Private-(?:MAC|Hash): [\da-f]{40,64}"
        r"|AGE-SECRET-KEY-1[A-Z0-9]{58}",
        apart="",
        most=_LONG_KEY,
    ),
}
