"""Tokenizers from GGUF metadata: against recorded vectors, and against SentencePiece's rule."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.model.files.gguf.tokenizer import tokenizer_json
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.text.template.chat import ChatTemplate
from ridgeline.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.model.files.vocabularies import (
    ENCODERS,
    VOCABULARIES,
    WITH_VECTORS,
    mixed,
    of_bert,
    of_t5,
    theirs,
    unigram,
    vocabulary,
    wordpiece,
)


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_every_line_of_the_vectors(name: str) -> None:
    _, tokenizer = vocabulary(name)
    path = VOCABULARIES[name]
    with open(f"{path}.inp", newline="", encoding="utf-8") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    if len(lines) == len(texts) + 1:  # one file ends with a line end
        assert lines.pop() == ""
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = [int(word) for word in line.split()]
        assert tokenizer.encode(text, parse_special=False) == ids
        assert tokenizer.encode(text) == ids
        if name != "bert-bge":  # which leaves out spaces and accents
            assert tokenizer.decode(ids) == text


def test_only_the_first_space_of_a_text_is_sentencepieces() -> None:
    _, tokenizer = vocabulary("llama-spm")
    hello = tokenizer.encode("Hello")
    assert tokenizer.token_bytes(hello[0]) == b" Hello"
    assert tokenizer.decode(hello) == "Hello"
    assert tokenizer.decode([1, *hello]) == "Hello"
    assert tokenizer.new_decoder([1])(hello[0]) == "Hello"
    assert tokenizer.new_decoder(tokenizer.encode("Say"))(hello[0]) == " Hello"
    assert tokenizer.encode("</s>Hello") == [2, *hello]


PIECES = ["a", "b", "▁", "aa", "ab", "ba", "▁a", "aab", "bb", "▁▁", "abab", "aaa", "▁ab", "ab▁"]


@given(
    scores=st.permutations([-float(i) for i in range(len(PIECES))]),
    text=st.text("ab é", max_size=14),
)
@settings(max_examples=150)
def test_merges_follow_the_scores_as_sentencepiece_does(scores: list[float], text: str) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    score_of = dict(zip(PIECES, scores, strict=True))
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.array([0.0] * 259 + scores, np.float32),
            "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(PIECES)),
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    symbols = list(text.replace(" ", "▁"))
    while True:  # join the neighbours whose union scores highest, the leftmost of equals
        joins = [
            (score_of[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score_of
        ]
        if not joins:
            break
        i = -max(joins)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    expected = []
    for symbol in symbols:
        fallback = [3 + byte for byte in symbol.encode()]
        expected += [tokens.index(symbol)] if symbol in score_of else fallback
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


GGUF = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab", "▁"],
    "tokenizer.ggml.scores": np.zeros(5, np.float32),
    "tokenizer.ggml.token_type": np.array([2, 1, 1, 1, 1]),
}


def test_what_has_neither_piece_nor_bytes_is_unknown() -> None:
    tokenizer = load_tokenizer(GGUF)
    assert tokenizer.encode("aéüb") == [4, 1, 0, 2]  # neighbours are one unknown
    assert tokenizer.is_special(0)


def test_tokens_that_a_user_defined_are_text_unless_the_template_names_them() -> None:
    metadata = GGUF | {
        "tokenizer.ggml.tokens": ["<unk>", "a", "<b>", "<c>", "▁"],
        "tokenizer.ggml.token_type": np.array([2, 1, 4, 3, 1]),
        "tokenizer.ggml.add_space_prefix": False,
    }
    for named_in, ids in (("", [1, 2, 1]), ("'<b>'", [1, 0, 1])):
        tokenizer = load_tokenizer(metadata, named_in=named_in)
        assert tokenizer.encode("a<b>a", parse_special=False) == ids
        assert tokenizer.encode("a<c>a", parse_special=False) == [1, 0, 1]
        assert tokenizer.encode("a<b>a") == [1, 2, 1]
        assert not tokenizer.is_special(2)


def test_gemma_4_has_merges_of_its_own() -> None:
    tokens = ["<unk>", "<bos>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["a", "b", "▁", "ab", "▁a", "▁▁", "ba"]
    first = tokens.index("a")
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 7,
        "tokenizer.ggml.scores": np.full(len(tokens), -1000.0),  # which say nothing
        "tokenizer.ggml.merges": ["▁ ▁", "b a", "a b", "▁ a"],
    }
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("aba ab  é\n") == [
        first, first + 6, first + 2, first + 3, first + 5, 2 + 0xC3, 2 + 0xA9, 2 + 10
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode(" aba  é")) == " aba  é"
    with pytest.raises(ModelFileError, match="merges is missing"):
        load_tokenizer(metadata | {"tokenizer.ggml.merges": None})


def test_text_that_spells_a_byte_token_is_text() -> None:
    tokens = ["<unk>", "<0x0A>", *"<0xA>", "<0", "<0x", "<0x0", "<0x0A"]
    metadata = GGUF | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens)),
        "tokenizer.ggml.token_type": np.array([2, 6] + [1] * (len(tokens) - 2)),
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("<0x0A>") == [tokens.index("<0x0A"), tokens.index(">")]
    assert tokenizer.token_bytes(1) == b"\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv'; supported: gpt2 .*, llama .*, bert .*, t5"),
        ({"model": "bert"}, "unknown_token_id 100 is not a token"),
        (
            {"model": "bert", "unknown_token_id": 1, "tokens": ["a", "b", "▁##b", "c", "d"]},
            "twice",
        ),
        ({"model": "t5", "remove_extra_whitespaces": False}, "extra_whitespaces is false, which"),
        ({"model": "t5", "add_space_prefix": False}, "add_space_prefix is false, which is not"),
        (
            {"model": "t5", "token_type": [2, 1, 6, 1, 1]},
            "has bytes, which is not supported for t5",
        ),
        ({"model": "t5", "token_type": [2] * 5}, "no normal token"),
        ({"model": "t5", "precompiled_charsmap": np.zeros(3)}, "library refuses"),
        ({"model": None}, "supported: gpt2"),
        (
            {"model": "gpt2", "pre": "klingon"},
            "'klingon'; supported: gpt-2, default, smollm, qwen2",
        ),
        ({"model": "gpt2", "pre": "gpt-2"}, "merges is missing"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", 1]}, "not a list of strings"),
        ({"tokens": ["a", "a", "b", "c", "d"]}, "same token twice"),
        ({"tokens": ["<unk>", "a", "b", "c", "a" * 2000]}, "above 1024 characters"),
        ({"scores": None}, "scores must hold one number for each of the 5 tokens"),
        ({"scores": np.zeros(3)}, "scores must hold one number"),
        ({"scores": [0.0, float("nan"), 0.0, 0.0, 0.0]}, "not a number"),
        ({"token_type": np.zeros((5, 0))}, "not a number"),
        ({"unknown_token_id": 7}, "unknown_token_id 7 is not a token"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    metadata = GGUF | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer(metadata).prepare()


@pytest.mark.parametrize("kind", ENCODERS)
@given(text=mixed)
@example("Größe, façade! <|end|> 東京 x\u0301\u200b unused")
def test_encoders_from_gguf_have_the_ids_of_their_tokenizer_json(kind: str, text: str) -> None:
    make, metadata = ENCODERS[kind]
    tokenizer = load_tokenizer(metadata(make()))
    expected = theirs(make).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == theirs(make).decode(expected)


def test_accents_and_capitals_stay_where_a_file_says_so() -> None:
    metadata = of_bert(wordpiece())
    metadata["tokenizer.ggml.tokens"][-3:] = ["▁Ab", "▁ab", "▁áb"]
    last = len(metadata["tokenizer.ggml.tokens"])
    cased = metadata | {"tokenizer.ggml.normalizer.lowercase": False}
    accents = metadata | {"tokenizer.ggml.normalizer.strip_accents": False}
    assert load_tokenizer(metadata).encode("Ab áb") == [last - 2, last - 2]
    assert load_tokenizer(cased).encode("Ab áb") == [last - 3, last - 1]
    assert load_tokenizer(accents).encode("Ab áb") == [last - 2, last - 1]


def test_what_an_unknown_character_costs_is_said_by_normal_pieces_alone() -> None:
    """Ten below the least of them: here less than the way around it through three rare ones."""
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "▁a", "☃b", "c", "d", "bcd", "unused"],
        "tokenizer.ggml.scores": [-1e6, 0.0, -9.9, -10.0, -10.0, 0.0, -1e6],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1, 5],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert load_tokenizer(metadata).encode("a☃bcd") == [1, 0, 5]


def test_a_mask_takes_the_space_before_it() -> None:
    metadata = of_t5(unigram())
    metadata["tokenizer.ggml.tokens"][3] = "<mask>"
    tokenizer = load_tokenizer(metadata)
    cat = tokenizer.encode("The")
    assert tokenizer.encode("The <mask>") == tokenizer.encode("The<mask>") == [*cat, 3]


def test_masks_of_byte_level_encoders_do_so_too() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "Ġ", "[MASK]", "<mask>"],
        "tokenizer.ggml.token_type": [1, 1, 3, 3],
        "tokenizer.ggml.merges": [],
    }
    strips, not_so = [0, 2, 3], [0, 1, 2, 1, 3]
    for pre, ids in (("modern-bert", strips), ("roberta-bpe", strips), ("gpt-2", not_so)):
        tokenizer = load_tokenizer(metadata | {"tokenizer.ggml.pre": pre})
        assert tokenizer.encode("a [MASK] <mask>") == ids


def test_ids_need_nothing_of_the_library() -> None:
    """It takes a third of a start to build, and waits for text."""
    tokens = ["a", "b", "ab", "<end>"]
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([1, 1, 1, 3]),
            "tokenizer.ggml.merges": ["a b", "a c"],  # there is no c
        }
    )
    assert tokenizer.decode([2, 3, 1]) == "abb"
    assert tokenizer.is_special(3)
    for _ in range(2):  # who comes second is told the same
        with pytest.raises(ModelFileError, match="library refuses"):
            tokenizer.encode("ab")
    with pytest.raises(ModelFileError, match="library refuses"):
        tokenizer.prepare()


def test_llama_bpe_takes_whole_words_before_merging() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc", "abc"],
        "tokenizer.ggml.merges": ["b c", "a b", "ab c"],  # "abc" cannot be reached by merging
    }
    whole = ["llama-bpe", "llama3", "falcon3", "tekken", "glm4"]
    merged = ["gpt-2", "qwen2", "dbrx", "smaug-bpe", "chatglm-bpe", "gpt-4o"]
    for pre, ids in [*((pre, [5]) for pre in whole), *((pre, [0, 4]) for pre in merged)]:
        assert load_tokenizer(metadata | {"tokenizer.ggml.pre": pre}).encode("abc") == ids


def cuts(pre: str, text: str) -> list[str]:
    """Return the words that byte-level BPE would see of ``text``."""
    spec = tokenizer_json(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.ggml.merges": [],
        }
    )
    spec["pre_tokenizer"]["pretokenizers"].pop()  # what only spells bytes as letters
    spec["model"]["vocab"] = {"a": 0}
    library = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0"} | spec))
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]


GPT2 = "It|'s| 1234| ...|  | x|\n|\n|y"
DIGITS = "It|'s| |1|2|3|4| ...|  | x|\n|\n|y"
QWEN2 = "It|'s| |1|2|3|4| ...|  | x|\n\n|y"
LLAMA3 = "It|'s| |123|4| ...|  | x|\n\n|y"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("gpt-2 phi-2 olmo mpt jais mellum trillion a.x-4.0 gigachat exaone4 roberta-bpe", GPT2),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", DIGITS),
        ("qwen2 deepseek-r1-qwen megrez kormo hunyuan stablelm2 solar-open grok-2", QWEN2),
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", LLAMA3),
        ("dbrx smaug-bpe", LLAMA3),
        ("qwen35", "aB|'S| it|'s| |1|2|3|4|5| été|.É| 你好x| e\u0301| !?\r\n|/\n\n| | $|x|`|\tЖ"),
        (
            "seed-coder",
            "aB|'S| it|'s| |1|2|3|4|5| été|.É| 你好x| e|\u0301| !?|\r\n|/|\n\n| | $|x|`|\tЖ",
        ),
        (
            "glm4 chatglm-bpe",
            "aB|'S| it|'s| |123|45| été|.É| 你好x| e|\u0301| !?\r\n|/\n\n| | $|x|`|\tЖ",
        ),
        (
            "gpt-4o llama4 kanana2 minimax-m2 talkie",
            "a|B'S| it's| |123|45| été|.É| 你好x| e\u0301| !?\r\n/\n\n| | $|x|`|\tЖ",
        ),
        ("tekken", "a|B|'S| it|'s| |1|2|3|4|5| été|.É| 你好x| e\u0301| !?\r\n/\n\n| | $|x|`|\tЖ"),
        ("kimi-k2", "a|B'S| it's| |123|45| été|.É| |你好|x| e\u0301| !?\r\n|/\n\n| | $|x|`|\tЖ"),
        (
            "deepseek-llm",
            "aB|'|S| it|'|s| |1|2|3|4|5| é|t|é|.|É| |你好|x| e|\u0301| !?|\r|\n|/|\n|\n| "
            "| $|x|`|\tЖ",
        ),
        (
            "deepseek-coder",
            "aB|'|S| it|'|s| |1|2|3|4|5| été|.|É| |你好|x| e|\u0301| !?|\r|\n|/|\n|\n|  $|x|`|\tЖ",
        ),
        (
            "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
            "aB|'S| it|'s| |123|45| été|.|É| |你好|x| e\u0301| !?\r\n|/\n\n| | $|x|`|\tЖ",
        ),
        (
            "falcon",
            "aB|'|S| it|'|s| |123|45| été|.|É| 你好x| e|\u0301| |!?|\r\n|/|\n\n  |$|x|`|\t|Ж",
        ),
        (
            "default",
            "aB|'|S| it|'|s| |123|45| été|.|É| 你好x| e|\u0301| |!?|\r\n|/|\n\n  |$|x|`|\t|Ж",
        ),
        (
            "bloom gpt3-finnish poro-chat",
            "aB'S| it's| 12345| été|.|É| 你好x| e\u0301| !?\r\n|/|\n\n | $x`|\t|Ж",
        ),
        (
            "viking",
            "aB'S| it's| |1|2|3|4|5| été|.|É| 你好x| e\u0301| !?\r\n|/|\n\n | $x`|\t|Ж",
        ),
        ("superbpe", "aB'S it's |12|345| été.É 你好x e\u0301 !?\r\n/\n\n  $x`\tЖ"),
        (
            "gpt-2 mpt olmo",
            "aB|'|S| it|'s| 12345| été|.|É| 你好x| e|\u0301| !?|\r|\n|/|\n\n | $|x|`|\t|Ж",
        ),
        (
            "smollm",
            "aB|'|S| it|'s| |1|2|3|4|5| été|.|É| 你好x| e|\u0301| !?|\r|\n|/|\n\n | $|x|`|\t|Ж",
        ),
        ("qwen2", "aB|'S| it|'s| |1|2|3|4|5| été|.É| 你好x| e|\u0301| !?\r\n|/\n\n| | $|x|`|\tЖ"),
    ],
)
def test_pre_tokenizers_cut_where_llama_cpp_does(names: str, words: str) -> None:
    """Under each of their names; the words are those of llama.cpp 0.5.0."""
    for pre in names.split():
        assert "|".join(cuts(pre, words.replace("|", ""))) == words


def phi3(**changes: Any) -> Tokenizer:
    """A vocabulary with the types that GGUF files of Phi-3 have."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "H", "i", "▁H"]
    tokens += ["▁Hi", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "[PAD]"]
    return load_tokenizer(
        {
            "general.architecture": "phi3",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.arange(0, -len(tokens), -1, np.float32),
            "tokenizer.ggml.token_type": np.array([3, 3, 4] + [6] * 256 + [1] * 5 + [3] * 4 + [2]),
        }
        | changes
    )


