"""What is published for each kind of text, or made by a rule of its issuer; and near misses.

Accounts are examples of the registry (ISO 13616), cards what networks give for tests, telephones
what regulators keep for films, addresses what RFCs keep for documents, US numbers what their office
has printed or keeps for advertisements. Of keys hardly any example is published: they are made here
by the rules that are.
"""

from __future__ import annotations

import base64
import json
import random
import string

DICE = random.Random(11)
LETTERS, DIGITS = string.ascii_letters, string.digits
BETWEEN = [" ", "-", "\u2011", "\u2013", "\u2010", "\u2212", ".", "\n", "\u00a0", "\u2009"]


def drawn(num: int, chars: str = LETTERS + DIGITS) -> str:
    return "".join(DICE.choice(chars) for _ in range(num))


def pem(kind: str, num_lines: int = 26) -> str:
    lines = [drawn(64, LETTERS + DIGITS + "+/") for _ in range(num_lines)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, drawn(22) + "==", f"-----END {kind}-----"])


def joined(groups: list[str]) -> list[str]:
    return ["".join(groups), *(between.join(groups) for between in BETWEEN)]


def grouped(numbers: str) -> list[list[str]]:
    """Return numbers, one a line, in the groups that they are written in."""
    return [line.split() for line in numbers.strip().splitlines()]


def changed(numbers: list[list[str]]) -> list[str]:
    """Return numbers with another last digit or letter, which no check digits fit."""
    return [
        " ".join(groups)[:-1] + ("1" if groups[-1].endswith("0") else "0") for groups in numbers
    ]


def in_base64(data: str) -> str:
    return base64.urlsafe_b64encode(data.encode()).rstrip(b"=").decode()


def jwt(alg: str, claims: str, signature: str) -> str:
    header = json.dumps({"alg": alg, "typ": "JWT"})
    return f"{in_base64(header)}.{in_base64(claims)}.{signature}"


