"""Formats of strings that an answer keeps to, as patterns: all of JSON Schema's but ``regex``.

Others are named as not enforced: JSON Schema takes a format for an annotation by default. Fractions
of seconds and other numbers have a bound: a small model writes digits for ever otherwise.
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
# What may stand in an IRI beside a URI's characters (RFC 3987, ucschar).
_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16 | first)}-{chr(plane << 16 | 0xFFFD)}"
    for plane in range(1, 15)
    for first in [0x1000 if plane == 14 else 0]
)
# Letters of which a host's label may consist, in any order: lower case, written from left to right,
# and none that joins another. A label of them has at most 63 bytes as ASCII, whichever they are.
_IDN_LETTERS = "a-z0-9ß-öø-ÿα-ρς-ωа-яぁ-ゖァ-ヺ一-龥가-힣"
_PLAIN_PART = "[a-zA-Z0-9]{1,20}"
_IDN_LABEL = rf"(?:{_PLAIN_PART}(?:-{_PLAIN_PART}){{0,2}}|[{_IDN_LETTERS}]{{1,10}})"
_IDN_HOST = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}}"
_IDN_WORD = rf"[a-zA-Z0-9!#$%&'*+\/=?^_`{{|}}~{_UCS}-]+"
_POINTER = r"(?:\/(?:[^~\/]|~[01])*)*"
_NAME_PART = "(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})"
_VARIABLE = rf"{_NAME_PART}(?:\.?{_NAME_PART})*(?::[1-9][0-9]{{0,3}}|\*)?"
_LITERAL = rf"[!#-$&(-;=?-\[\]_a-z~{_UCS}]|%[0-9a-fA-F]{{2}}"  # RFC 6570


def _uri_and_reference(more: str) -> tuple[str, str]:
    """Return patterns of a URI, and of a reference to one, that may also have characters ``more``.

    After RFC 3986; a port has at most five digits.
    """
    plain, encoded = rf"a-zA-Z0-9._~!$&'()*+,;=\-{more}", "%[0-9a-fA-F]{2}"
    char = f"(?:[{plain}:@]|{encoded})"
    user, host = f"(?:[{plain}:]|{encoded})*", f"(?:[{plain}]|{encoded})*"
    authority = rf"(?:{user}@)?(?:\[(?:{_IPV6})\]|{host})(?::[0-9]{{0,5}})?"
    path = rf"(?:\/{char}*)*"
    rooted = rf"\/\/{authority}{path}|\/(?:{char}+{path})?"
    first = f"(?:[{plain}@]|{encoded})+"  # of a relative path: a colon would end a scheme
    end = rf"(?:\?(?:{char}|[\/?])*)?(?:#(?:{char}|[\/?])*)?"
    uri = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{rooted}|(?:{char}+{path})?)"
    return f"^(?:{uri}){end}$", f"^(?:{uri}|{rooted}|(?:{first}{path})?){end}$"


_URI, _URI_REFERENCE = _uri_and_reference("")
_IRI, _IRI_REFERENCE = _uri_and_reference(_UCS)

FORMATS = {
    "date-time": f"^(?!0000){_DAY}[tT]{_CLOCK}$",
    "time": f"^{_CLOCK}$",
    "date": f"^(?!0000){_DAY}$",
    "duration": f"^P(?:{_DATE}(?:{_TIME})?|{_TIME}|{_N}W)$",
    "email": rf"^{_WORD}(?:\.{_WORD})*@(?:{_HOST}|\[{_IPV4}\])$",
    "idn-email": rf"^{_IDN_WORD}(?:\.{_IDN_WORD})*@{_IDN_HOST}$",
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_IDN_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": rf"^(?:{_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})$",
}
