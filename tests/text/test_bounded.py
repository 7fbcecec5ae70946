"""Tokenizers that take more than any needs end in one line; all others are as before."""

from __future__ import annotations

import copy
import functools
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.model.files.gguf.tokenizer import tokenizer_json
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.text.tokenizers.cost_check import Apart, is_bounded
from ridgeline.text.tokenizers.tokenizer import Spellings, Tokenizer
from ridgeline.text.tokenizers.vocabulary import checked
from tests.model.files.vocabularies import (
    VOCABULARIES,
    any_spec,
    byte_level,
    mixed,
    ours,
    vocabulary,
)
from tests.text.bombs import cost_of

Spec = dict[str, Any]


def changed(**parts: Any) -> Spec:
    return copy.deepcopy(byte_level()) | parts


def replaced(text: str, content: str) -> Spec:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def split(pattern: str) -> Spec:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return changed(pre_tokenizer=cut)


def sequence(*steps: Spec) -> Spec:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(data: bytes) -> Spec:
    step = {"type": "Precompiled", "precompiled_charsmap": b64encode(data).decode()}
    return changed(normalizer=step)


def bounded(spec: Spec) -> bool:
    return is_bounded(spec, *checked(spec))


@any_spec
def test_tokenizers_in_use_run_here(make: Callable[[], Spec]) -> None:
    assert bounded(make())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_of_models_run_here(name: str) -> None:
    assert bounded(tokenizer_json(vocabulary(name)[0]))


GROWS = replaced("a", "aa")
UNBOUNDED = {
    "doubles, forty times": changed(normalizer=sequence(*[GROWS] * 40)),
    "doubles, nine times": changed(normalizer=sequence(*[GROWS] * 9)),
    "puts a text between all letters": changed(normalizer=replaced("", "a")),
    "an unknown pattern": split("(a|a)*$"),
    "an unknown pattern of a normalizer": changed(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    ),
    "an unknown step": changed(normalizer={"type": "Surprise"}),
    "sequences of sequences": changed(
        normalizer=sequence(sequence(sequence(sequence(sequence()))))
    ),
    "a map that is longer than it is": charsmap(b"\xff\xff\xff\x7f" + bytes(100)),
    "a map that puts a novel for a letter": charsmap(bytes(4) + b"x" * 100_000 + b"\0"),
    "a map of nothing": charsmap(b""),
    "a long prefix": changed(normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}),
    "long words": changed(
        model={"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]",
               "max_input_chars_per_word": 1_000_000, "continuing_subword_prefix": "##"},
        added_tokens=[],
    ),
    "a long piece": changed(
        model={"type": "Unigram", "vocab": [["<unk>", 0.0], ["a" * 5000, -1.0]], "unk_id": 0},
        added_tokens=[],
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec", UNBOUNDED.values(), ids=UNBOUNDED)
def test_what_may_take_long_does_not_run_here(spec: Spec) -> None:
    assert not bounded(spec)


@pytest.mark.parametrize("growth", [1, 8])
def test_a_little_growth_is_no_harm(growth: int) -> None:
    assert bounded(changed(normalizer=sequence(*[GROWS] * growth)))


@any_spec
def test_ids_are_the_same_in_a_process_apart(make: Callable[[], Spec]) -> None:
    tokenizer = ours(make)
    spec = make()
    pieces, added = checked(spec)
    apart = Apart(spec, pieces, added, tokenizer._private)

    @given(text=mixed)
    def same(text: str) -> None:
        assert apart.ids_of(text) == tokenizer._library()(text)

    same()


def bomb(letter: str) -> Spec:
    return changed(normalizer=sequence(*[replaced(letter, 2 * letter)] * 40))


BOMBS = {
    "doubles as it is built": bomb("a"),
    "doubles at the first text": bomb("z"),
    "a pattern that takes for ever": split("(a|a)*$"),
    "a map that is longer than it is": UNBOUNDED["a map that is longer than it is"],
}
MORE_BOMBS = {
    **{f"the pattern {pattern}": split(pattern)
       for pattern in (r"(?:(a+)\1+)+$", "(?=(a+)+$)a", "(?:a{1,1000}){1,1000}b",
                       "(" * 10_000 + "a" + ")" * 10_000)},
    "the pattern of a normalizer": UNBOUNDED["an unknown pattern of a normalizer"],
    "puts a novel between all letters": changed(normalizer=replaced("", "a" * 1_000_000)),
    "puts a novel before a text, eight times": changed(
        normalizer=sequence(*[{"type": "Prepend", "prepend": "a" * 1_000_000}] * 8)
    ),
    "sequences in sequences": changed(
        normalizer=functools.reduce(lambda steps, _: sequence(steps), range(100), {"type": "NFC"})
    ),
}  # fmt: skip


FULL = [pytest.param(spec, marks=pytest.mark.full) for spec in MORE_BOMBS.values()]


@pytest.mark.parametrize(
    "spec", [*BOMBS.values(), *FULL], ids=[name[:40] for name in (*BOMBS, *MORE_BOMBS)]
)
def test_a_bomb_ends_in_one_line_in_ten_seconds(spec: Spec, tmp_path: Path) -> None:
    """And with little more memory than the process has before: its limit grows with the file."""
    cost = cost_of(spec, "hello z " + "a" * 40 + "!", tmp_path)
    assert "the tokenizer" in cost.error
    assert "\n" not in cost.error
    assert cost.cpu_s < 10
    size = (tmp_path / "tokenizer.json").stat().st_size
    assert cost.peak_bytes < (120 << 20) + 24 * size


def test_a_panic_within_the_limit_says_what_the_library_says(tmp_path: Path) -> None:
    """With a backtrace it would take more memory than is left, and then wait for ever."""
    pattern = BOMBS["a pattern that takes for ever"]
    assert "retry-limit" in cost_of(pattern, "a" * 40 + "!", tmp_path).error


@pytest.mark.full
@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_of_models_have_room_in_a_process_apart(name: str) -> None:
    tokenizer = Tokenizer(tokenizer_json(vocabulary(name)[0]))
    apart = Apart(*tokenizer._parts)
    text = "!?.,;" * 40_000
    assert apart.ids_of(text) == tokenizer._library()(text)


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(ValueError, match="the tokenizer") as found:
        yield
    assert "\n" not in str(found.value)


@pytest.mark.full
def test_after_a_text_that_takes_too_long_the_next_one_is_answered() -> None:
    tokenizer, plain = Tokenizer(bomb("z")), Tokenizer(byte_level())
    for _ in range(2):
        assert tokenizer.encode("hello") == plain.encode("hello")
        with refused():
            tokenizer.encode("hello z")


def test_a_panic_of_the_library_is_one_line() -> None:
    """A map whose places lead nowhere: the library's panics are not Exceptions."""
    data = (8).to_bytes(4, "little") + b"\xff" * 8 + b"x\0"
    tokenizer = Tokenizer(charsmap(data))
    assert bounded(charsmap(data))
    with pytest.raises(ValueError, match="the tokenize") as found:
        tokenizer.encode("hello \u2460")
    assert "\n" not in str(found.value)


def a_then_b(count: int) -> dict[str, Any]:
    pieces = ["a" * i + "b" * j for i in range(count) for j in range(count) if i + j]
    tokens = ["<unk>", "<s>", "</s>", *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * len(pieces)],
    }


