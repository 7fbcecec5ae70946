"""Kinds of text that rules know by name: personal data, and keys that open something."""

from __future__ import annotations

import unicodedata

from ridgeline.decoding.guard.patterns import TextPattern

_LEAST_CARD = 12  # digits of a card's number


def _passes_luhn(text: str) -> bool:
    """Whether the last digit of a card's number is right (ISO/IEC 7812)."""
    digits = [unicodedata.digit(char) for char in text if char.isdigit()]
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    return len(digits) >= _LEAST_CARD and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _passes_iban(text: str) -> bool:
    """Whether the check digits of an account's number are right (ISO 13616)."""
    plain = "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).upper()))
    moved = plain[4:] + plain[:4]
    return moved.isascii() and int("".join(str(int(char, 36)) for char in moved)) % 97 == 1


KINDS = {
    "email": TextPattern(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "card": TextPattern(r"\d(?:[ -]?\d){11,18}", check=_passes_luhn),
    "iban": TextPattern(r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}", check=_passes_iban),
    "phone": TextPattern(r"\+\d(?:[ ()./-]{0,2}\d){7,14}", is_word=False),
    "us_ssn": TextPattern(r"\d{3}-\d{2}-\d{4}"),
    "ip": TextPattern(r"\d{1,3}(?:\.\d{1,3}){3}"),
    "aws_key": TextPattern(r"(?:AKIA|ASIA)[A-Z0-9]{16}"),
    "github_token": TextPattern(r"gh[opsur]_[A-Za-z0-9]{36}"),
    "secret_key": TextPattern(r"sk-[A-Za-z0-9_-]{20,200}"),
    "jwt": TextPattern(r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}", most=2048),
    "private_key": TextPattern(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----", is_word=False),
}