CARDS = grouped("""
4111 1111 1111 1111
4242 4242 4242 4242
4000 0566 5566 5556
4012 8888 8888 1881
4917 6100 0000 0000
4222 2222 22222
5555 5555 5555 4444
5105 1051 0510 5100
5200 8282 8282 8210
5454 5454 5454 5454
2223 0031 2200 3222
2223 0000 4840 0011
3782 822463 10005
3714 496353 98431
3787 344936 71000
6011 1111 1111 1117
6011 0009 9013 9424
6011 9811 1111 1113
3056 930902 5904
3852 000002 3237
3622 720627 1667
3056 9300 0902 0004
3530 1113 3330 0000
3566 0020 2036 0505
6200 0000 0000 0005
6304 0000 0000 0000
6759 6498 2643 8453
6799 9901 0000 0000 019
1354 100140 04955
""")
IBANS = grouped("""
AD12 0001 2030 2003 5910 0100
AE07 0331 2345 6789 0123 456
AL47 2121 1009 0000 0002 3569 8741
AT61 1904 3002 3457 3201
AZ21 NABZ 0000 0000 1370 1000 1944
BA39 1290 0794 0102 8494
be68 5390 0754 7034
BG80 BNBG 9661 1020 3456 78
BH67 BMAG 0000 1299 1234 56
BR18 0036 0305 0000 1000 9795 493C 1
BY13 NBRB 3600 9000 0000 2Z00 AB00
CH93 0076 2011 6238 5295 7
CR05 0152 0200 1026 2840 66
CY17 0020 0128 0000 0012 0052 7600
CZ65 0800 0000 1920 0014 5399
DE89 3704 0044 0532 0130 00
DK50 0040 0440 1162 43
DO28 BAGR 0000 0001 2124 5361 1324
EE38 2200 2210 2014 5685
ES91 2100 0418 4502 0005 1332
FI21 1234 5600 0007 85
FO62 6460 0001 6316 34
FR14 2004 1010 0505 0001 3M02 606
GB29 NWBK 6016 1331 9268 19
GE29 NB00 0000 0101 9049 17
GI75 NWBK 0000 0000 7099 453
GL89 6471 0001 0002 06
GR16 0110 1250 0000 0001 2300 695
GT82 TRAJ 0102 0000 0012 1002 9690
HR12 1001 0051 8630 0016 0
HU42 1177 3016 1111 1018 0000 0000
IE29 AIBK 9311 5212 3456 78
IL62 0108 0000 0009 9999 999
IS14 0159 2600 7654 5510 7303 39
IT60 X054 2811 1010 0000 0123 456
JO94 CBJO 0010 0000 0000 0131 0003 02
KW81 CBKU 0000 0000 0000 1234 5601 01
KZ86 125K ZT50 0410 0100
LB62 0999 0000 0001 0019 0122 9114
LI21 0881 0000 2324 013A A
LT12 1000 0111 0100 1000
LU28 0019 4006 4475 0000
LV80 BANK 0000 4351 9500 1
MC58 1122 2000 0101 2345 6789 030
MD24 AG00 0225 1000 1310 4168
ME25 5050 0001 2345 6789 51
MK07 2501 2000 0058 984
MR13 0002 0001 0100 0012 3456 753
MT84 MALT 0110 0001 2345 MTLC AST0 01S
MU17 BOMM 0101 1010 3030 0200 000M UR
NL91 ABNA 0417 1643 00
NO93 8601 1117 947
PK36 SCBL 0000 0011 2345 6702
PL61 1090 1014 0000 0712 1981 2874
PS92 PALS 0000 0000 0400 1234 5670 2
PT50 0002 0123 1234 5678 9015 4
QA58 DOHB 0000 1234 5678 90AB CDEF G
RO49 AAAA 1B31 0075 9384 0000
RS35 2600 0560 1001 6113 79
SA03 8000 0000 6080 1016 7519
SE45 5000 0000 0583 9825 7466
SI56 2633 0001 2039 086
SK31 1200 0000 1987 4263 7541
SM86 U032 2509 8000 0000 0270 100
TN59 1000 6035 1835 9847 8831
TR33 0006 1005 1978 6457 8413 26
UA21 3223 1300 0002 6007 2335 6600 1
VG96 VPVG 0000 0123 4567 8901
XK05 1212 0123 4567 8906
""")
SSNS = [["987", "65", f"432{i}"] for i in range(10)]  # for advertisements
SSNS += grouped("078 05 1120\n219 09 9999\n457 55 5462")  # of a wallet, a leaflet, a truck
SIGNING = ["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "ES512"]
SIGNING += ["PS256", "PS384", "PS512"]  # RFC 7518
WRAPPING = ["RSA1_5", "RSA-OAEP", "RSA-OAEP-256", "A128KW", "A192KW", "A256KW", "dir", "ECDH-ES"]
WRAPPING += ["ECDH-ES+A128KW", "A128GCMKW", "A256GCMKW", "PBES2-HS256+A128KW"]
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N"
KEY_IDS = ["ABIA", "ACCA", "AGPA", "AIDA", "AIPA", "AKIA", "ANPA", "ANVA", "APKA", "AROA", "ASCA"]
KEY_IDS += ["ASIA"]
PEMS = ["PRIVATE KEY", "ENCRYPTED PRIVATE KEY", "RSA PRIVATE KEY", "DSA PRIVATE KEY"]
PEMS += ["EC PRIVATE KEY", "OPENSSH PRIVATE KEY", "PGP PRIVATE KEY BLOCK", "ANY PRIVATE KEY"]
PUTTY = f"""PuTTY-User-Key-File-3: ssh-ed25519
Encryption: none
Comment: a key
Public-Lines: 2
{drawn(64)}
{drawn(36)}
Private-Lines: 1
{drawn(44)}
Private-MAC: {drawn(64, "0123456789abcdef")}"""
SSH2 = f"""---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----
Comment: "a key"
{drawn(70)}
{drawn(30)}=
---- END SSH2 ENCRYPTED PRIVATE KEY ----"""

FORMS: dict[str, list[str]] = {
    "email": [
        *["bob@example.com", "a.b+c@d-e.co.uk", "o'brien@example.com", "x@localhost"],
        *["bob\uff20example.com", "bob\ufe6bexample.com", '"bob x"@example.com'],
        *["bob@ex\u00e4mple.de", "bob@exa\u0308mple.de", "bob@example\u3002com"],
        *["b" * 245 + "@example.com", "b" * 300 + "@example.com", "BOB@EXAMPLE.COM"],
        *["bob@\ufe0fexample.com", "bob@exam\u200bple.com"],
        "\U0001d41b\U0001d428\U0001d41b@example.com",
        # RFC 5322, 3696 and 5321
        *["john.q.public@example.com", "mary@x.test", "jdoe@machine.example", "pete@silly.test"],
        *["customer/department=shipping@example.com", "$A12345@example.com"],
        *["!def!xyz%abc@example.com", "_somename@example.com", "user+mailbox@example.com"],
        *['"Fred Bloggs"@example.com', "bob@[10.1.2.3]", "userx@[IPv6:2001:db8::1]"],
        *["user%host@example.org", "host!user@example.org", "user-@example.org"],
        # RFC 6530: names in other alphabets
        *["\u7528\u6237@\u4f8b\u5b50.\u5e7f\u544a", "D\u00f6rte@S\u00f6rensen.example.com"],
        *["\u043a\u043e\u043b\u044f@\u043f\u0440\u0438\u043c\u0435\u0440.\u0440\u0444"],
        "\u03c7\u03c1\u03ae\u03c3\u03c4\u03b7\u03c2@\u03c0\u03b1\u03c1\u03ac\u03b4.\u03b5\u03bb",
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
        # for films: Ofcom, Bundesnetzagentur, Arcep, ACMA, ComReg
        *["0113 496 0000", "0161 496 0123", "029 2018 0000", "01632 960000", "07700 900000"],
        *["08081 570000", "03069 990000", "+44 7700 900123", "+44 1632 960123"],
        *["030 23125 000", "069 90009 000", "0221 4710 000", "+49 152 28817386", "0171 39200 00"],
        *["01 99 00 00 00", "06 39 98 00 00", "+33 6 39 98 12 34", "04.65.71.12.34"],
        *["(02) 5550 0000", "(03) 7010 0123", "0491 570 156", "+61 491 570 156", "020 910 0000"],
        # ITU-T E.123 and RFC 3966
        *["+22 607 123 4567", "(0607) 123 4567", "+1-201-555-0123", "+358-555-1234567"],
    ],
    "us_ssn": [
        *[text for groups in SSNS for text in joined(groups)[1:]],
        *["ssn 219099999", "SSN: 219099999", "Social Security number is 219099999"],
    ],
    "ip": [
        *["10.1.2.3", "255.255.255.0", "2001:db8::1", "2001:0db8:85a3:0000:0000:8a2e:0370:7334"],
        *["fe80::1ff:fe23:4567:890a%eth0", "::ffff:192.0.2.128", "\uff11\uff10.1.2.3", "1::"],
        # RFC 5737, 1918, 6598, 3927, 2544, 7526 and 1122
        *["192.0.2.1", "198.51.100.7", "203.0.113.254", "172.16.0.1", "192.168.0.1"],
        *["100.64.0.1", "169.254.1.1", "198.18.0.1", "192.88.99.1", "224.0.0.1", "127.0.0.1"],
        *["255.255.255.255", "0.0.0.0"],
        # RFC 4291, 5952, 6052, 9637, 4193, 4007, 6666 and 3056
        *["2001:DB8:0:0:8:800:200C:417A", "FF01:0:0:0:0:0:0:101", "2001:DB8::8:800:200C:417A"],
        *["FF01::101", "::1", "0:0:0:0:0:0:13.1.68.3", "0:0:0:0:0:FFFF:129.144.52.38"],
        *["::13.1.68.3", "::FFFF:129.144.52.38", "2001:db8:0:0:1:0:0:1", "2001:0db8::0001"],
        *["64:ff9b::192.0.2.33", "2001:db8:122:344::192.0.2.33", "3fff::1", "fd12:3456:789a::1"],
        *["ff02::1%eth0", "100::1", "2002:c000:204::1", "2001:DB8::A1"],
    ],
    "aws_key": [
        *["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "AKIAI44QH8DHBEXAMPLE"],
        *["AIDACKCEVSQ6C2EXAMPLE", "AROACLKWSDQRAOEXAMPLE", "AGPACKCEVSQ6C2EXAMPLE"],
        *[start + drawn(16, DIGITS + "ABCXYZ") for start in KEY_IDS],
        *["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "je7MtGbClwBF/2Zp9Utk/h3yCo8nvbEXAMPLEKEY"],
        "4k" + drawn(36) + "Z7",
        "secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        'SecretAccessKey": "' + "a" * 40,
    ],
    "github_token": [
        *[f"gh{kind}_{drawn(36)}" for kind in "opsur" * 3],
        *[f"ghs_{drawn(60)}", f"ghu_{drawn(76)}"],
        *[f"github_pat_11{drawn(20)}_{drawn(59)}" for _ in range(5)],
    ],
    "secret_key": [
        *["sk-" + drawn(48), f"sk-proj-{drawn(40)}_{drawn(20)}-{drawn(30)}", "sk-" + "a" * 242],
        *["sk-svcacct-" + drawn(60), "sk-None-" + drawn(48), "sk-or-v1-" + drawn(64)],
        *["sk-ant-api03-" + drawn(95), "sk-ant-admin01-" + drawn(95), "sk-ant-sid01-" + drawn(86)],
        *["sk_live_" + drawn(24), "sk_test_" + drawn(99), "rk_live_" + drawn(24)],
        *["rk_test_" + drawn(24), "sk_test_4eC39HqLyjWDarjtT1zdp7dc"],
        *[f"xox{kind}-123456789012-123456789012-{drawn(24)}" for kind in "abprs"],
        *["AIza" + drawn(35), "hf_" + drawn(34), "glpat-" + drawn(20), "npm_" + drawn(36)],
    ],
    "jwt": [
        *[JWT, JWT.replace("e", "e\u200b"), "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0."],
        *[jwt(alg, '{"iss": "joe", "exp": 1300819380}', drawn(86)) for alg in SIGNING],
        *[f"{in_base64(json.dumps({'alg': alg, 'enc': 'A256GCM'}))}.{drawn(40)}.{drawn(16)}"
          f".{drawn(50)}.{drawn(22)}" for alg in WRAPPING],
        "eyJhbGciOiJkaXIifQ..aaaaaaaaaa.bbbbbbbbbbbb.cccccccccc",
        jwt("RS256", drawn(3000), drawn(342)),
        f"eyJhbGci{drawn(30)}.{drawn(8000)}.{drawn(90)}",
    ],
    "private_key": [
        *map(pem, PEMS),
        *[pem(kind).replace("\n", end) for kind in PEMS[:3] for end in ("\\n", "\r\n")],
        *[pem("RSA PRIVATE KEY", 100), pem("PRIVATE KEY").rpartition("\n")[0], PUTTY, SSH2],
        pem("RSA PRIVATE KEY").replace(
            "KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A1B\n\n", 1
        ),
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: GnuPG v2\n\nlQOYBF\n=x1y2\n"
        "-----END PGP PRIVATE KEY BLOCK-----",
        "AGE-SECRET-KEY-1" + drawn(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
    ],
}  # fmt: skip
NEAR: dict[str, list[str]] = {
    "email": [
        *["a@b", "bob at example.com", "@example.com", "bob@", "a @ b.com", "x@y@", "@decorator"],
        *["bob(at)example.com", "bob[at]example[dot]com", "bob@example", "bob@.com", "a@-", "@"],
        *["git@", "example.com", "npm i @types/node", "@app.route('/')", "a@@b.com", "x = a @ b"],
        *["10 @ 5.00", "user@host:", "root@box#", "u/bob", "@bob", "@bob@", "bob@ example.com"],
        *["bob @example.com", "bob.example.com", "mailto:", "@media (x)", "@2x.png", "$@", "#@!"],
        *["me@home", "v1@main", "a@b@c"],
    ],
    "card": [
        *joined(["4111", "1111", "1111", "1112"]),
        *changed(CARDS[:25]),  # the beginning of a longer one may be a card of Maestro
        *["12 2024 18 05 31 07 99", "4111 1111 1111", "1699999999999", "2024-01-02, 2024-02-03"],
        *["1, 22, 3, 44, 5, 66, 7, 88, 9", "0000 0000 0000", "41 11 11 11 11 11 11 11"],
    ],
    "iban": [
        *joined(["DE88", "3704", "0044", "0532", "0130", "00"]),
        *changed(IBANS),
        *["DE89", "AB12 3456 7890 1234"],
    ],
    "phone": [
        *["+49 3", "2024-01-02", "01-02-2024", "0.123456", "1 000 000", "415-555-013", "000123456"],
        *["+1", "x = 030", "10 + 20 = 30", "115-555-0132", "415 155 0132", "0x0049309018"],
        *["3.14159", "12:30:45", "1,234,567", "2024/11/30", "30.11.2026", "007", "0800", "911"],
        *["10.1.2.3", "v1.2.3-4", "ISBN 978", "1-2-3", "100 200 300", "0.5 + 0.25", "0 0 0 0"],
        *["555-0132", "0b1010101", "00:1a:2b", "1e10", "-12345", "5 x 100", "12 34", "3/4", "50%"],
        *["42 of 100", "90-60-90", "24/7", "0-1", "#123456", "chapter 12.3", "page 415"],
    ],
    "us_ssn": [
        *["123-45-678", "219099999", "000-12-3456", "219-00-9999", "219-09-0000", "2024-01-0203"],
        *["12-345-6789", "1234-56-789", "123-456-789", "123 4567 89", "2026-11-30", "123-45"],
        *["219-09-99999", "1219-09-9999", "219-9-9999", "000 00 0000", "555-01-3"],
        *["SSN 21909999", "ssn", "212-555-0132", "12345-6789", "9-87-65", "1.2.3", "10 20 30"],
    ],
    "ip": [
        *["10.0.1", "300.1.2.3", "12:34:56", "00:1a:2b:3c:4d:5e", "std::vector", "abc::def", "::"],
        *["a::b", "1.2.3", "2001:db8", "10:30", "1:2:3:4:5:6:7", "12345::1", "256.0.0.1"],
        *["1.2.3.999", "v1.2", "3.14", "192.168.0", "192.0.2", "10,1,2,3", "10 1 2 3", "10.20.30"],
        *["2001:db8", "1:2:3", "g::1", "::g", "dead:beef", "cafe::babe", "a:b:c"],
        *["x[1:2:3]", "a[::]", "Foo::bar", "12:30:45", "::std", "key: value", "http://", "C:"],
        *["fe80:", "1:2", "00:00:00"],
    ],
    "aws_key": [
        *["AKIA" + "A1" * 7, "da39a3ee5e6b4b0d3255bfef95601890afd80709", "A" * 40, "akia"],
        *["AbstractConfigurationPropertyValueSource", "src/main/java/org/Example1/ExampleTest1x"],
        *["DA39A3EE5E6B4B0D3255BFEF95601890AFD80709", drawn(39), drawn(41)],
        *["thisisafunctionname" * 2, "AKIA", "XAKIAIOSFODNN7EXAMPLE", "AKIB" + "A1" * 8],
        *["AKIA-IOSFODNN7EXAMPLE", "secret_access_key", "secret_key = short", "0" * 40, "ASIAN"],
        *["arn:aws:iam::123456789012:user/bob", "d41d8cd98f00b204e9800998ecf8427e", "AROMA"],
    ],
    "github_token": [
        *["ghp_a", "ghp_" + "a" * 35, "ghx_" + "a" * 36, "github_pat_short", "ghp", "gh_" * 12],
        *["GH-" + drawn(36), "xghp_" + drawn(36), f"ghp-{drawn(36)}", f"ghp {drawn(36)}", "gho_"],
        *["github_pat_", f"github_{drawn(36)}", f"gh{drawn(36)}", "ghost_writer", "ghp_$TOKEN"],
        *["${GITHUB_TOKEN}", "github.com/a/b", "ghs_...", "ghp_xxxx", "ghr_" + drawn(20), "ghu_1"],
    ],
    "secret_key": [
        *["sk-a1", "sk-learn-estimators-and-other-models", "task-force-for-something-very-long"],
        *["sk_live", "disk-" + "a" * 30, "sk-en-ticket-number-and-words", "AIza1", "hf_model"],
        *["sk-...", "sk-proj", "$OPENAI_API_KEY", "sk_prod_" + drawn(24), "pk_live_" + drawn(24)],
        *["xoxo-love-you", "xoxb", "hf_" + drawn(12), "glpat-short", "npm_install", "AIzab-c"],
        *["risk-" + drawn(40), "sk_live_short", "rk_live", "npm_" + drawn(30), "npm-" + drawn(36)],
    ],
    "jwt": [
        *["eyJ.a.b", "eyJhbGciOiJIUzI1NiJ9", "a.b.c", "eyJhbGciOi.short.x", "key.with.dots"],
        *["eyJhbGciOiJIUzI1NiJ9.", "eyJhbGciOiJIUzI1NiJ9..", "eyJ", "www.example.com", "1.2.3"],
        *[f"{in_base64(json.dumps([alg]))}.{drawn(20)}.{drawn(43)}" for alg in SIGNING],
        *[f"x{jwt(alg, '{}', drawn(43))}"[:20] for alg in WRAPPING[:8]],
        *["com.example.someverylong.package", "Bearer", "eyJhbGciOiJIUzI1NiJ9 eyJzdWIiOiIxMjM0In0"],
    ],
    "private_key": [
        *["-----BEGIN KEY-----", "-----BEGIN PUBLIC KEY-----", "BEGIN RSA PRIVATE KEY"],
        *["-----BEGIN CERTIFICATE-----", "AGE-SECRET-KEY-1ABC", "---BEGIN PRIVATE KEY---"],
        *["PRIVATE KEY", "-----END PRIVATE KEY-----", "ssh-ed25519 AAAA", "ssh-rsa AAAA", "-----"],
        *map(pem, ["PUBLIC KEY", "RSA PUBLIC KEY", "CERTIFICATE", "CERTIFICATE REQUEST"]),
        *map(pem, ["X509 CRL", "PGP PUBLIC KEY BLOCK", "PGP MESSAGE", "CMS", "DH PARAMETERS"]),
        *["private_key = None", "PuTTY-User-Key-File-3", "age1" + "q" * 58],
    ],
}
