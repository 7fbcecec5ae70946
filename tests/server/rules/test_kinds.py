"""What each kind finds, in the forms that are published for it, and what only looks like it.

All numbers and keys are made up, or are the examples that their issuers publish.
"""

from __future__ import annotations

import random
import string
from itertools import product

import pytest

from ridgeline.decoding.guard.answer import TextRule, TextRules, screened
from ridgeline.server.rules.kinds import KINDS

DICE = random.Random(11)
LETTERS, DIGITS = string.ascii_letters, string.digits
BETWEEN = [" ", "-", "\u2011", "\u2013", "\u2010", "\u2212", ".", "\n", "\u00a0", "\u2009"]
AROUND = [("", ""), ("see ", " there"), ("(", ")"), ("key_", ""), ('"', '"'), ("is: ", ", ok")]


def drawn(num: int, chars: str = LETTERS + DIGITS) -> str:
    return "".join(DICE.choice(chars) for _ in range(num))


def pem(kind: str, num_lines: int = 26) -> str:
    lines = [drawn(64, LETTERS + DIGITS + "+/") for _ in range(num_lines)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, drawn(22) + "==", f"-----END {kind}-----"])


def joined(groups: list[str]) -> list[str]:
    return ["".join(groups), *(between.join(groups) for between in BETWEEN)]


