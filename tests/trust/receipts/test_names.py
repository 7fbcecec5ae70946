"""Receipts of what is asked for by a further name of a model, and where there can be none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.files.tiny import CONFIG
from tests.serve.serving import Served, serving
from tests.trust.receipts.requests import APIS, Verifier, checked, file_of, statement_of

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<answer>"
CREATED: dict[str, dict[str, Any]] = {
    "brief": {"from": "tiny", "system": "Be brief.", "parameters": {"seed": 7, "num_predict": 9}},
    "cold": {"from": "tiny", "parameters": {"temperature": 0, "stop": ["e"], "top_k": 5}},
    "other": {"from": "tiny", "template": TEMPLATE},
    "taught": {"from": "tiny", "messages": [{"role": "user", "content": "Say x"}]},
    "adapted": {"from": "a", "parameters": {"repeat_penalty": 1.3}},
}
NAMES = [*CREATED, "twin", "twin:latest", "gpt-4o", "tiny:latest"]
DROPPED = "x-ridgeline-ignored"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "a"
    write_peft(path, random_pairs(llama_shapes(CONFIG), 4, seed=3), lora_alpha=16)
    return path


@pytest.fixture(scope="module")
def named(roomy: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    options = {"receipt_key": home / "receipt.key", "served_model_name": ["tiny", "gpt-4o"]}
    with serving(roomy, {"lora": {"a": adapter}}, home, **options) as served:
        for name, fields in CREATED.items():
            status, answer, _ = served.call(
                "/api/create", {"model": name, "stream": False} | fields
            )
            assert status == 200, answer
        assert served.call("/api/copy", {"source": "brief", "destination": "twin"})[0] == 200
        yield served


@pytest.fixture(scope="module")
def verifier(roomy: Path, adapter: Path) -> Iterator[Verifier]:
    found = Verifier(roomy, lora={"other": adapter})
    yield found
    found.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_receipt_by_a_further_name_is_that_of_the_model(
    named: Served, verifier: Verifier, api: str, is_streamed: bool
) -> None:
    for name in NAMES:
        signed = checked(verifier, file_of(named, api, is_streamed=is_streamed, model=name))
        assert signed.receipt.model.name == "tiny"
        assert bool(signed.receipt.adapter) == (name == "adapted")


def test_what_a_name_adds_is_in_the_receipt(named: Served) -> None:
    """Or the test above would show nothing."""
    path, body, _ = APIS["a chat"]

    def stated(name: str) -> Any:
        answer = named.call(path, body | {"model": name, "receipt": True})[1]
        return statement_of(answer["receipt"])["predicate"]

    plain, brief, other = stated("tiny"), stated("brief"), stated("other")
    assert brief["prompts"][0]["seed"] == stated("twin")["prompts"][0]["seed"] == 7
    ids = [one["prompts"][0]["tokens"]["ids"] for one in (plain, brief, other, stated("taught"))]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])
    assert stated("cold")["params"]["temperature"] == 0
    assert stated("adapted")["params"]["repetition_penalty"] == 1.3


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("route", ["generate", "generate_stream", "infer"])
def test_triton_has_no_place_for_a_receipt_and_says_so(
    named: Served, route: str, is_nested: bool
) -> None:
    body: dict[str, Any] = {"text_input": "Hello", "max_tokens": 3}
    if route == "infer":
        text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}
        body = {"inputs": [text], "parameters": {"max_tokens": 3}}
    body |= {"parameters": {"max_tokens": 3, "receipt": True}} if is_nested else {"receipt": True}
    status, answer, headers = named.call(f"/v2/models/tiny/{route}", body)
    assert status == 200, answer
    assert headers[DROPPED] == "receipt"
    assert "payload" not in json.dumps(str(answer))
