"""What a model's files say of its text, put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.engine.llm import LLM
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.gguf.pre_tokenizers import names_no_pre_tokenizer
from tests.engine.test_llm import write_model
from tests.model.files.test_checkpoint import with_text
from tests.model.files.tiny import vocabulary


def test_users_cannot_write_what_the_template_names_nor_what_fills_in_the_middle(
    tmp_path: Path,
) -> None:
    path = write_model(tmp_path / "model")
    spec = json.loads((path / "tokenizer.json").read_text())
    fim = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    first = 1 + max(token["id"] for token in spec["added_tokens"])
    spec["added_tokens"] += [
        {"id": first + i, "content": name, **flags} for i, name in enumerate(fim)
    ]
    (path / "tokenizer.json").write_text(json.dumps(spec))
    template = {"chat_template": "{{ '<think>' }}{{ messages[0].content }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(template))

    text = TextProcessor(load_checkpoint(path), {})
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    assert text.fim is not None
    plain = text.tokenizer.encode("<think>※" + "".join(fim), parse_special=False)
    assert set(plain) & set(ids.values()) == {ids["※"]}
    text.chat_template.close()


def test_a_file_that_names_no_pre_tokenizer_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for named, lines in (({}, 1), ({"tokenizer.ggml.pre": "default"}, 0)):
        metadata = {"tokenizer.ggml.merges": ["t1 t2"], **named}
        path = with_text(tmp_path, metadata).path
        LLM(path, backend="reference", kv_cache_memory="1MiB").close()
        said = capsys.readouterr().err.count("m.gguf names no pre-tokenizer: llama.cpp's default")
        assert said == lines
    # SentencePiece cuts nothing before it merges.
    assert not names_no_pre_tokenizer(vocabulary("llama"))