def test_pieces_that_are_made_in_too_many_ways_are_refused() -> None:
    assert len(tokenizer_json(a_then_b(20))["model"]["merges"]) == 7201
    with pytest.raises(ModelFileError, match="in more than 96,280 ways"):
        tokenizer_json(a_then_b(62))
    long = a_then_b(3)
    long["tokenizer.ggml.tokens"][3:] = [f"{i:0>1000}" for i in range(8)]
    many = {key: value * 100 if isinstance(value, list) else value for key, value in long.items()}
    many["tokenizer.ggml.tokens"] = [f"{i:0>1000}" for i in range(1100)]
    with pytest.raises(ModelFileError, match="longer pieces than any vocabulary"):
        tokenizer_json(many)


letters = st.text(alphabet="ab<", max_size=12)


@given(st.sets(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=6), letters)
def test_spellings_are_found_as_a_pattern_of_them_all_finds_them(
    words: set[str], text: str
) -> None:
    spellings, names = Spellings(words), {word: f"[{word}]" for word in words}
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    assert spellings.replaced(text, names) == re.sub(pattern, lambda m: names[m[0]], text)
    without = re.sub(f"(?:{pattern})(?!b)", lambda m: names[m[0]], text)
    assert spellings.replaced(text, names, unless_before="b") == without
    starts = {match.start() for match in re.finditer(f"(?=(?:{pattern}))", text)}
    ends = {i for i in range(len(text)) if any(word.startswith(text[i:]) for word in words)}
    assert spellings.starts(text) == sorted(starts | ends)


def test_a_control_token_longer_than_any_is_refused() -> None:
    spec = changed(added_tokens=[{"id": 5000, "content": "a" * 300, "special": True}])
    with pytest.raises(ModelFileError, match="a control token has 300 characters"):
        Tokenizer(spec)
