"""Lists of modules in a ``quantization_config``: names, names with stars, regular expressions.

They come from strangers, and the standard library's expressions can take for ever. So one is cut at
its ``.*``, whose parts then follow each other wherever they come first, and a part may not try
several ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

_MOST_NAMES = 4096
_MOST_PATTERNS = 32  # each is tried on each module
_MOST_LETTERS = 200
# What files of other halves and other classes put into names of modules that are counted here.
_OTHER_NAMES = (
    (re.compile(r"(?<![a-z_])language_model\.(?=model\.|layers\.|lm_head)"), ""),
    (re.compile(r"(?<![a-z_])block_sparse_moe(?![a-z_])"), "mlp"),
    (re.compile(r"(?<![a-z_])shared_expert(?![a-z_])"), "shared_experts"),
    (re.compile(r"(?<![a-z_])in_proj_(qkv|z)(?![a-z_])"), r"in_proj_qkvz.\1"),
    (re.compile(r"(?<=\.experts)\.\d+(?:\.\w+)*$"), ""),  # one for all of them
)
# Of files whose layers are halves of those counted here: a mixer, or what stands behind it.
_HALF = re.compile(r"(?:backbone|model)\.layers\.(\d+)\.mixer(?![a-z_])")
_OF_HALVES = {
    **dict.fromkeys(("M", "mamba"), "mamba"),
    **dict.fromkeys(("*", "attention"), "self_attn"),
    **dict.fromkeys(("-", "E", "mlp", "moe"), "mlp"),
}
_SEVERAL_WAYS = re.compile(r"(?<!\\)(?:[*{]|\?(?!:)|(?<!\\d)(?<!\[0-9\])\+)")


_Parts = tuple[re.Pattern[str], ...]


@dataclass(frozen=True)
class Modules:
    """Modules that a list names, as a part of their full name or by a pattern that fits its begin.

    Names that end with their only star are looked up, and may be many. Raises
    ValueError for a pattern that is not understood, or too many others.
    """

    names: tuple[str, ...] = ()
    _plain: frozenset[str] = field(init=False, repr=False, compare=False)
    _ends: frozenset[str] = field(init=False, repr=False, compare=False)  # last steps of those
    _begins: frozenset[str] = field(init=False, repr=False, compare=False)
    _patterns: tuple[_Parts, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(map(_as_counted, self.names))
        starred = [name for name in names if name.startswith("re:") or "*" in name]
        begins = {name for name in starred if 0 < name.find("*") == len(name) - 1 <= _MOST_LETTERS}
        begins = {name for name in begins if not name.startswith("re:")}
        by_pattern = [name for name in starred if name not in begins]
        if len(names) > _MOST_NAMES or len(by_pattern) > _MOST_PATTERNS:
            raise ValueError(
                f"{len(names)} modules are named, {len(by_pattern)} of them by a pattern: at most "
                f"{_MOST_NAMES}, and {_MOST_PATTERNS}"
            )
        plain = frozenset(names).difference(starred)
        object.__setattr__(self, "_begins", frozenset(name[:-1] for name in begins))
        object.__setattr__(self, "_plain", plain)
        object.__setattr__(self, "_ends", frozenset(name.rpartition(".")[2] for name in plain))
        object.__setattr__(self, "_patterns", tuple(map(_parts, by_pattern)))

    def __contains__(self, full_name: str) -> bool:
        steps = full_name.split(".")
        ends = (end for end, step in enumerate(steps, start=1) if step in self._ends)
        runs = (".".join(steps[start:end]) for end in ends for start in range(end))
        is_plain = any(run in self._plain for run in runs)
        is_begun = self._begins and any(
            full_name[:end] in self._begins for end in range(1, len(full_name) + 1)
        )
        return (
            is_plain or bool(is_begun) or any(_follow(parts, full_name) for parts in self._patterns)
        )


def with_layers_joined(names: Iterable[str], halves: Sequence[str]) -> tuple[str, ...]:
    """Return names of modules of a file that numbers halves of layers, with layers' numbers.

    Args:
        names: such as "backbone.layers.5.mixer.q_proj".
        halves: what each half is, as ``hybrid_override_pattern`` or ``layers_block_type`` says.
    """
    parts = [_OF_HALVES.get(str(half), "") for half in halves]
    begun = list(accumulate(part != "mlp" for part in parts))

    def joined(half: re.Match[str]) -> str:
        number = int(half[1])
        if number >= len(parts):
            return half[0]
        return f"model.layers.{begun[number] - 1}.{parts[number]}"

    return tuple(_HALF.sub(joined, name) for name in names)


def _as_counted(name: str) -> str:
    """Return a name as the modules are called here; a regular expression as it is."""
    for other, ours in () if name.startswith("re:") else _OTHER_NAMES:
        name = other.sub(ours, name)
    return name


def _parts(pattern: str) -> _Parts:
    """Return what must follow each other in a name. Raises ValueError."""
    if pattern.startswith("re:"):
        texts = re.split(r"(?<!\\)\.\*\??", pattern[3:])
    else:
        texts = list(map(re.escape, pattern.split("*")))
    try:
        if len(pattern) > _MOST_LETTERS or any(map(_SEVERAL_WAYS.search, texts)):
            raise ValueError
        return tuple(map(re.compile, texts))
    except (ValueError, re.error, RecursionError, OverflowError):
        raise ValueError(f"the pattern of modules {pattern[:80]!r} is not understood") from None


def _follow(parts: _Parts, full_name: str) -> bool:
    """Return whether the parts come one behind the other, the first at the begin."""
    found = parts[0].match(full_name)
    for part in parts[1:]:
        found = found and part.search(full_name, found.end())
    return found is not None


NO_MODULES = Modules()
