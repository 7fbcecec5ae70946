"""Fill in the middle: the prompt that asks a model for what stands between two texts.

A model trained for it knows tokens that mark prefix, suffix and middle (Bavarian et al., 2022): its
tokenizer takes them for control tokens. The prompt is prefix, suffix, middle, so that the answer
follows the text before the cursor. Some models also mark the files of a repository (Hui et al.,
Qwen2.5-Coder, 2024). Text and token ids only: this module knows nothing of requests and weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.text.tokenizers.tokenizer import Tokenizer

# How vocabularies spell the tokens around prefix, suffix and middle. Each model has one set.
_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek-Coder, with fullwidth bars
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
_REPOS = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>")
# All of them, for code that must know that they are no text.
FIM_SPELLINGS = " ".join([*(one for each in _SPELLINGS for one in each), *_PADS, *_REPOS, *_FILES])
# Their names in GGUF: tokenizer.ggml.NAME_token_id, the second for older files.
_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repo": ("fim_rep",),
    "file": ("fim_sep",),
}
# The repository and the open file have no name in a request; these models always saw one.
_REPO_NAME, _OPEN_FILE_NAME = "project", "current"


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The control tokens of a model that can fill in the middle; None where it has none."""

    prefix: int
    suffix: int
    middle: int
    pad: int | None = None
    repo: int | None = None
    file: int | None = None

    @property
    def stops(self) -> tuple[int, ...]:
        """All of them: where the model writes one, the middle is over."""
        others = (self.pad, self.repo, self.file)
        return (self.prefix, self.suffix, self.middle, *(i for i in others if i is not None))


class File(NamedTuple):
    """A file that helps to understand the open one."""

    name: str
    text: str


class InfillPrompt(NamedTuple):
    """A prompt, and whether some text had to be left out of it."""

    ids: list[int]
    is_truncated: bool


def find_fim_tokens(
    tokenizer: Tokenizer, source: Path | Mapping[str, Any] | None = None
) -> FimTokens | None:
    """Return the model's tokens for filling in the middle, None if it has none.

    Args:
        tokenizer: the model's.
        source: GGUF metadata, whose ids go before the vocabulary's spellings.
    """
    metadata = source if isinstance(source, Mapping) else {}
    ids_by_role: dict[str, int | None] = {
        role: _named(tokenizer, metadata, keys) for role, keys in _KEYS.items()
    }
    if None in (ids_by_role["prefix"], ids_by_role["suffix"], ids_by_role["middle"]):
        for spellings in _SPELLINGS:
            ids = [tokenizer.control_id(spelling) for spelling in spellings]
            if None not in ids:
                ids_by_role |= dict(zip(("prefix", "suffix", "middle"), ids, strict=True))
                break
        else:
            return None
    for role, names in (("pad", _PADS), ("repo", _REPOS), ("file", _FILES)):
        if ids_by_role[role] is None:
            control_ids = (i for name in names if (i := tokenizer.control_id(name)) is not None)
            ids_by_role[role] = next(control_ids, None)
    return FimTokens(**ids_by_role)  # type: ignore[arg-type]  # the first three are not None


def _named(tokenizer: Tokenizer, metadata: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Return the first id that the metadata gives under one of ``keys``; others are ignored."""
    for key in keys:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int and 0 <= value < tokenizer.vocab_size:
            return value
    return None


def infill_prompt(
    tokenizer: Tokenizer,
    fim: FimTokens,
    prefix: str | Sequence[int],
    suffix: str,
    files: Sequence[File] = (),
    room: int = sys.maxsize,
) -> InfillPrompt:
    """Return the prompt whose answer belongs between ``prefix`` and ``suffix``.

    Control tokens that the texts spell are text. In too little room the texts nearest to the
    cursor stay: at least a quarter of the room for the suffix and three for the prefix where they
    are that long, then whole files, the last first.

    Args:
        tokenizer: the model's.
        fim: its tokens for this.
        prefix: text before the cursor, or its token ids.
        suffix: text behind the cursor.
        files: other files, the most important last.
        room: most tokens that the prompt may have.

    Raises:
        ValueError: a text has a lone surrogate, or ``room`` has no token for text.
    """

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, parse_special=False, add_bos=False)

    start = list(tokenizer.begin_ids)
    before = ids_of(prefix) if isinstance(prefix, str) else list(prefix)
    after = ids_of(suffix)
    left = room - len(start) - 3
    if left < 1:
        raise ValueError(f"a prompt of at most {room} tokens has no room for text")
    num_after = min(len(after), max(left // 4, left - len(before)))
    num_before = min(len(before), left - num_after)
    is_truncated = num_before < len(before) or num_after < len(after)
    before, after = before[len(before) - num_before :], after[:num_after]
    left -= num_before + num_after

    others: list[int] = []
    if files:
        others, num_kept = _context(ids_of, fim, files, left)
        is_truncated |= num_kept < len(files)
    ids = [*start, *others, fim.prefix, *before, fim.suffix, *after, fim.middle]
    return InfillPrompt(ids, is_truncated)


def _context(
    ids_of: Callable[[str], list[int]], fim: FimTokens, files: Sequence[File], room: int
) -> tuple[list[int], int]:
    """Return the tokens of as many of the last files as fit, and how many they are."""
    frame: list[int] = [] if fim.repo is None else [fim.repo, *ids_of(f"{_REPO_NAME}\n")]
    ending: list[int] = [] if fim.file is None else [fim.file, *ids_of(f"{_OPEN_FILE_NAME}\n")]
    parts: list[list[int]] = []
    num_ids = len(frame) + len(ending)
    for file in reversed(files):
        if fim.file is None:
            part = ids_of(f"\n\n--- {file.name} ---\n\n{file.text}\n")
        else:
            part = [fim.file, *ids_of(f"{file.name}\n{file.text}\n")]
        num_ids += len(part)
        if num_ids > room:
            break
        parts.insert(0, part)
    if not parts:
        return [], 0
    return [*frame, *(i for part in parts for i in part), *ending], len(parts)
