"""Which of a folder's or repository's GGUF files are models, and which one to take.

A larger file of the same model is the better one, nearly without exception. So without a tag it is
the largest that fits into memory, up to eight bits a weight: beyond them nothing is gained. This
module knows names and sizes, and opens nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from ridgeline.system.report import gb

# Q4_K_M, UD-Q4_K_XL, IQ4_NL, Q8_0, F16: between the name and an optional "-00001-of-00003".
_FILE = re.compile(
    r"(?:.*?[-._])?(?P<tag>(?:UD-)?I?Q\d+_[A-Z0-9_]+|TQ\d_\d|MXFP\d(?:_MOE)?|BF16|FP?16|FP?32)"
    r"(?P<split>-\d{5}-of-\d{5})?\.gguf",
    re.IGNORECASE,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # projectors of images, statistics
_UNREADABLE = re.compile(r"TQ|MXFP(?!4)", re.IGNORECASE)
_WIDE = re.compile(r"BF16|FP?16|FP?32", re.IGNORECASE)
_BESIDE_BYTES = 512 << 20  # a cache for a short conversation, and the work of a step


class GgufModel(NamedTuple):
    """A model in one GGUF file or in several.

    Attributes:
        tag: its quantisation in capitals, such as Q4_K_M; the file's name where it says none.
        files: in order; paths inside the repository or folder.
        size: bytes of all of them.
    """

    tag: str
    files: tuple[str, ...]
    size: int

    @property
    def needed_bytes(self) -> int:
        """Memory that it takes to run, about."""
        return needed_bytes(self.size)


def needed_bytes(size: int) -> int:
    """Return about how much memory a model of ``size`` bytes takes to run."""
    return size + size // 10 + _BESIDE_BYTES


def gguf_models(sizes: Mapping[str, int]) -> list[GgufModel]:
    """Return the models among files, the largest first; parts of one model that are all there.

    ``sizes`` has the bytes of each file by its path.
    """
    models: list[GgufModel] = []
    for file in sizes:
        name = file.rpartition("/")[2]
        if not name.lower().endswith(".gguf") or _NO_MODEL.search(name):
            continue
        part = _PART.search(name)
        if part and int(part[1]) != 1:
            continue
        files: tuple[str, ...] = (file,)
        if part and int(part[2]) > 1:
            head, count = file[: -len(part[0])], int(part[2])
            names = (f"{head}-{i:05}-of-{part[2]}{part[0][-5:]}" for i in range(1, count + 1))
            files = tuple(takewhile(sizes.__contains__, names))
            if len(files) < count:
                continue
        models.append(GgufModel(tag_of(name), files, sum(sizes[other] for other in files)))
    return sorted(models, key=lambda model: (-model.size, model.files))


def tag_of(name: str) -> str:
    """Return the quantisation that a file's name says, in capitals; else the name."""
    match = _FILE.fullmatch(name)
    return match["tag"].upper() if match else name


def names_of(models: Sequence[GgufModel]) -> list[str]:
    """Return what means each of a repository's models alone: its quantisation, or else its file."""
    counts = Counter(model.tag for model in models)
    return [
        model.tag if counts[model.tag] == 1 else model.files[0].rpartition("/")[2]
        for model in models
    ]


def pick(models: Sequence[GgufModel], wanted: str, budget_bytes: int) -> tuple[GgufModel, str]:
    """Return the model to take, and why in words (empty where there was no choice).

    Args:
        models: at least one.
        wanted: a quantisation or the name of a file; empty for the best that fits.
        budget_bytes: memory that is free.

    Raises:
        ValueError: there is no such quantisation, several files have it, or nothing fits.
    """
    if wanted:
        return _named(models, wanted), ""
    if len(models) == 1:
        return models[0], ""
    readable = [model for model in models if not _UNREADABLE.match(model.tag)]
    narrow = [model for model in readable if not _WIDE.fullmatch(model.tag)] or readable or models
    fitting = [model for model in narrow if model.needed_bytes <= budget_bytes]
    if not fitting:
        smallest = narrow[-1]
        raise ValueError(
            f"the smallest, {smallest.tag}, needs about {gb(smallest.needed_bytes)} of memory, "
            f"and {gb(budget_bytes)} is free: free some, or name it to use it all the same "
            f"(:{smallest.tag})"
        )
    best = fitting[0]
    larger = [model for model in narrow if model.size > best.size]
    why = (
        f"{best.tag} ({gb(best.size)}) is the best of {len(models)} for {gb(budget_bytes)} of free "
        f"memory"
    )
    if larger:
        why += f"; {larger[-1].tag} would need about {gb(larger[-1].needed_bytes)}"
    return best, why


def _named(models: Sequence[GgufModel], wanted: str) -> GgufModel:
    """Return the only model with this quantisation or file name."""
    matches = [model for model in models if model.tag == wanted.upper()] or [
        model for model in models if wanted in (model.files[0], model.files[0].rpartition("/")[2])
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(model.files[0] for model in matches)
        raise ValueError(f"{wanted} is ambiguous: give a file's name instead ({names})")
    tags = ", ".join(dict.fromkeys(model.tag for model in models))
    raise ValueError(f"there is no {wanted!r}; there are {tags}")
