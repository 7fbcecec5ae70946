"""Many random texts: the ids and the words of the library, whatever the vocabulary.

Every vocabulary that is here takes part: those trained on the spot, those of GGUF files, written
as a tokenizer.json, and each tokenizer.json in ``MORE_VECTORS``.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ridgeline.text.grammar.export import export_tokenizer
from ridgeline.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests import tiny
from tests.model.files.vocabularies import CORPUS, MORE_VECTORS, SPECS, VOCABULARIES, vocabulary

NUM_TEXTS = 2_500  # of each; trained and shared vocabularies alone make it more than 20,000
FILES = {path.stem: path for path in sorted(MORE_VECTORS.glob("*.json"))}
TRAINED = {make.__name__: make for make in SPECS}
# Their added tokens such as ö are text; the library takes the letter for a byte.
GARBLED = ("deepseek-llm", "deepseek-coder")
BITS = (" ", "  ", "\n", "\r\n", "\t", "▁", "'s", "'LL", "1234567", "e\u0301", "ÿ", "/\n", "aBcD")


def texts(seed: str, spellings: list[str]) -> Iterator[str]:
    """Draw texts of words, spellings of tokens, white space and any characters at all."""
    draw = random.Random(seed)
    corpus = "".join(dict.fromkeys(CORPUS))

    def part() -> str:
        kind = draw.random()
        if kind < 0.4:
            start = draw.randrange(len(corpus))
            return corpus[start : start + draw.randint(1, 30)]
        if kind < 0.6 and spellings:
            return draw.choice(spellings)
        if kind < 0.8:
            return draw.choice(BITS)
        low, high = draw.choice(((0, 0x7F), (0xA0, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000)))
        return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 6)))

    for _ in range(NUM_TEXTS):
        yield "".join(part() for _ in range(draw.randint(1, 8)))


def both(name: str, folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer, dict[str, Any]]:
    """Return our tokenizer, the library's, and the tokenizer.json of both."""
    if name in FILES:
        ours, path = load_tokenizer(FILES[name]), FILES[name]
    elif name in TRAINED:
        spec = copy.deepcopy(TRAINED[name]())
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(spec))
        ours = Tokenizer(spec)
    else:
        metadata, ours = vocabulary(name)
        checkpoint = replace(tiny.checkpoint(tiny.PLAIN), tokenizer=metadata)
        path = export_tokenizer(checkpoint, ours, folder)[0]
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.no_truncation()
    theirs.no_padding()
    return ours, theirs, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.full
@pytest.mark.parametrize("name", [*TRAINED, *VOCABULARIES, *FILES])
def test_the_library_agrees(name: str, tmp_path: Path) -> None:
    ours, theirs, spec = both(name, tmp_path)
    vocab = spec["model"]["vocab"]
    pieces = list(vocab) if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    controls = [token["content"] for token in spec["added_tokens"]]
    for text in texts(name, [*controls[:50], *pieces[:: len(pieces) // 50]]):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False) == ids, text
        assert name in GARBLED or ours.decode(ids) == theirs.decode(ids), text