HI = 263
ENDOFTEXT, ASSISTANT, END, USER, PAD = range(264, 269)
SPACE, NEWLINE = 259, 3 + ord("\n")


def test_control_tokens_of_phi_3_strip_the_white_space_behind_them() -> None:
    tokenizer = phi3()
    turn = "<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert tokenizer.encode(turn) == [USER, HI, END, ASSISTANT]
    assert tokenizer.encode_shielded(turn) == [USER, HI, END, ASSISTANT]
    assert tokenizer.encode("</s> \t\r\n Hi[PAD]\n") == [2, HI, PAD]
    # White space before them stays, and behind these three.
    assert tokenizer.encode("Hi\n<|end|>") == [HI, NEWLINE, END]
    for token in (0, 1, ENDOFTEXT):
        text = tokenizer.token_bytes(token).decode() + "\nHi"
        assert tokenizer.encode(text)[:3] == [token, SPACE, NEWLINE]
    # What a user wrote is text, its first white space too where it is no control token's.
    shielded = tokenizer.shield("<|end|>\nHi")
    assert END not in tokenizer.encode_shielded(shielded)
    assert NEWLINE in tokenizer.encode_shielded(shielded)


def test_a_conversation_has_llama_cpps_ids_with_phi_3s_template() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}{{ '<|user|>' + '\n' + message['content'] "
        "+ '<|end|>' + '\n' + '<|assistant|>' + '\n' }}{% endfor %}"
    )
    template = ChatTemplate(source, phi3(), bos_token="<s>")
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render_ids(messages) == [1, USER, HI, END, ASSISTANT]
    template.close()


def test_no_other_model_strips() -> None:
    for changes in ({"general.architecture": "llama"}, {"general.architecture": None}):
        assert phi3(**changes).encode("<|user|>\nHi")[:3] == [USER, SPACE, NEWLINE]
