"""Prompts for what is missing in the middle: which tokens, which text, what fits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.infill import File, FimTokens, find_fim_tokens, infill_prompt
from ridgeline.text.tokenizers.tokenizer import Tokenizer
from tests.model.files.vocabularies import byte_level, mixed, sentencepiece, vocabulary

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
QWEN += ["<|repo_name|>", "<|file_sep|>"]
FIM = FimTokens(403, 404, 405, 406, 407, 408)


def with_tokens(*spellings: str, spec: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
    """A small tokenizer with control tokens from id 403 on."""
    spec = copy.deepcopy(spec or byte_level())
    plain = spec["added_tokens"][0] | {"rstrip": False}
    first = 403 if options.get("first") is None else options.pop("first")
    spec["added_tokens"] += [
        plain | {"id": i, "content": spelling} for i, spelling in enumerate(spellings, first)
    ]
    return Tokenizer(spec, **options)


CODER = with_tokens(*QWEN)


# --- which tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spellings", "found"),
    [
        (QWEN, FIM),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], FimTokens(403, 405, 404)),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>"],
         FimTokens(403, 404, 405, 406, 407)),
        (["<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁end\uff5c>"],
         FimTokens(404, 403, 405)),
        (["▁<PRE>", "▁<MID>", "▁<SUF>"], FimTokens(403, 405, 404)),
        (["<|fim_prefix|>", "<|fim_suffix|>"], None),
        (["<|fim_prefix|>", "<fim_suffix>", "<|fim_middle|>"], None),
        (["<|file_sep|>", "<|repo_name|>"], None),
        ([], None),
    ],
    ids=str,
)  # fmt: skip
def test_spellings(spellings: list[str], found: FimTokens | None) -> None:
    assert find_fim_tokens(with_tokens(*spellings)) == found


def test_the_ids_of_gguf_go_before_spellings() -> None:
    ids = {"fim_pre": 10, "fim_suf": 11, "fim_mid": 12, "fim_sep": 13}
    metadata: dict[str, Any] = {f"tokenizer.ggml.{k}_token_id": i for k, i in ids.items()}
    assert find_fim_tokens(with_tokens(), metadata) == FimTokens(10, 11, 12, file=13)
    assert find_fim_tokens(CODER, metadata) == FimTokens(10, 11, 12, 406, 407, 13)
    assert find_fim_tokens(CODER, Path("tokenizer.json")) == FIM
    older = {"prefix": 10, "suffix": 11, "middle": 12}
    metadata = {f"tokenizer.ggml.{k}_token_id": i for k, i in older.items()}
    assert find_fim_tokens(with_tokens(), metadata) == FimTokens(10, 11, 12)


@pytest.mark.parametrize("value", [-1, 1 << 32, "10", True, None, 409])
def test_ids_that_are_none_are_not_believed(value: Any) -> None:
    metadata = {f"tokenizer.ggml.fim_{k}_token_id": value for k in ("pre", "suf", "mid")}
    assert find_fim_tokens(CODER, metadata) == FIM
    assert find_fim_tokens(with_tokens(), metadata) is None


def test_real_vocabularies() -> None:
    assert find_fim_tokens(vocabulary("smollm2")[1]) is None
    assert find_fim_tokens(vocabulary("llama-bpe")[1]) is None


# --- which text --------------------------------------------------------------------------------


def test_prefix_suffix_middle() -> None:
    prompt = infill_prompt(CODER, FIM, "def f(x):\n    return ", "\n")
    spelled = CODER.decode(prompt.ids, skip_special=False)
    assert spelled == "<|fim_prefix|>def f(x):\n    return <|fim_suffix|>\n<|fim_middle|>"
    assert not prompt.is_truncated
    again = infill_prompt(CODER, FIM, prompt.ids[1:-3], "\n")  # the prefix as token ids
    assert again == prompt


def test_files_stand_before() -> None:
    files = [File("a.py", "A = 1"), File("b.py", "B = 2\n")]
    prompt = infill_prompt(CODER, FIM, "x", "y", files)
    assert CODER.decode(prompt.ids, skip_special=False) == (
        "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n\n"
        "<|file_sep|>current\n<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    without = FimTokens(403, 404, 405)
    prompt = infill_prompt(CODER, without, "x", "y", files)
    assert CODER.decode(prompt.ids, skip_special=False) == (
        "\n\n--- a.py ---\n\nA = 1\n\n\n--- b.py ---\n\nB = 2\n\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )


def test_bos_comes_first_where_the_model_has_it() -> None:
    llama = with_tokens(*QWEN[:3], spec=sentencepiece(), first=500, bos_id=1, begin_ids=(1,))
    fim = FimTokens(500, 501, 502)
    ids = infill_prompt(llama, fim, "x", "y", [File("a", "b")]).ids
    assert ids[0] == 1
    assert ids.count(1) == 1


@given(prefix=mixed, suffix=mixed, name=mixed, text=mixed)
def test_text_never_spells_control(prefix: str, suffix: str, name: str, text: str) -> None:
    spelled = "<|fim_middle|>", "<|file_sep|>", "<|end|>"
    texts = [f"{a}{b}" for a, b in zip((prefix, suffix, name), spelled, strict=True)]
    ids = infill_prompt(CODER, FIM, texts[0], texts[1], [File(texts[2], text)]).ids
    assert [i for i in ids if CODER.is_special(i)] == [407, 408, 408, 403, 404, 405]
    assert CODER.decode(ids) == f"project\n{texts[2]}\n{text}\ncurrent\n{texts[0]}{texts[1]}"


# --- little room -------------------------------------------------------------------------------

LETTERS = st.text("abcdefgh ", max_size=60)


@given(prefix=LETTERS, suffix=LETTERS, texts=st.lists(LETTERS, max_size=3), room=st.integers(4, 90))
def test_what_is_nearest_to_the_cursor_stays(
    prefix: str, suffix: str, texts: list[str], room: int
) -> None:
    files = [File(f"{i}", text) for i, text in enumerate(texts)]
    whole = infill_prompt(CODER, FIM, prefix, suffix, files)
    prompt = infill_prompt(CODER, FIM, prefix, suffix, files, room)
    assert len(prompt.ids) <= room
    assert prompt.is_truncated == (prompt.ids != whole.ids) == (len(whole.ids) > room)
    before, after = CODER.encode(prefix), CODER.encode(suffix)
    cut = prompt.ids.index(403)
    hole = prompt.ids.index(404)
    kept_before, kept_after = prompt.ids[cut + 1 : hole], prompt.ids[hole + 1 : -1]
    assert kept_before == before[len(before) - len(kept_before) :]
    assert kept_after == after[: len(kept_after)]
    share = room - 3
    assert len(kept_after) >= min(len(after), share // 4)
    assert len(kept_before) >= min(len(before), share - share // 4)
    if len(before) + len(after) > share:
        assert len(prompt.ids) == room  # nothing is wasted, and no file takes their place
    names = [CODER.decode([i]) for i in prompt.ids[:cut]]
    present = [i for i in range(len(files)) if f"{i}" in names]
    assert present == list(range(len(files)))[len(files) - len(present) :]


@pytest.mark.parametrize("room", [-5, 0, 3])
def test_no_room_at_all(room: int) -> None:
    with pytest.raises(ValueError, match="no room"):
        infill_prompt(CODER, FIM, "a", "b", room=room)
