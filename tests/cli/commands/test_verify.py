"""``ridgeline verify``: what it says of a receipt, and how it exits."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ridgeline.cli.main import app
from ridgeline.trust.receipts.reading import MOST_BYTES
from ridgeline.trust.receipts.signing import Signer
from tests.serve.serving import serving
from tests.trust.receipts.requests import (
    CHAT,
    LONG,
    TEXT,
    receipt_of,
    statement_of,
    stating,
    written,
)

Made = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A receipt of the random model's, and its signer's key."""
    key = tmp_path_factory.mktemp("keys") / "receipt.key"
    with serving(model, receipt_key=key) as served:
        return receipt_of(served, TEXT, LONG | {"seed": 3}), key


def verified(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def given(folder: Path, data: bytes) -> Path:
    file = folder / "receipt.json"
    file.write_bytes(data)
    return file


def changed(receipt: dict[str, Any], change: Callable[[Any], object]) -> bytes:
    """Return the file of a receipt whose predicate is changed."""
    statement = statement_of(receipt)
    change(statement["predicate"])
    return stating(receipt, statement)


def test_an_answer_that_is_the_receipts(made: Made, model: Path, tmp_path: Path) -> None:
    receipt, key = made
    file = given(tmp_path, written(receipt))
    public = tmp_path / "public.pem"
    public.write_text(Signer(key).public.pem)
    for one in (public, key):
        done = verified(file, model, "--key", one)
        assert done.exit_code == 0, done.output
        first, signed, texts, last = done.output.splitlines()
        assert first.startswith(f"{file}: 14 tokens of tiny by ridgeline 0.1.0, 20")
        assert signed.startswith("  signed with the key ")
        assert texts == "  the file has the receipt alone, so no texts are compared with it"
        assert last == "EQUAL: computed again, every token is the same"
    asked = tmp_path / "asked.json"
    for prompt, status in (("The cat", 0), ("The dog", 1)):
        asked.write_text(json.dumps(prompt))
        assert verified(file, model, "--key", key, "--prompt", asked).exit_code == status
    done = verified(given(tmp_path, stating(receipt, statement_of(receipt))), model)
    assert done.exit_code == 0
    assert "it is not signed: anybody may have written it" in done.output


def other_token(said: Any) -> None:
    ids = said["prompts"][0]["answers"][0]["tokens"]["ids"]
    ids[9] = 50 if ids[9] != 50 else 51


def no_end(said: Any) -> None:
    said["prompts"][0]["answers"][0]["tokens"]["ids"].pop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_token, "answer 0 to prompt 0 differs from token 9 of 14 on: 5"),
        (no_end, "answer 0 to prompt 0 has 13 tokens, but the computed answer continues: "),
        (
            lambda said: said["params"].update(max_tokens=15),
            "has 14 tokens, but the computed answer continues",
        ),
        (
            lambda said: said["params"].update(max_tokens=13),
            "but the computed answer ends after 13",
        ),
        (lambda said: said["prompts"][0].update(seed=4), "answer 0 to prompt 0 differs from token"),
        (lambda said: said.update(template="0" * 64), "the chat template differs"),
        (lambda said: said.update(adapter="00ff"), "no adapter here has the digest 00ff"),
        (
            lambda said: said["model"]["files"].update({"config.json": "0" * 64}),
            "the file config.json differs: the receipt has 000000000000, this machine ",
        ),
        (
            lambda said: said["prompts"][0]["answers"][0]["tokens"]["ids"].append(1 << 20),
            "has the token 1048576, and this model's ids end at 409",
        ),
        (
            lambda said: said["prompts"][0]["answers"][0].update(parts={"content": "0" * 64}),
            "has another text than its tokens: content",
        ),
        (
            lambda said: said["prompts"][0]["answers"][0].update(parts={}),
            "has another text than its tokens: content",
        ),
        (
            lambda said: said["prompts"][0]["answers"][0].update(finish="stop"),
            "ended differently: stop (None) in the receipt, length (None) computed",
        ),
    ],
)
def test_what_is_not_equal_is_told(
    made: Made, model: Path, tmp_path: Path, change: Callable[[Any], object], says: str
) -> None:
    done = verified(given(tmp_path, changed(made[0], change)), model)
    assert done.exit_code == 1, done.output
    assert says in done.output
    assert done.output.splitlines()[-1] == "NOT EQUAL"


# --- forged answers -------------------------------------------------------------------------------

FAKE = "The capital of France is Berlin."
CALL = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": "{}"}}


