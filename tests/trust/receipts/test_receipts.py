"""Receipts of a server's answers: what is asked for, what stands in them, what is never there."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from ridgeline import LLM
from ridgeline.serve.http.options import ServeOptions
from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.receipts.compare import wrong_in_file
from ridgeline.trust.receipts.reading import read
from ridgeline.trust.receipts.statement import digest_of, parts_of
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG
from tests.serve.serving import Served, composed, serving
from tests.trust.receipts.requests import (
    APIS,
    CHAT,
    HELLO,
    LONG,
    REQUESTS,
    SMALL,
    TEXT,
    Verifier,
    checked,
    file_of,
    receipt_of,
    statement_of,
    stating,
    written,
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    write_peft(path / "a", random_pairs(llama_shapes(CONFIG), 4, seed=3), lora_alpha=16)
    return path / "a"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "receipt.key"


@pytest.fixture(scope="module")
def receipt_signer(roomy: Path, adapter: Path, key: Path) -> Iterator[Served]:
    engine = {"lora": {"a": adapter}, "enable_contrastive_search": True}
    with serving(roomy, engine, receipt_key=key) as served:
        yield served


@pytest.fixture(scope="module")
def verifier(roomy: Path, adapter: Path) -> Iterator[Verifier]:
    found = Verifier(roomy, lora={"other": adapter}, enable_contrastive_search=True)
    yield found
    found.close()


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_of_its_receipt(
    receipt_signer: Served, verifier: Verifier, name: str
) -> None:
    receipt = receipt_of(receipt_signer, *REQUESTS[name])
    assert verifier.wrong(written(receipt)) == []
    (prompt, *_) = statement_of(receipt)["predicate"]["prompts"]
    assert all(one["tokens"]["ids"] for one in prompt["answers"])


def shouted(value: Any) -> Any:
    """Return an answer with other texts, beside its receipt."""
    if isinstance(value, dict):
        return {name: one if name == "receipt" else shouted(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(shouted, value))
    return f"{value}!" if isinstance(value, str) else value


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_each_api_has_receipts(
    receipt_signer: Served, verifier: Verifier, name: str, is_streamed: bool
) -> None:
    """A file with the answer is verified as it came, and its texts are those of the receipt."""
    _, _, places = APIS[name]
    data = file_of(receipt_signer, name, is_streamed=is_streamed)
    signed = checked(verifier, data)
    assert [place for place, _ in signed.subject][: len(places)] == places  # calls may follow
    if not is_streamed:
        other = read(json.dumps(shouted(json.loads(data))).encode())
        assert other.shown is not None
        found = list(wrong_in_file(other.receipt, other.subject, other.shown))
        for place, _ in signed.subject:
            assert any(one.startswith(f"{place} is ") for one in found), place


def test_text_on_both_sides_of_a_call_is_stated_in_parts_too() -> None:
    """Anthropic's and the Responses API show it apart."""
    pieces = [
        MessageDelta("content", "a"),
        MessageDelta("content", "b"),
        MessageDelta("call", "send"),
    ]
    pieces += [MessageDelta("arguments", "{}"), MessageDelta("content", "c")]
    texts = {"content": "abc", "content[0]": "ab", "content[1]": "c"}
    texts |= {"tool_calls[0].function.name": "send", "tool_calls[0].function.arguments": "{}"}
    assert parts_of(pieces) == {name: digest_of(text) for name, text in texts.items()}


def test_who_has_the_text_finds_it_in_the_receipt(receipt_signer: Served) -> None:
    body = HELLO | {"receipt": True, "n": 2}
    _, answer, _ = receipt_signer.call(CHAT, body)
    digests = {
        f"choices[{one['index']}].message.content": hashlib.sha256(
            one["message"]["content"].encode()
        ).hexdigest()
        for one in answer["choices"]
    }
    subject = statement_of(answer["receipt"])["subject"]
    assert {one["name"]: one["digest"]["sha256"] for one in subject} == digests
    path, asked = REQUESTS["a call"]
    _, answer, _ = receipt_signer.call(path, asked | {"receipt": True})
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    said = {
        one["name"]: one["digest"]["sha256"] for one in statement_of(answer["receipt"])["subject"]
    }
    for part in ("name", "arguments"):
        place = f"choices[0].message.tool_calls[0].function.{part}"
        assert said[place] == hashlib.sha256(call["function"][part].encode()).hexdigest()


