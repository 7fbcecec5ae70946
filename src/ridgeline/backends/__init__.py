"""Backends by name: each shows what ``backends.interface`` describes, and hides the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ridgeline.backends.interface import Backend


def _cpu() -> Backend:
    from ridgeline.backends import cpu

    return cpu


def _reference() -> Backend:
    from ridgeline.backends import reference

    return reference


def _cuda() -> Backend:
    from ridgeline.backends import cuda

    return cuda


_IMPORTS = {"cpu": _cpu, "reference": _reference, "cuda": _cuda}


class _Backends(Mapping[str, Backend]):
    """A backend is imported when it is asked for: others may need what is not installed here."""

    def __getitem__(self, name: str) -> Backend:
        return _IMPORTS[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(_IMPORTS)

    def __len__(self) -> int:
        return len(_IMPORTS)


BACKENDS: Mapping[str, Backend] = _Backends()
AUTO: Final = "cpu"  # what "auto" means where no GPU has passed its checks
