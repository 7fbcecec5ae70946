"""Ids and text: against the library itself, and against bytes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.model.files.vocabularies import (
    VOCABULARIES,
    any_spec,
    byte_level,
    control_ids,
    mixed,
    ours,
    sentencepiece,
    theirs,
    vocabulary,
    without_added,
    wordpiece,
)

EVERY_SCALAR = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))


def broken(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(byte_level()), **changes}


def bpe(vocab: dict[str, Any], merges: Sequence[Any] = ()) -> dict[str, Any]:
    return broken(model={"vocab": vocab, "merges": list(merges)}, added_tokens=[])


def scored(vocab: list[Any], unk_id: Any = 0) -> dict[str, Any]:
    return broken(model={"type": "Unigram", "vocab": vocab, "unk_id": unk_id}, added_tokens=[])


def added(*tokens: dict[str, Any]) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return broken(added_tokens=[{"special": True, **flags, **t} for t in tokens])


@any_spec
@given(text=mixed)
@example("a <|end|>  b <|end|>x")
def test_the_library_gives_the_same_ids(make: Callable[[], dict[str, Any]], text: str) -> None:
    expected = theirs(make).encode(text, add_special_tokens=False).ids
    assert ours(make).encode(text) == expected


@any_spec
@given(text=mixed)
def test_without_parsing_everything_is_text(make: Callable[[], dict[str, Any]], text: str) -> None:
    expected = without_added(make).encode(text, add_special_tokens=False).ids
    assert ours(make).encode(text, parse_special=False) == expected
    assert not set(expected) & set(control_ids(make))


@any_spec
@given(text=mixed, special=st.booleans())
def test_the_library_gives_the_same_text(
    make: Callable[[], dict[str, Any]], text: str, special: bool
) -> None:
    ids = theirs(make).encode(text, add_special_tokens=False).ids
    expected = theirs(make).decode(ids, skip_special_tokens=special)
    assert ours(make).decode(ids, skip_special=special) == expected


@any_spec
@given(before=mixed, inside=mixed, after=mixed)
@example("", "<", "|end|>")
@example("", "a <  ", "|end|>")
@example("<|end|>", "<|end|>x", "※")
def test_shielded_text_is_text(
    make: Callable[[], dict[str, Any]], before: str, inside: str, after: str
) -> None:
    tokenizer = ours(make)
    inside = tokenizer.unshield(tokenizer.shield(inside))  # noncharacters are gone now
    before, after = (text.replace("\ufdd0", "") for text in (before, after))
    shielded = tokenizer.shield(inside)
    assert tokenizer.encode_shielded(shielded) == tokenizer.encode(inside, parse_special=False)

    def count(ids: list[int]) -> list[int]:
        return [ids.count(i) for i in control_ids(make)]

    # What stands around it brings its own control tokens, and no others.
    whole = count(tokenizer.encode_shielded(before + "\n" + shielded.strip() + after))
    apart = zip(count(tokenizer.encode(before)), count(tokenizer.encode(after)), strict=True)
    assert whole == [a + b for a, b in apart]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_control_token_of_real_vocabularies_can_be_shielded(name: str) -> None:
    metadata, tokenizer = vocabulary(name)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = np.flatnonzero(types == 3).tolist()
    assert control
    for i in control[:50]:
        spelling = tokens[i]
        assert i in tokenizer.encode(spelling)
        for text in (spelling, f"a{spelling}", f"{spelling} b", f"x {spelling}{spelling}\n"):
            plain = tokenizer.encode(text, parse_special=False)
            assert tokenizer.encode_shielded(tokenizer.shield(text)) == plain
            assert i not in plain
            if name != "bert-bge":  # which leaves out spaces and capitals
                assert tokenizer.decode(plain) == text


def test_a_spelling_that_text_could_merge_into_stays_text() -> None:
    spec = added({"id": 990, "content": "ab"})
    spec["model"]["vocab"] |= {"ab": 990, "abc": 991}
    spec["model"]["merges"] += [["a", "b"], ["ab", "c"]]
    tokenizer = Tokenizer(spec)
    assert tokenizer.encode("ab") == [990]
    assert 990 not in tokenizer.encode("ab abc", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("ab abc", parse_special=False)) == "ab abc"


def test_spellings_that_overlap_are_all_shielded() -> None:
    spec = added({"id": 900, "content": "<|a|>"}, {"id": 901, "content": "|>b"})
    tokenizer = Tokenizer(spec)
    text = "<|a|>b, and on"
    assert tokenizer.encode_shielded(tokenizer.shield(text)) == tokenizer.encode(
        text, parse_special=False
    )


def test_tokens_shown_in_text_may_be_left_unshielded() -> None:
    tokenizer = ours(byte_level)
    shown = tokenizer.shield("<think><|end|>", special_only=True)
    assert tokenizer.decode(tokenizer.encode_shielded(shown)) == "<think><|end|>"
    assert tokenizer.encode("<think>")[0] in tokenizer.encode_shielded(shown)
    assert tokenizer.encode("<|end|>")[0] not in tokenizer.encode_shielded(shown)


def test_tokens_that_no_template_names_are_text_whoever_writes_them() -> None:
    spec = copy.deepcopy(byte_level())
    ids = {t["content"]: t["id"] for t in spec["added_tokens"]}
    for named_in, inside in (("", {"<think>", "※"}), ("{{ '<think>' }}    ", {"※"})):
        tokenizer = Tokenizer(copy.deepcopy(spec), named_in=named_in)
        text = "a <think> ※ <|end|>"
        expected = {ids[content] for content in inside}
        shielded = tokenizer.encode_shielded(tokenizer.shield(text))
        assert set(tokenizer.encode(text, parse_special=False)) & {*ids.values()} == expected
        assert set(shielded) & {*ids.values()} == expected
        assert tokenizer.decode(shielded) == text
        assert ids["    "] in tokenizer.encode("a    b", parse_special=False)
        assert set(tokenizer.encode(text)) >= {ids["<think>"], ids["※"], ids["<|end|>"]}
    for kept in ({"eos_ids": [ids["※"]]}, {"bos_id": ids["※"]}, {"end_ids": (ids["※"],)}):
        tokenizer = Tokenizer(copy.deepcopy(spec), **kept)  # type: ignore[arg-type]
        assert ids["※"] not in tokenizer.encode("※", parse_special=False, add_bos=False)


def test_the_mark_of_shielding_is_a_letter_in_plain_text() -> None:
    tokenizer = ours(byte_level)
    assert tokenizer.decode(tokenizer.encode("<\ufdd0|end|>\ufdd0")) == "<\ufdd0|end|>\ufdd0"
    assert tokenizer.shield("\ufdd0") == "\ufffd"


@pytest.mark.parametrize(
    "name", [pytest.param("byte_level", marks=pytest.mark.full), "sentencepiece", "qwen2"]
)
def test_every_scalar_value_survives(name: str) -> None:
    made = {"byte_level": byte_level, "sentencepiece": sentencepiece}
    tokenizer = ours(made[name]) if name in made else vocabulary(name)[1]
    text = EVERY_SCALAR
    if name == "sentencepiece":
        text = text.replace("▁", "")  # SentencePiece cannot tell it from a space
    for start in range(0, len(text), 1 << 16):  # as one word it would cost the library minutes
        part = text[start : start + (1 << 16)]
        assert tokenizer.decode(tokenizer.encode(part)) == part


@given(st.lists(st.binary(max_size=6) | st.text(max_size=3).map(str.encode), max_size=8))
@example([b"\xf0\x9f\x91", b"\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9"])
@example([b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xe2\x82"])
def test_a_stream_of_bytes_is_the_whole_text(parts: list[bytes]) -> None:
    tokenizer, data = ours(byte_level), b"".join(parts)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in data]
    decoder = tokenizer.new_decoder()
    seen = ""
    for k, token_id in enumerate(ids, 1):
        seen += decoder(token_id)
        rest = data[:k].decode("utf-8", "replace")
        assert rest.startswith(seen)
        assert len(rest) - len(seen) <= 2  # the codec looks at a whole surrogate to refuse it
    assert seen + decoder.flush() == data.decode("utf-8", "replace") == tokenizer.decode(ids)


@any_spec
@given(text=mixed, cut=st.integers(0, 40), special=st.booleans())
def test_an_answer_continues_its_prompt(
    make: Callable[[], dict[str, Any]], text: str, cut: int, special: bool
) -> None:
    tokenizer = ours(make)
    ids = tokenizer.encode(text)
    prompt, answer = ids[:cut], ids[cut:]
    before = tokenizer.new_decoder(skip_special=special)
    final = "".join(map(before, prompt))  # a character begun in the prompt belongs to the answer
    for context in (prompt, prompt[-8:]):
        decoder = tokenizer.new_decoder(context, skip_special=special)
        out = "".join(map(decoder, answer)) + decoder.flush()
        if context == prompt or tokenizer.decode(context, special):
            assert final + out == tokenizer.decode(ids, special)


@pytest.mark.parametrize("answer", [b"ab", b"", b"\xc3\xa9"])
def test_what_a_prompt_left_open_is_no_text_of_an_answer_that_does_not_go_on(answer: bytes) -> None:
    tokenizer = ours(byte_level)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    decoder = tokenizer.new_decoder([byte_ids[b"a"], byte_ids[b"\xc2"]])
    out = "".join(decoder(byte_ids[bytes([byte])]) for byte in answer) + decoder.flush()
    assert out == answer.decode()


def test_bos() -> None:
    tokenizer = Tokenizer(copy.deepcopy(sentencepiece()), bos_id=1, begin_ids=(1,))
    plain = tokenizer.encode("Hello", add_bos=False)
    assert 1 not in plain
    assert tokenizer.encode("Hello") == tokenizer.encode("<s>Hello") == [1, *plain]
    assert tokenizer.encode("") == [1]
    assert Tokenizer(copy.deepcopy(sentencepiece()), bos_id=1).encode("Hello") == plain
    assert ours(sentencepiece).encode("Hello", add_bos=True) == plain  # there is none to add
    two = Tokenizer(copy.deepcopy(sentencepiece()), bos_id=1, begin_ids=(1, 2))
    assert two.encode("Hello") == two.encode("Hello", add_bos=True) == [1, 2, *plain]
    assert two.encode("<s></s>Hello") == [1, 2, *plain]
    assert two.encode("Hello", add_bos=False) == plain
    with pytest.raises(ModelFileError, match="BOS id 99999"):
        Tokenizer(copy.deepcopy(sentencepiece()), bos_id=99999)


SEP = {"SpecialToken": {"id": "</s>", "type_id": 0}}
ONE_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [ONE_TEXT, SEP, SEP],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [3], "tokens": ["</s>"]}},
}


@pytest.mark.parametrize(
    ("post_processor", "ids"),
    [
        (TEMPLATE, [3, 3]),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}, [3, 3]),
        ({"type": "RobertaProcessing", "sep": ["</s>", 3], "cls": ["<s>", 2]}, [3]),
        ({"type": "BertProcessing", "sep": ["</s>", 3], "cls": ["<s>", 2]}, [3]),
        (None, []),
    ],
)
def test_what_stands_behind_a_text(post_processor: Any, ids: list[int]) -> None:
    spec = copy.deepcopy(wordpiece()) | {"post_processor": post_processor}
    tokenizer = Tokenizer(copy.deepcopy(spec), bos_id=2, begin_ids=(2,))
    plain = tokenizer.encode("Hello", add_bos=False)
    assert not {2, 3} & set(plain)
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_bos=True) == [2, *plain, *ids]
    assert tokenizer.encode_shielded("Hello") == [2, *plain]  # a conversation is not over
    assert Tokenizer(copy.deepcopy(spec)).encode("Hello") == [*plain, *ids]
    assert Tokenizer(spec, end_ids=(4,)).encode("Hello") == [*plain, 4]


def test_a_damaged_end_of_text_is_named() -> None:
    for damaged in ({"single": [SEP]}, {"special_tokens": {}}, {"single": None}):
        with pytest.raises(ModelFileError, match="post-processor is not one that can be read"):
            Tokenizer(copy.deepcopy(wordpiece()) | {"post_processor": TEMPLATE | damaged})
    far = TEMPLATE | {"special_tokens": {"</s>": {"ids": [999]}}}
    with pytest.raises(ModelFileError, match="the id 999, behind a text, is no token"):
        Tokenizer(copy.deepcopy(wordpiece()) | {"post_processor": far})


def test_ids_that_are_no_tokens_are_empty() -> None:
    tokenizer = ours(byte_level)
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        ours(byte_level).encode("ab\ud83d")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (broken(model={"type": "Rwkv", "vocab": []}), "'Rwkv'; supported: BPE, WordPiece, Unigram"),
        (broken(model=None), "supported: BPE"),
        (broken(model={"type": "WordPiece", "vocab": []}), "needs vocab"),
        (broken(model={"type": "WordPiece", "vocab": {"a": 0}}, added_tokens=[]), "unknown token"),
        (scored([]), "needs vocab .a list of pieces with scores"),
        (scored([["a", "b"]]), "list of pieces with scores"),
        (scored([["a", float("inf")]]), "list of pieces with scores"),
        (scored([["a", -1.0], ["a", -2.0]]), "same token twice"),
        (scored([["a", -1.0]], unk_id=1), "id 1 is not in the vocabulary"),
        (scored([["a", -1.0]], unk_id=None), "id None is not in the vocabulary"),
        (bpe({}), "needs vocab"),
        (broken(model={"vocab": [["a", -1.5]], "merges": []}), "needs vocab"),  # as Unigram has it
        (bpe({"a": 0}, [1]), "pairs of pieces"),
        (bpe({"a": 0}, ["a b"]), "library refuses .* `b`"),
        (bpe({"a": 0, "b": 0}), "same id"),
        (bpe({"a": 2**40}), "'a' has the id 1099511627776"),
        (bpe({"a": -1}), "has the id -1"),
        (bpe({"a": True}), "has the id True"),
        (bpe({"a\ud800": 0}), "lone surrogate"),
        (broken(model={"vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "_"}), "suffixes"),
        (added({"id": 5}), "tokens with content"),
        (added({"id": 5, "content": "<x>"}), "same id"),
        (added({"id": 900, "content": "<x>"}, {"id": 901, "content": "<x>"}), "stands twice"),
        (added({"id": 900, "content": "<|end|>"}), "another id than in the vocabulary"),
        (added({"id": 900, "content": "<x>", "lstrip": "?"}), "library refuses"),
        (broken(decoder={"type": "CTC"}), r"decoder is \['CTC'\]; supported"),
        (broken(decoder=None), "supported: ByteLevel"),
        (broken(pre_tokenizer={"type": "Magic"}), "library refuses"),
    ],
)
def test_damaged_tokenizers_are_named(spec: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]"])
def test_files_that_are_no_json_object(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: "):
        load_tokenizer(path)


def test_files_that_are_no_files_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a file of at most 128 MiB"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_tokenizer(tmp_path / "absent.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFileError, match="not a file of at most 128 MiB"):
        load_tokenizer(tmp_path / "huge.json")


def test_runs_of_spaces_that_are_added_tokens_are_text(tmp_path: Path) -> None:
    """Gemma's are: not special, and with merges, so that ``a   b`` has one token in the middle."""
    pieces = ["<unk>", "a", "b", "▁", "▁▁", "▁▁▁", "▁b", "▁▁▁b"]
    merges = [("▁", "▁"), ("▁▁", "▁"), ("▁", "b")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    runs = [tokenizers.AddedToken(run, normalized=False) for run in ("▁▁", "▁▁▁")]
    library.add_tokens(runs)
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    mine = load_tokenizer(path)
    for text in ("a  b", "a   b", "a b", "    ", "ab   ", "▁▁b"):
        assert list(mine.encode(text)) == library.encode(text, add_special_tokens=False).ids, text
        assert mine.decode(mine.encode(text)) == text.replace("▁", " ")


def test_a_control_token_that_the_normalizer_would_change_is_refused() -> None:
    """Without its noncharacters a private name is text that anybody can write."""
    spec = copy.deepcopy(wordpiece())
    spec["added_tokens"][4]["normalized"] = True
    assert Tokenizer(copy.deepcopy(spec)).encode("hello <|end|>")[-1] == 4
    other = {"type": "Replace", "pattern": {"Regex": r"[^\p{L}\p{N}\p{P} ]"}, "content": ""}
    spec["normalizer"] = other
    with pytest.raises(ModelFileError, match=r"normalizer changes the added token '<\|end\|>'"):
        Tokenizer(spec).prepare()


def test_words_of_a_bert_have_spaces_between_them() -> None:
    tokenizer = ours(wordpiece)
    ids = tokenizer.encode("The cat, the dog?<|end|>")
    assert tokenizer.decode(ids) == "the cat, the dog?"
    assert tokenizer.decode(ids, skip_special=False) == "the cat, the dog? <|end|>"
    assert tokenizer.token_bytes(ids[-1]) == b"<|end|>"


def test_other_threads_run_while_a_text_becomes_ids() -> None:
    """An event loop is one: half a MB of text would stop a server for as long as its ids take."""
    tokenizer, num_beats, is_over = ours(byte_level), 0, threading.Event()

    def beat() -> None:
        nonlocal num_beats
        while not is_over.is_set():
            num_beats += 1
            time.sleep(0.001)

    text = "the quick brown fox \n" * 40_000
    ids_of, beating = tokenizer._library(), threading.Thread(target=beat)
    beating.start()
    before = num_beats
    ids = ids_of(text)
    between = num_beats - before
    is_over.set()
    beating.join()
    assert len(ids) > 40_000
    assert between > 2  # none, if the ids kept the interpreter


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process's threads are counted")
def test_the_library_starts_no_threads(tmp_path: Path) -> None:
    """They would compute uncounted, and complain of each fork. Here those that trained run."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()))
    program = """
import os, sys
from pathlib import Path
from ridgeline.text.tokenizers.tokenizer import load_tokenizer

tokenizer = load_tokenizer(Path(sys.argv[1]))
before = len(os.listdir("/proc/self/task"))
assert tokenizer.encode("the quick brown fox")
assert len(os.listdir("/proc/self/task")) == before
"""
    others = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")]
    subprocess.run(command, env=others, check=True)