def test_the_signature_is_that_of_dsse_by_the_key_that_the_server_tells(
    receipt_signer: Served, key: Path
) -> None:
    receipt = receipt_of(receipt_signer, CHAT, HELLO)
    _, told, _ = receipt_signer.call("/v1/receipts/key")
    public = load_pem_public_key(told["public_key"].encode())
    assert isinstance(public, Ed25519PublicKey)
    payload, kind = base64.b64decode(receipt["payload"]), receipt["payloadType"]
    (signature,) = receipt["signatures"]
    assert signature["keyid"] == told["keyid"]
    signed = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    public.verify(base64.b64decode(signature["sig"]), signed)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_without_the_field_there_is_none_and_odd_wishes_are_refused(receipt_signer: Served) -> None:
    for body in (LONG, LONG | {"receipt": False}, LONG | {"receipt": None}):
        assert "receipt" not in receipt_signer.call(TEXT, body)[1]
    for path, body, name in (
        (TEXT, LONG | {"echo": True}, "echo"),
        (TEXT, LONG | {"max_tokens": 0}, "max_tokens"),
        ("/completion", {"prompt": "The cat", "n_predict": 0}, "n_predict"),
        ("/completion", {"prompt": "The cat", "n_indent": 2}, "n_indent"),
        (CHAT, HELLO | {"receipt": "yes"}, "receipt"),
    ):
        status, error = receipt_signer.refused(path, {"receipt": True} | body)
        assert (status, error["param"]) == (400, "receipt")
        assert name in error["message"]


RULES = """
version = "7"
[keys.default]
output = ["letters"]
[rules]
letters = { patterns = ["[a-m]+"], word = false, action = "ACTION" }
"""


@pytest.mark.parametrize("action", ["redact", "block"])
def test_a_receipt_does_not_tell_what_rules_hide(
    roomy: Path, verifier: Verifier, key: Path, tmp_path: Path, action: str
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.replace("ACTION", action))
    body = LONG | {"max_tokens": 40, "seed": 1, "temperature": 2.0, "logprobs": 2, "receipt": True}
    with serving(roomy, receipt_key=key, rules=rules) as served:
        _, found, _ = served.call(TEXT, body)
    (choice,), receipt = found["choices"], found["receipt"]
    ends = "content_filter" if action == "block" else "length"
    assert choice["finish_reason"] == ends
    assert ("[LETTERS]" in choice["text"]) == (action == "redact")
    statement = statement_of(receipt)
    assert statement["predicate"]["rules"] == "7/default"
    (subject,) = statement["subject"]
    assert subject["digest"]["sha256"] == hashlib.sha256(choice["text"].encode()).hexdigest()
    (answer,) = statement["predicate"]["prompts"][0]["answers"]
    assert set(answer["tokens"]) == {"num", "sha256", "salt"}
    assert (answer["parts"], answer["logprobs"], answer["finish"]) == ({}, None, ends)
    prompt = verifier.llm(read(written(receipt))).tokenizer.encode(LONG["prompt"])
    assert verifier.wrong(written(receipt), prompt) == []
    assert verifier.wrong(written(receipt), prompt[1:]) == ["prompt 0 is not the receipt's"]
    answer["tokens"]["salt"] = "00" * 16
    (wrong,) = verifier.wrong(stating(receipt, statement), prompt)
    assert "has other tokens: only the digest of its" in wrong


def start(model: Path, key: Path) -> None:
    """Put a server together that signs with a key."""
    with LLM(model, **SMALL) as llm:
        composed(llm, ServeOptions(receipt_key=key))


def test_a_key_that_cannot_be_had(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.key"
    bad.write_text("no key")
    with pytest.raises(ValueError, match=r"bad\.key is not a key that can sign receipts"):
        start(model, bad)
    with serving(model) as served:
        monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
        (tmp_path / "receipt.key").write_text("no key")
        assert served.refused(TEXT, LONG | {"receipt": True})[1]["code"] == "receipts_failed"
        assert served.call("/v1/receipts/key")[0] == 503
        assert served.call(TEXT, LONG)[0] == 200


def test_without_the_package_receipts_are_not_signed(
    model: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ridgeline[receipts] is not installed."""
    for name in [one for one in sys.modules if one.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with serving(model) as served:
        assert receipt_of(served, TEXT, LONG)["signatures"] == []
        status, answer, _ = served.call("/v1/receipts/key")
        assert (status, answer["error"]["code"]) == (404, "receipts_unsigned")
    with pytest.raises(ValueError, match=r"pip install 'ridgeline\[receipts\]'"):
        start(model, key.with_name("other.key"))


def test_nothing_is_imported_where_nobody_asks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, ridgeline.trust.stages, ridgeline.fleet.main, ridgeline.cli.main\n"
    code += "print(*sorted(m for m in sys.modules if 'receipts' in m or 'cryptography' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    for name in ("ridgeline.trust.receipts.receipt_signer", "ridgeline.trust.receipts.signing"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it is an error
    for path, body in ((TEXT, LONG), (CHAT, HELLO), (CHAT, HELLO | {"stream": True})):
        assert served.call(path, body)[0] == 200
