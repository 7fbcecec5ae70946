"""Formats of strings that an answer keeps to, as patterns.

Others are annotations, as JSON Schema has it by default. Fractions of seconds and numbers in a
duration have a bound: a small model writes digits for ever otherwise.
"""

from __future__ import annotations

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_CLOCK = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
)
_N = "[0-9]{1,9}"
_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DATE = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H}:){{7}}{_H}"]
    + [
        f"{f'{_H}(?::{_H}){{0,{before - 1}}}' if before else ''}::"
        f"(?:{_H}(?::{_H}){{0,{6 - before}}})?"
        for before in range(7)
    ]
    + [f"(?:{_H}:){{7}}:"]
)
_WORD = r"[a-zA-Z0-9!#$%&'*+\/=?^_`{|}~-]+"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_CHAR = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_AUTHORITY = (
    r"(?:(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2})*@)?"
    rf"(?:\[(?:{_IPV6})\]|(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}})*)(?::[0-9]{{0,5}})?"
)
_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?:\/\/{_AUTHORITY}(?:\/{_CHAR}*)*"
    rf"|\/?(?:{_CHAR}+(?:\/{_CHAR}*)*)?)"
    rf"(?:\?(?:{_CHAR}|[\/?])*)?(?:#(?:{_CHAR}|[\/?])*)?"
)

FORMATS = {
    "date-time": f"^(?!0000){_DAY}[tT]{_CLOCK}$",
    "time": f"^{_CLOCK}$",
    "date": f"^(?!0000){_DAY}$",
    "duration": f"^P(?:{_DATE}(?:{_TIME})?|{_TIME}|{_N}W)$",
    "email": rf"^{_WORD}(?:\.{_WORD})*@(?:{_HOST}|\[{_IPV4}\])$",
    "hostname": f"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "uri": f"^{_URI}$",
}
