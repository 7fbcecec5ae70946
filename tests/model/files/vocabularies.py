"""Tokenizers to test with: real ones where they are here, and small ones trained on the spot."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ridgeline.engine.setup.home import default_home
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

VECTORS = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"
# The rest of the folder models/ in llama.cpp's source may lie here.
MORE_VECTORS = default_home() / "vocabularies"
WITH_VECTORS = [
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "qwen2",
    "phi-3",
    "falcon",
    "mpt",
    "refact",
    "starcoder",
    "command-r",
    "deepseek-llm",
    "deepseek-coder",
    "qwen35",
    "gemma-4",
    "bert-bge",
]


def _path(name: str) -> Path:
    file = f"ggml-vocab-{name}.gguf"
    return VECTORS / file if (VECTORS / file).exists() else MORE_VECTORS / file


VOCABULARIES = {
    **{name: _path(name) for name in WITH_VECTORS},
    "smollm2": default_home() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf",
}
CORPUS = [
    "The cat sat on the mat, and the dog said: hello world! It's 2024, isn't it?\n\n",
    "def main(args):\n    return {'answer': 42, \"naïve\": [1, 2, 3]}\n",
    "Größe, façade, 東京 日本語, Привет мир, नमस्ते, 👩‍👩‍👧‍👦 🇫🇷 e\u0301\n",
] * 5


@functools.cache
def vocabulary(name: str) -> tuple[dict[str, Any], Tokenizer]:
    path = VOCABULARIES[name]
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    metadata, _ = read_gguf(path)
    return metadata, load_tokenizer(metadata)


@functools.cache
def byte_level() -> dict[str, Any]:
    """A tokenizer.json with control tokens, a tag that is not special, and runs of spaces."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|end|>x"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(["<think>", "    ", "※"])
    spec: dict[str, Any] = json.loads(library.to_str())
    spec["added_tokens"][0]["rstrip"] = spec["added_tokens"][1]["lstrip"] = True
    return spec


@functools.cache
def sentencepiece() -> dict[str, Any]:
    """A tokenizer.json as Llama 2 has it: no pre-tokenizer, byte fallback, one space in front."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<|end|>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    library.train_from_iterator(CORPUS[:10], trainer)
    spec: dict[str, Any] = json.loads(library.to_str())
    spec["added_tokens"] = spec["added_tokens"][:4]
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    spec["pre_tokenizer"] = None
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return spec


@functools.cache
def metaspace_first() -> dict[str, Any]:
    """The newer form: a space only where the whole text begins; control tokens eat spaces."""
    spec = copy.deepcopy(sentencepiece())
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    spec["added_tokens"][3]["rstrip"] = True
    return spec


@functools.cache
def wordpiece() -> dict[str, Any]:
    """A tokenizer.json as BERT has it."""
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "<s>", "</s>", "<|end|>"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    spec: dict[str, Any] = json.loads(library.to_str())
    return spec


@functools.cache
def unigram() -> dict[str, Any]:
    """A tokenizer.json as XLM-RoBERTa and T5 have it."""
    library = tokenizers.Tokenizer(models.Unigram())
    whole_words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    library.pre_tokenizer = pre_tokenizers.Sequence(whole_words)
    library.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>", "<|end|>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    spec: dict[str, Any] = json.loads(library.to_str())
    return spec


SPECS = [byte_level, sentencepiece, metaspace_first, wordpiece, unigram]
any_spec = pytest.mark.parametrize("make", SPECS, ids=lambda make: make.__name__)
FRAGMENTS = """<|end|> <|end|>x </s> <s> <unk> <think> ※ < |end|> <0x0A> ▁ Hello é 日本 👩‍👩‍👧"""
fragments = st.sampled_from(
    [*FRAGMENTS.split(), " ", "    ", "\n", " world", "\ufdd0", "\ufdd4", "\0"]
)
mixed = st.lists(fragments | st.text(max_size=4), max_size=12).map("".join)


@functools.cache
def ours(make: Callable[[], dict[str, Any]]) -> Tokenizer:
    return Tokenizer(copy.deepcopy(make()), named_in="<think>")


@functools.cache
def theirs(make: Callable[[], dict[str, Any]]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(make()))


@functools.cache
def control_ids(make: Callable[[], dict[str, Any]]) -> list[int]:
    """The special tokens that no text becomes; any text may become the unknown token."""
    special = [t for t in make()["added_tokens"] if t["special"]]
    return [t["id"] for t in special if t["content"] not in ("<unk>", "[UNK]")]


@functools.cache
def without_added(make: Callable[[], dict[str, Any]]) -> tokenizers.Tokenizer:
    """Everything is text, and so are the tokens that are no control tokens."""
    spec = copy.deepcopy(make())
    tokens = spec["added_tokens"]
    spec["added_tokens"] = [t for t in tokens if not t["special"] and t["content"] != "<think>"]
    if spec["model"]["type"] == "Unigram":  # text would match what stands in the vocabulary
        for token in make()["added_tokens"]:
            spec["model"]["vocab"][token["id"]][0] = f"\ufdef{token['id']}"
    else:
        spec["model"]["vocab"] |= {t["content"]: t["id"] for t in spec["added_tokens"]}
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def of_bert(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that converters write for a WordPiece tokenizer.json."""
    vocab, special = spec["model"]["vocab"], {t["id"] for t in spec["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    phantom = [t[2:] if t.startswith("##") else f"▁{t}" for t in tokens]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [
            t if i in special else p for i, (t, p) in enumerate(zip(tokens, phantom, strict=True))
        ],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 1,
    }


def of_t5(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the same for a Unigram tokenizer.json; charsmaps come from real files only."""
    vocab = [*spec["model"]["vocab"], ["unused", -1e4]]
    controls = {t["id"]: 2 if t["content"] == "<unk>" else 3 for t in spec["added_tokens"]}
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in vocab],
        "tokenizer.ggml.scores": np.array([score for _, score in vocab]),
        "tokenizer.ggml.token_type": [controls.get(i, 1) for i in range(len(vocab) - 1)] + [5],
        "tokenizer.ggml.unknown_token_id": 2,
    }


ENCODERS = {"bert": (wordpiece, of_bert), "t5": (unigram, of_t5)}
