"""Slots that are saved by a name: their prompts are cached again after a restart, for their key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.answers.tiny_families import write_family
from tests.engine.test_llm import model
from tests.serve.serving import Served, serving

__all__ = ["model"]  # a fixture

PROMPT = [5 + i % 90 for i in range(40)]
ASKED = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True, "id_slot": 1}
A, B = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}


def kept(folder: Path) -> dict[str, Any]:
    """The prompts are shorter than what is written without being asked."""
    return {"kv_disk": f"{folder}:64MiB"}


@pytest.fixture(scope="module")
def two_keys(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kept")
    with serving(model, kept(folder), api_key=["a", "b"], max_queued_requests=8) as served:
        yield served


def asked(served: Served, **headers: str) -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt's were cached."""
    status, found, _ = served.call("/completion", ASKED | {"return_tokens": True}, **headers)
    assert (status, found["id_slot"]) == (200, 1)
    return found["tokens"], found["timings"]["cache_n"]


def act(served: Served, slot: int, action: str, name: str, **headers: str) -> dict[str, Any]:
    path, body = f"/slots/{slot}?action={action}", {"filename": name}
    status, found, _ = served.call(path, body, **headers)
    assert status == 200, found
    assert found.pop("timings").keys() == {f"{action}_ms"}
    assert (found.pop("id_slot"), found.pop("filename")) == (slot, name)
    return dict(found)


def wrong(served: Served, path: str, name: str = "x.bin", **headers: str) -> tuple[int, str]:
    status, error = served.refused(path, {"filename": name}, **headers)
    return status, error["message"]


def test_what_was_saved_is_restored_where_it_can_be_used(model: Path, tmp_path: Path) -> None:
    with serving(model, kept(tmp_path)) as served:
        first, cached = asked(served)
        assert cached == 0
        saved = act(served, 1, "save", "one.bin")
        assert saved["n_saved"] == 48, "whole blocks of 40 + 12 tokens, the last not computed"
    with serving(model, kept(tmp_path) | {"kv_cache_dtype": "f32"}) as served:
        status, words = wrong(served, "/slots/1?action=restore", "one.bin")
        said = "was saved by tiny with formats cpu auto int8 (here cpu auto f32), another "
        assert (status, said in words) == (400, True), words
    with serving(model, kept(tmp_path) | {"enable_lora": True}) as served:
        assert act(served, 0, "restore", "one.bin")["n_restored"] == 48
        assert asked(served) == (first, 32), "room for adapters changes no block"
    with serving(model, kept(tmp_path)) as served:
        assert act(served, 0, "restore", "one.bin") == {
            "n_restored": 48,
            "n_read": saved["n_written"],
        }
        assert asked(served) == (first, 32)
        longer = ASKED | {"prompt": [*PROMPT, *first, 9]}
        assert served.call("/completion", longer)[1]["timings"]["cache_n"] == 48, "answer too"
        assert act(served, 0, "save", "again.bin") == saved
        assert served.call("/slots/0?action=erase", b"")[1] == {"id_slot": 0, "n_erased": 52}
        assert served.call("/slots/0?action=erase", b"")[1] == {"id_slot": 0, "n_erased": 0}
        assert "slot 0 holds nothing" in wrong(served, "/slots/0?action=save")[1]
        (path,) = tmp_path.glob("slots/*/one.bin")
        assert path.stat().st_mode & 0o077 == 0, "it has tokens of prompts"
        path.write_bytes(path.read_bytes().replace(b"5, 6", b"5, 7", 1))
        status, words = wrong(served, "/slots/0?action=restore", "one.bin")
        assert (status, "damaged" in words, "\n" in words) == (400, True, False)


def test_states_are_saved_too(tmp_path: Path) -> None:
    path = write_family(tmp_path / "model", "qwen3.5")
    with serving(path, kept(tmp_path / "kept")) as served:
        first, _ = asked(served)
        saved = act(served, 1, "save", "one.bin")
        assert saved["n_saved"] == 32, "the state behind the last whole block of the prompt"
    with serving(path, kept(tmp_path / "kept")) as served:
        restored = act(served, 1, "restore", "one.bin")
        assert restored == {"n_restored": saved["n_saved"], "n_read": saved["n_written"]}
        longer = ASKED | {"prompt": [*PROMPT, *first, 9]}
        assert served.call("/completion", longer)[1]["timings"]["cache_n"] == saved["n_saved"]


def test_no_key_sees_anothers_slot(two_keys: Served) -> None:
    asked(two_keys, **A)
    act(two_keys, 1, "save", "mine.bin", **A)
    assert "slot 1 holds nothing" in wrong(two_keys, "/slots/1?action=save", **B)[1]
    status, words = wrong(two_keys, "/slots/1?action=restore", "mine.bin", **B)
    assert (status, words) == (400, "filename is wrong: nothing was saved as 'mine.bin'")
    assert two_keys.call("/slots/1?action=erase", b"", **B)[1]["n_erased"] == 0
    assert act(two_keys, 1, "restore", "mine.bin", **A)["n_restored"] == 48


def test_what_is_wrong_is_named(two_keys: Served) -> None:
    asked(two_keys, **A)
    for name in ("", ".", "a/b", "../x", "a\nb", "a\x9f", "é" * 128):
        for action in ("save", "restore"):
            status, words = wrong(two_keys, f"/slots/1?action={action}", name, **A)
            assert (status, words[:18]) == (400, "filename is wrong:"), words
    act(two_keys, 1, "save", "é" * 127 + "a", **A)
    for path, part in (
        ("/slots/1?action=load", "?action=save, restore or erase"),
        ("/slots/1", "?action=save, restore or erase"),
        ("/slots/-1?action=save", "slots begin with 0"),
        ("/slots/one?action=save", "it must be a number"),
        ("/slots/99999?action=save", "(--max-num-seqs)"),
    ):
        status, words = wrong(two_keys, path, **A)
        assert (status, part in words) == (400, True), words
    two_keys.refused_for("id_slot", "/completion", ASKED | {"id_slot": 99999}, **A)


def test_without_the_folder_it_is_not_supported(served: Served) -> None:
    status, error = served.refused("/slots/0?action=save", {"filename": "x"})
    assert (status, error["type"]) == (501, "not_supported_error")
    assert "--kv-disk PATH:SIZE" in error["message"]