@pytest.fixture(scope="module")
def chat(model: Path, made: Made) -> dict[str, Any]:
    """A whole answer of a chat, with its receipt."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "receipt": True}
    with serving(model, receipt_key=made[1]) as served:
        status, answer, _ = served.call(CHAT, body)
    assert status == 200
    found: dict[str, Any] = answer
    return found


def unsigned(chat: Any, change: Callable[[Any], object], text: str | None = None) -> None:
    """Put a statement into an answer that nobody signed, and another text, if there is one."""
    statement = statement_of(chat["receipt"])
    change(statement)
    chat["receipt"] = json.loads(stating(chat["receipt"], statement))
    if text is not None:
        chat["choices"][0]["message"]["content"] = text


def fitting(statement: Any, text: str, rules: str | None) -> None:
    """Let a statement be about another text, which a rule is said to have made."""
    for one in statement["subject"]:
        one["digest"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    statement["predicate"]["rules"] = rules
    statement["predicate"]["prompts"][0]["answers"][0]["parts"] = {}


def cut(statement: Any, rules: str | None) -> None:
    """Let a rule be said to have ended an answer after three tokens."""
    fitting(statement, "", rules)
    one = statement["predicate"]["prompts"][0]["answers"][0]
    one["tokens"]["ids"] = one["tokens"]["ids"][:3]
    one |= {"finish": "content_filter", "stop": None}


FORGED: dict[str, tuple[Callable[[Any], object], str]] = {
    "another text": (
        lambda chat: chat["choices"][0]["message"].update(content=FAKE),
        "wrong: choices[0].message.content is not the text that the receipt is about",
    ),
    "another text, and no subject": (
        lambda chat: unsigned(chat, lambda said: said.update(subject=[]), FAKE),
        "wrong: choices[0].message.content is not in the receipt",
    ),
    "no subject": (
        lambda chat: unsigned(chat, lambda said: said.update(subject=[])),
        "wrong: choices[0].message.content is not in the receipt",
    ),
    "another text, said to be of a rule": (
        lambda chat: unsigned(chat, lambda said: fitting(said, FAKE, "x/default"), FAKE),
        "PARTLY EQUAL: the 8 tokens are the same; rules may have changed the texts",
    ),
    "another text that fits": (
        lambda chat: unsigned(chat, lambda said: fitting(said, FAKE, None), FAKE),
        "has another text than its tokens: content",
    ),
    "cut, said to be by no rule": (
        lambda chat: unsigned(chat, lambda said: cut(said, None), ""),
        "an answer that a rule ended, and rules is null",
    ),
    "cut, said to be by a rule": (
        lambda chat: unsigned(chat, lambda said: cut(said, "x/default"), ""),
        "PARTLY EQUAL: the 3 tokens are the same, where a rule ended 1 of 1 answers",
    ),
    "a call and thoughts": (
        lambda chat: chat["choices"][0]["message"].update(
            reasoning_content=FAKE, tool_calls=[CALL]
        ),
        "wrong: choices[0].message.reasoning_content is not in the receipt",
    ),
    "a second choice": (
        lambda chat: chat["choices"].append(chat["choices"][0] | {"index": 1}),
        "wrong: choices[1].message.content is not in the receipt",
    ),
    "a signature of nobody": (
        lambda chat: chat["receipt"].update(signatures=[{"keyid": "00", "sig": "AAAA"}]),
        "wrong: signatures[0] is none",
    ),
    "a signature of somebody": (
        lambda chat: chat["receipt"].update(
            signatures=[{"keyid": "0" * 64, "sig": base64.b64encode(bytes(64)).decode()}]
        ),
        "EQUAL, but its signature was not checked",
    ),
    "a count": (
        lambda chat: chat["usage"].update(completion_tokens=9),
        "wrong: usage.completion_tokens is 9, which is not what the receipt says",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_answers_are_not_equal(
    chat: dict[str, Any], model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))  # where no key is
    forged, (change, says) = copy.deepcopy(chat), FORGED[name]
    change(forged)
    done = verified(given(tmp_path, json.dumps(forged).encode()), model)
    assert says in f"{done.output}{done.exception}"
    assert (done.output.splitlines() or [""])[
        -1
    ] != "EQUAL: computed again, every token is the same"
    assert done.exit_code == (3 if "PARTLY" in says else 0 if "EQUAL, but" in says else 1)


def test_a_whole_answer_is_equal(
    chat: dict[str, Any], made: Made, model: Path, tmp_path: Path
) -> None:
    done = verified(given(tmp_path, json.dumps(chat).encode()), model, "--key", made[1])
    assert done.exit_code == 0, done.output
    *_, texts, told, last = done.output.splitlines()
    assert texts == "  its texts are the receipt's: choices[0].message.content"
    assert told == "  not compared, as only the server says it: created, prompt_tokens_details"
    assert last == "EQUAL: computed again, every token is the same"


def test_a_field_that_is_there_twice_is_no_answer(
    chat: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Which of them a reader sees is up to the reader."""
    data = json.dumps(chat).encode()
    twice = b'"content": "Berlin", "content": '
    done = verified(given(tmp_path, data.replace(b'"content": ', twice, 1)), model)
    assert "the field content is there twice" in str(done.exception)
    payload = base64.b64decode(chat["receipt"]["payload"])
    payload = payload.replace(b'"subject":', b'"subject":[],"subject":', 1)
    lied = chat["receipt"] | {"payload": base64.b64encode(payload).decode(), "signatures": []}
    done = verified(given(tmp_path, written(lied)), model)
    assert "the field subject is there twice" in str(done.exception)


