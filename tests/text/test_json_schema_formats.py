"""Formats of strings: all of JSON Schema 2020-12 are held to, or named as not enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator

import idna
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.grammar.grammars import Grammars, Source
from ridgeline.text.json_schema import written
from ridgeline.text.json_schema.shapes import FORMATS
from tests.text.grammar.test_grammars import EOS, Bytes
from tests.text.test_json_schema_pairs import accepts

HELD: dict[str, tuple[list[str], list[str]]] = {  # texts that have the format, and that have not
    "date-time": (["2024-02-29T23:59:59.5Z", "0001-01-01t00:00:00+01:30"],
                  ["2023-02-29T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:00"]),
    "date": (["2024-02-29"], ["2023-02-29", "2024-13-01", "24-01-01"]),
    "time": (["23:59:59Z", "08:30:06.283185+00:20"], ["24:00:00Z", "08:30:06", "8:30:06Z"]),
    "duration": (["P3DT1H", "P2W", "PT0S", "P1Y2M3D"], ["P", "PT", "P1W1D", "1D", "P1D2H"]),
    "email": (["a.b+c@d-e.org", "x@[127.0.0.1]"], ["a", "a@", ".a@b.c", "a..b@c.d", "ü@b.c"]),
    "idn-email": (["a.b@c.org", "bärbel.ü@müller.de", "实例@实例.测试"],
                  ["a", "ü@", ".ü@b.c", "a b@c.d"]),
    "hostname": (["a", "a-b.c3.org"], ["", "-a.b", "a-.b", "a_b", "ü.de", "a." + "b" * 64]),
    "idn-hostname": (["a-b.org", "bücher.example", "실례.테스트", "xyz1.ελ"],
                     ["", "-ü.de", "ü-.de", "a b", "〮ab", "ab--cd.de", "ü" * 64]),
    "ipv4": (["0.0.0.0", "255.249.10.1"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "fe80::a:b"], ["1", ":::", "1::2::3", "12345::"]),
    "uri": (["http://a@[::1]:80/b?c=%20#d", "urn:isbn:1", "mailto:a@b.c", "x:"],
            ["", "a", "//a/b", "/a", "http://a b", "http:// a", "1a:b", "http://ü.de", "a:%2"]),
    "uri-reference": (["", "a", "/a/b", "//a:1/b?c#d", "../x", "?q", "#f", "./a:b", "http://a"],
                      ["a b", "\\\\a", "%2", "1:b", "ü", "[a]", "#a#b"]),
    "iri": (["http://ü.de/日本?é#ö", "http://a/b", "urn:ß"],
            ["ü", "/ü", "ü:a", "http://ü .de", "http://a\u200e\ue000"]),
    "iri-reference": (["ü/é?日#本", "", "//ü", "http://ü.de", "a"], ["a b", "ü:a", "\\\\ü", "%é"]),
    "uuid": (["2EB8AA08-aa98-11ea-b4aa-73b441d16380"],
             ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380"]),
    "uri-template": (["http://a/{b}/{+c,d*,e:3}{?f}", "", "{#a.b}ü", "%20{a%20}"],
                     ["{", "a}", "{}", "{a,}", "{!a}", "{a:0}", "a b", "<", "%2"]),
    "json-pointer": (["", "/", "/a~0b~1c/0", "//ü"], ["a", "/~", "/~2", "#/a"]),
    "relative-json-pointer": (["0", "1/a", "12#", "0/~1"], ["", "/a", "01", "-1", "1##", "1a"]),
}  # fmt: skip
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER  # of a few of them
NAMED = ["regex"]  # a grammar cannot count its brackets
OF_2020_12 = [*HELD, *NAMED]


@pytest.fixture(scope="module")
def of_bytes() -> Iterator[Grammars]:
    found = Grammars(Bytes(), [EOS], timeout_s=20)  # type: ignore[arg-type]
    yield found
    found.close()


def test_the_table_has_all_that_the_standard_defines() -> None:
    assert sorted(OF_2020_12) == sorted([
        "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
        "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
        "json-pointer", "relative-json-pointer", "regex",
    ])  # fmt: skip
    assert sorted(HELD) == sorted(FORMATS)


@pytest.mark.parametrize("name", HELD)
def test_an_answer_keeps_to_a_format(of_bytes: Grammars, name: str) -> None:
    schema = {"type": "string", "format": name}
    source = Source("json", json.dumps(schema))
    assert of_bytes.constraint(source).ignored == ()
    for is_good, texts in zip((True, False), HELD[name], strict=True):
        for text in texts:
            shown = json.dumps(text, ensure_ascii=False)
            assert accepts(of_bytes, source, shown) == is_good, text
            if is_good and name in CHECKER.checkers:
                CHECKER.check(text, name)


@pytest.mark.parametrize("name", [*NAMED, "password", "int32", "no such"])
def test_what_is_not_enforced_is_named(of_bytes: Grammars, name: str) -> None:
    """It is an annotation, so neither an answer's form nor a strict tool is refused for it."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}}}
    new = of_bytes.constraint(Source("json", json.dumps(schema)))
    assert new.ignored == ("schema.properties.a.format",)
    assert accepts(of_bytes, Source("json", json.dumps(schema)), '{"a":"anything ("}')
    for is_strict in (True, False):
        found = written(schema, is_strict=is_strict, at="tools[0].function.parameters")
        assert found.ignored == ("tools[0].function.parameters.properties.a.format",)


@given(st.from_regex(FORMATS["idn-hostname"], fullmatch=True))
def test_every_host_of_other_letters_is_one(host: str) -> None:
    assert len(idna.encode(host.removesuffix("\n"))) < 256