CARDS = [
    ["4111", "1111", "1111", "1111"],
    ["5555", "5555", "5555", "4444"],
    ["3782", "822463", "10005"],
    ["3056", "930902", "5904"],
    ["6011", "1111", "1111", "1117"],
    ["3530", "1113", "3330", "0000"],
    ["2223", "0031", "2200", "3222"],
    ["4000", "0566", "5566", "5556"],
    ["6304", "0000", "0000", "0000"],
]
IBANS = [
    ["DE89", "3704", "0044", "0532", "0130", "00"],
    ["NO93", "8601", "1117", "947"],
    ["GB29", "NWBK", "6016", "1331", "9268", "19"],
    ["be68", "5390", "0754", "7034"],
    ["FR14", "2004", "1010", "0505", "0001", "3M02", "606"],
    ["MT84", "MALT", "0110", "0001", "2345", "MTLC", "AST0", "01S"],
]
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N"
FORMS: dict[str, list[str]] = {
    "email": [
        "bob@example.com",
        "a.b+c@d-e.co.uk",
        "o'brien@example.com",
        "bob\uff20example.com",
        "bob\ufe6bexample.com",
        '"bob x"@example.com',
        "bob@[10.1.2.3]",
        "bob@ex\u00e4mple.de",
        "bob@exa\u0308mple.de",
        "bob@example\u3002com",
        "b" * 245 + "@example.com",
        "b" * 300 + "@example.com",
        "bob@\ufe0fexample.com",
        "bob@exam\u200bple.com",
        "x@localhost",
        "BOB@EXAMPLE.COM",
        "\U0001d41b\U0001d428\U0001d41b@example.com",
    ],
    "card": [text for groups in CARDS for text in joined(groups)]
    + ["".join(f"{char}\ufe0f\u20e3" for char in "4111111111111111"), " ".join("4111111111111111")]
    + ["4111, 1111, 1111, 1111", "**4111** 1111 1111 1111"[2:], "4111  1111  1111  1111"],
    "iban": [text for groups in IBANS for text in joined(groups)],
    "phone": [
        *["+1 415 555 0132", "(415) 555-0132", "415-555-0132", "415.555.0132", "030 901820"],
        *["1-415-555-0132", "0049 30 901820", "+1\u2011415\u2011555\u20110132", "020 7946 0958"],
        *["+1 415\u2013555\u20130132", "\uff0b1 415 555 0132", "+1   415   555   0132"],
        *["+14155550132", "+49 (0)30 - 901820", "0171/1234567", "01 23 45 67 89", "(030) 901820"],
        *["+44 20 7946 0958", "00442079460958", "+4930901820", "415\u2011555\u20110132"],
    ],
    "us_ssn": [
        *joined(["219", "09", "9999"])[1:],
        "ssn 219099999",
        "SSN: 219099999",
        "Social Security number is 219099999",
    ],
    "ip": [
        *["10.1.2.3", "255.255.255.0", "2001:db8::1", "2001:0db8:85a3:0000:0000:8a2e:0370:7334"],
        *["::1", "fe80::1ff:fe23:4567:890a%eth0", "::ffff:192.0.2.128", "2001:db8:0:0:1:0:0:1"],
        *["64:ff9b::192.0.2.33", "\uff11\uff10.1.2.3", "1::", "2001:DB8::A1"],
    ],
    "aws_key": [
        *["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "AROA" + drawn(16, DIGITS + "ABCXYZ")],
        *["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "4k" + drawn(36) + "Z7"],
        "secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        'SecretAccessKey": "' + "a" * 40,
    ],
    "github_token": [
        *[f"gh{kind}_{drawn(36)}" for kind in "opsur"],
        "ghs_" + drawn(60),
        f"github_pat_11{drawn(20)}_{drawn(59)}",
    ],
    "secret_key": [
        *["sk-" + drawn(48), f"sk-proj-{drawn(40)}_{drawn(20)}-{drawn(30)}", "sk-" + "a" * 242],
        *["sk-ant-api03-" + drawn(95), "sk_live_" + drawn(24), "rk_test_" + drawn(24)],
        *["xoxb-123456789012-123456789012-" + drawn(24), "AIza" + drawn(35), "hf_" + drawn(34)],
        *["glpat-" + drawn(20), "npm_" + drawn(36), "sk-or-v1-" + drawn(64)],
    ],
    "jwt": [
        *[JWT, f"eyJhbGciOiJSUzI1NiJ9.{drawn(3000)}.{drawn(342)}"],
        *["eyJhbGciOiJkaXIifQ..aaaaaaaaaa.bbbbbbbbbbbb.cccccccccc", JWT.replace("e", "e\u200b")],
        *["eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.", f"eyJhbGci{drawn(30)}.{drawn(8000)}.{drawn(90)}"],
    ],
    "private_key": [
        *map(pem, ["RSA PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY"]),
        *map(pem, ["ENCRYPTED PRIVATE KEY", "PGP PRIVATE KEY BLOCK"]),
        pem("RSA PRIVATE KEY").replace("\n", "\\n"),
        pem("RSA PRIVATE KEY").replace("\n", "\r\n"),
        pem("RSA PRIVATE KEY", 100),
        pem("PRIVATE KEY").rpartition("\n")[0],
        pem("RSA PRIVATE KEY").replace(
            "KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A1B\n\n", 1
        ),
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: GnuPG v2\n\nlQOYBF\n=x1y2\n"
        "-----END PGP PRIVATE KEY BLOCK-----",
        "AGE-SECRET-KEY-1" + drawn(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
    ],
}
NEAR: dict[str, list[str]] = {
    "email": [
        "a@b",
        "bob at example.com",
        "@example.com",
        "bob@",
        "a @ b.com",
        "x@y@",
        "@decorator",
    ],
    "card": [
        *joined(["4111", "1111", "1111", "1112"]),
        "12 2024 18 05 31 07 99",
        "4111 1111 1111",
        "1699999999999",
        "2024-01-02, 2024-02-03",
        "1, 22, 3, 44, 5, 66, 7, 88, 9",
        "0000 0000 0000",
        "41 11 11 11 11 11 11 11",
    ],
    "iban": [
        *joined(["DE88", "3704", "0044", "0532", "0130", "00"]),
        "DE89",
        "AB12 3456 7890 1234",
    ],
    "phone": [
        *["+49 3", "2024-01-02", "01-02-2024", "0.123456", "1 000 000", "415-555-013", "000123456"],
        *[
            "+1",
            "x = 030",
            "10 + 20 = 30",
            "115-555-0132",
            "415 155 0132",
            "0x0049309018",
            "3.14159",
        ],
    ],
    "us_ssn": [
        "123-45-678",
        "219099999",
        "000-12-3456",
        "219-00-9999",
        "219-09-0000",
        "2024-01-0203",
    ],
    "ip": [
        *["10.0.1", "300.1.2.3", "12:34:56", "00:1a:2b:3c:4d:5e", "std::vector", "abc::def", "::"],
        *["a::b", "1.2.3", "2001:db8", "10:30", "1:2:3:4:5:6:7", "12345::1"],
    ],
    "aws_key": [
        *["AKIA" + "A1" * 7, "da39a3ee5e6b4b0d3255bfef95601890afd80709", "A" * 40, "akia"],
        *["AbstractConfigurationPropertyValueSource", "src/main/java/org/Example1/ExampleTest1x"],
        *[
            "DA39A3EE5E6B4B0D3255BFEF95601890AFD80709",
            drawn(39),
            drawn(41),
            "thisisafunctionname" * 2,
        ],
    ],
    "github_token": ["ghp_a", "ghp_" + "a" * 35, "ghx_" + "a" * 36, "github_pat_short", "ghp"],
    "secret_key": [
        *["sk-a1", "sk-learn-estimators-and-other-models", "task-force-for-something-very-long"],
        *["sk_live", "disk-" + "a" * 30, "sk-en-ticket-number-and-words", "AIza1", "hf_model"],
    ],
    "jwt": ["eyJ.a.b", "eyJhbGciOiJIUzI1NiJ9", "a.b.c", "eyJhbGciOi.short.x", "key.with.dots"],
    "private_key": [
        *[
            "-----BEGIN KEY-----",
            "-----BEGIN PUBLIC KEY-----",
            "BEGIN RSA PRIVATE KEY",
            "PRIVATE KEY",
        ],
        *["-----BEGIN CERTIFICATE-----", "AGE-SECRET-KEY-1ABC", "---BEGIN PRIVATE KEY---"],
    ],
}


RULES = {kind: TextRules([TextRule(kind, KINDS[kind], "redact", "[X]")]) for kind in KINDS}


def shown(kind: str, text: str) -> str:
    return screened(text, RULES[kind], lambda rule: None)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_finds_all_of_each_of_its_forms(kind: str) -> None:
    found = [
        (text, shown(kind, before + text + after))
        for text, (before, after) in product(FORMS[kind], AROUND)
        if (kind, before) not in {("email", "key_"), ("ip", "key_")}  # the mark is a part of it
    ]
    assert not [
        (text, left)
        for text, left in found
        if left not in {before + "[X]" + after for before, after in AROUND}
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_leaves_what_only_looks_like_it(kind: str) -> None:
    for text, (before, after) in product(NEAR[kind], AROUND[:3]):
        assert shown(kind, before + text + after) == before + text + after


def test_a_kind_is_found_with_emphasis_and_letters_that_look_alike() -> None:
    assert shown("card", "**4111** `1111` 1111 *1111*") == "**[X]*"
    assert shown("phone", "call _+1 **415** 555 0132_") == "call _[X]_"
    assert shown("ip", "at 2001:**db8**::1 or 10.**1**.2.3") == "at [X] or [X]"
    assert shown("iban", "D\u041589 3704 0044 0532 0130 00") == "[X]"
    assert shown("aws_key", "`wJalrXUtnFEMI/K7MDENG/`**bPxRfiCYEXAMPLEKEY**") == "`[X]**"


def test_text_behind_a_key_without_its_last_line_stays() -> None:
    key = pem("PRIVATE KEY", 3).rpartition("\n")[0]
    assert shown("private_key", f"{key}\n\nKeep it safe.") == "[X]\n\nKeep it safe."


def test_two_keys_are_two_matches() -> None:
    text = f"{pem('PRIVATE KEY')}\nand then\n{pem('EC PRIVATE KEY')}"
    assert shown("private_key", text) == "[X]\nand then\n[X]"