def test_another_code_is_a_note(made: Made, model: Path, tmp_path: Path) -> None:
    """So a release is compared with receipts of the one before."""
    done = verified(
        given(tmp_path, changed(made[0], lambda said: said.update(code="0" * 64))), model
    )
    assert done.exit_code == 0
    assert "note: the code differs: the receipt has 000000000000, this machine " in done.output


def test_a_model_file_that_was_changed_is_named(made: Made, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    done = verified(given(tmp_path, written(made[0])), other, "--key", made[1])
    assert done.exit_code == 1
    assert "wrong: the file model.safetensors differs" in done.output


def test_by_default_only_receipts_of_ones_own_key_are_checked(
    made: Made, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who runs a server has a key; receipts of others are then not wrong for that."""
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    receipt, key = made
    file = given(tmp_path, written(receipt))
    not_checked = f"signed with the key {Signer(key).public.name[:16]}, which was not checked"
    assert not_checked in verified(file, model).output
    Signer(tmp_path / "receipt.key")
    done = verified(file, model)
    assert (done.exit_code, not_checked in done.output) == (0, True)
    shutil.copy(key, tmp_path / "receipt.key")
    assert f"of {tmp_path / 'receipt.key'}" in verified(file, model).output
    (signature,) = receipt["signatures"]
    lied = receipt | {"signatures": [signature | {"sig": "AAAA"}]}
    assert verified(given(tmp_path, written(lied)), model).exit_code == 1


def test_signatures(made: Made, model: Path, tmp_path: Path) -> None:
    receipt, key = made
    other = Signer(tmp_path / "other.key")
    whole = base64.b64decode(receipt["payload"])
    lied = base64.b64encode(whole.replace(b"ridgeline 0.1.0", b"ridgeline 0.1.1")).decode()
    for one in (
        receipt | {"signatures": [other.sign(whole)]},
        receipt | {"payload": lied},
        receipt | {"signatures": [{"keyid": "", "sig": "AAAA"}]},
        receipt | {"signatures": [{"sig": 5}]},
    ):
        done = verified(given(tmp_path, written(one)), model, "--key", key)
        assert done.exit_code == 1
        assert f"wrong: it is not signed with the key of {key}, or was changed since" in done.output
    done = verified(given(tmp_path, written(receipt)), model, "--key", given(tmp_path, b"no key"))
    assert done.exit_code != 0


def test_a_receipt_without_a_signature_is_never_plainly_equal(
    made: Made, model: Path, tmp_path: Path
) -> None:
    """Its parameters are the word of who gives it: they may have been made to fit its tokens."""
    receipt, key = made
    file = given(tmp_path, written(receipt | {"signatures": []}))
    done = verified(file, model)
    *_, last = done.output.splitlines()
    assert last == "EQUAL, but it is not signed: computed again, every token is the same"
    assert done.exit_code == 0
    done = verified(file, model, "--key", key)
    assert f"wrong: it is not signed, and {key} is to check that" in done.output
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "this is not JSON"),
        (b"\xff\xfe", "this is not JSON"),
        (b"[]", "it must be an object"),
        (b"{}", "payloadType is missing"),
        (b"[" * 100_000, "recursion limit exceeded"),
        (b" " * (MOST_BYTES + 1), "a receipt has 33,554,432 at most"),
        (b'{"payloadType": "x", "payload": ""}', "is not a receipt: payloadType is 'x'"),
    ],
)
def test_what_is_no_receipt(tmp_path: Path, data: bytes, says: str) -> None:
    done = verified(given(tmp_path, data), "any")
    assert done.exit_code == 1
    assert isinstance(done.exception, ValueError)
    assert says in str(done.exception)


def last_of(name: str, value: Any) -> Callable[[Any], object]:
    return lambda said: said["prompts"][0]["answers"][0].update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda said: said.update(odd=1), "odd is not known in a receipt"),
        (lambda said: said.pop("code"), "code is missing"),
        (
            lambda said: said["params"].update(temperature=float("nan")),
            "params: temperature is nan",
        ),
        (lambda said: said["params"].update(temperatur=1.0), "temperatur"),
        (
            lambda said: said["params"].update(temperature=1.0),
            "is missing, or not allowed in a receipt",
        ),
        (lambda said: said["params"].update(top_p=7), "top_p is 7"),
        (lambda said: said["params"].update(n=2), "has 1 answers, and params ask for 2"),
        (lambda said: said["params"].update(pool="last"), "pool"),
        (lambda said: said.update(max_model_len=0), "max_model_len is 0"),
        (lambda said: said.update(prompts=[]), "prompts is empty"),
        (lambda said: said["prompts"][0]["tokens"].update(ids=[]), "there are no tokens"),
        (
            lambda said: said["prompts"][0]["tokens"].update(ids=[-1]),
            "ids[0] is -1: it must be greater than or equal to 0",
        ),
        (lambda said: said["prompts"][0].update(seed=1 << 70), "seed is 1180591620717411303424"),
        (lambda said: said.update(parsers=["hermes", "odd"]), "no parser of reasoning"),
        (lambda said: said.update(adapter="odd"), "it must be a digest in hex"),
        (last_of("finish", None), "finish is None: it must be a valid string"),
        (last_of("finish", "content_filter"), "an answer that a rule ended, and rules is null"),
    ],
)
def test_bad_fields_are_named(
    made: Made, tmp_path: Path, change: Callable[[Any], object], says: str
) -> None:
    done = verified(given(tmp_path, changed(made[0], change)), "any")
    assert done.exit_code == 1
    assert isinstance(done.exception, ValueError)
    assert says in str(done.exception)


def test_a_version_that_is_not_known(made: Made, tmp_path: Path) -> None:
    statement = statement_of(made[0])
    statement["predicateType"] = statement["predicateType"].replace("v1", "v2")
    done = verified(given(tmp_path, stating(made[0], statement)), "any")
    assert "v2': this version reads https://github.com" in str(done.exception)


def test_the_model_must_be_here_or_named(made: Made, tmp_path: Path) -> None:
    """A receipt, which anybody may have written, makes nothing be pulled or read elsewhere."""
    for name in ("tiny", "/etc/passwd", "../x", "org/model"):
        change = changed(made[0], lambda said, name=name: said["model"].update(name=name))
        done = verified(given(tmp_path, change))
        assert done.exit_code != 0
        assert f"no model {name!r} is here: name the receipt's model (sha256 " in str(
            done.exception
        )


def test_a_hidden_prompt_must_be_given(made: Made, model: Path, tmp_path: Path) -> None:
    hidden = {"num": 2, "sha256": "0" * 64, "salt": ""}
    file = given(tmp_path, changed(made[0], lambda said: said["prompts"][0].update(tokens=hidden)))
    assert "give --prompt FILE" in str(verified(file, model).exception)
    asked = tmp_path / "asked.json"
    for text, says in (("{", "is not JSON"), ('{"odd": 1}', "a prompt is"), ("[[1e5]]", "")):
        asked.write_text(text)
        done = verified(file, model, "--prompt", asked)
        assert done.exit_code != 0
        assert says in str(done.exception)
    asked.write_text('"The cat"')
    assert "prompt 0 is not the receipt's" in verified(file, model, "--prompt", asked).output


def test_a_chat_is_compared_with_its_messages(model: Path, made: Made, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with serving(model, receipt_key=made[1]) as served:
        receipt = receipt_of(served, CHAT, {"messages": messages, "max_tokens": 4})
    file, asked = given(tmp_path, written(receipt)), tmp_path / "asked.json"
    asked.write_text(json.dumps(messages))
    done = verified(file, model, "--key", made[1], "--prompt", asked)
    assert done.exit_code == 0, done.output
