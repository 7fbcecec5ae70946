"""What equal answers hang on has one name; whatever else there is changes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.backends.cpu.layout import model_weights
from ridgeline.engine.setup import identity
from ridgeline.model.files.identity import digests as contents
from tests.engine.test_llm import GREEDY, write_model

_SMALL = {"kv_cache_memory": "1MiB", "threads": 1}
_PLACE, _NUM_BYTES = 9000, 400  # within a matrix


def _fingerprint(path: Path, **options: Any) -> str:
    with LLM(path, **_SMALL | options) as llm:
        return llm.fingerprint


def _change(path: Path) -> None:
    """Change some weights in place, and let size and time of writing be as before."""
    weights = path / "model.safetensors"
    others = weights.read_bytes()[_PLACE + _NUM_BYTES :][:_NUM_BYTES]
    before = weights.stat()
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock ticks
        with weights.open("r+b") as file:
            file.seek(_PLACE)
            file.write(others)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_copies_have_one_name_and_two_models_called_the_same_have_two(tmp_path: Path) -> None:
    one = write_model(tmp_path / "model")
    wanted = _fingerprint(one)
    for folder in ("copy", "other"):
        (tmp_path / folder).mkdir()
        shutil.copytree(one, tmp_path / folder / "model")
    assert _fingerprint(tmp_path / "copy" / "model") == wanted
    shutil.copytree(one, tmp_path / "other name")
    assert _fingerprint(tmp_path / "other name") == wanted
    with (tmp_path / "other" / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read()[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert _fingerprint(tmp_path / "other" / "model") != wanted


def test_formats_and_templates_count(tmp_path: Path) -> None:
    one = write_model(tmp_path / "model")
    found = [_fingerprint(one), _fingerprint(one, kv_cache_dtype="f32")]
    found += [_fingerprint(one, dtype="f32"), _fingerprint(one, backend="reference")]
    (one / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found.append(_fingerprint(one))
    (one / "additional_chat_templates").mkdir()
    (one / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    found.append(_fingerprint(one))
    assert len(set(found)) == len(found)
    assert _fingerprint(one, max_num_seqs=3) == found[-1]


def test_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the package has the same digest, and one with a word more has another."""
    package = Path(identity.__file__).parents[2]
    names = [str(path.relative_to(package)) for path in package.rglob("*.py")]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / name, tmp_path / name)
    digest = identity.code_digest.__wrapped__
    before = digest()
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "engine" / "setup" / "identity.py"))
    assert digest() == before
    for name in (
        "bench/__init__.py",
        "core/commit.py",
        "serve/prepare.py",
        "model/files/rope_tables.py",
    ):
        with (tmp_path / name).open("a") as file:
            file.write("# a fix")
        assert (digest() != before) == (name != "bench/__init__.py"), name
        before = digest()


def test_a_model_replaced_in_place_does_not_answer_as_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and its time of writing are those of the old one, as rsync -t leaves them."""
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_weights, "_WORTH_KEEPING_BYTES", 1)
    monkeypatch.setattr(contents, "_WORTH_KEEPING_BYTES", 1)
    one = write_model(tmp_path / "model")

    def start() -> tuple[list[str], bytes, str]:
        with LLM(one, **_SMALL) as llm:
            assert llm.runner.weights.is_mapped  # type: ignore[attr-defined]
            packed = sorted(path.name for path in (tmp_path / "home" / "packed").glob("*.weights"))
            arrays = llm.runner.weights.arrays.values()  # type: ignore[attr-defined]
            llm.generate("the cat", GREEDY)
            return packed, b"".join(data.tobytes() for _, data in arrays), llm.fingerprint

    first = start()
    assert start() == first
    _change(one)
    second = start()
    assert len(second[0]) == 1  # the old one is gone
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert start() == second
