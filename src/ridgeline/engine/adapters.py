"""The adapters of a model by name: which are loaded, who uses them, and which must go.

A request holds a lease of its adapter. An adapter without a lease and without a name is gone from
memory, so an adapter can be unloaded at any time: requests under way keep it to their end. Any
thread may call.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from ridgeline.backends.interface import KeptAdapter
from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.engine.setup.options import Options, parse_bytes
from ridgeline.model.files.adapters import AdapterWeights, Base, read_adapter

_EXTRA_BYTES = 256 << 20  # for those that come later, unless --lora-memory says it
_RANK = 64  # of these, unless --max-lora-rank says it


class LoRARequest(NamedTuple):
    """An adapter as vLLM's users name it; the number is not used."""

    lora_name: str
    lora_int_id: int
    lora_path: str


def _as_ours(given: object) -> object:
    """Return vLLM's own ``LoRARequest``, or what has the same two attributes, as ours."""
    name, path = (getattr(given, of, None) for of in ("lora_name", "lora_path"))
    if isinstance(given, str | LoRARequest) or not (
        isinstance(name, str) and isinstance(path, str)
    ):
        return given
    return LoRARequest(name, getattr(given, "lora_int_id", 0), path)


class NoRoom(ValueError):
    """Adapters in use leave no memory for another one; later there may be some."""


AnyLora = str | LoRARequest | None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Lease(Adapter):
    """An adapter as one request has it; its weights stay in memory as long as this lives."""

    handle: KeptAdapter


@dataclass(slots=True, eq=False)
class _Named:
    """An adapter that has a name; without a handle it is read again when it is asked for."""

    path: Path
    number: int = 0
    digest: bytes = b""
    handle: KeptAdapter | None = None
    leases: WeakSet[Lease] = field(default_factory=WeakSet)


def read_adapters(
    paths: Mapping[str, str | Path], base: Base
) -> dict[str, tuple[Path, AdapterWeights]]:
    """Read the adapters to load at the start, by name. Raises ModelFileError (a ValueError)."""
    return {
        name: (Path(path).expanduser(), read_adapter(Path(path).expanduser(), base))
        for name, path in paths.items()
    }


def room_for(options: Options, weights: Sequence[AdapterWeights]) -> tuple[int, int]:
    """Return the largest rank to make room for, and the bytes to leave for adapters at first."""
    max_lora_rank = max((one.rank for one in weights), default=0)
    if options.enable_lora:
        max_lora_rank = max(max_lora_rank, _RANK)
    if max_lora_rank and options.max_lora_rank:
        max_lora_rank = options.max_lora_rank
    if options.lora_memory:
        return max_lora_rank, parse_bytes(options.lora_memory, "--lora-memory")
    num_bytes = sum(one.num_bytes for one in weights)
    num_bytes += num_bytes // 8 + (_EXTRA_BYTES if options.enable_lora else 0)
    return max_lora_rank, num_bytes


class Adapters:
    """Adapters by name, in the order in which they were used last."""

    def __init__(
        self,
        base: Base,
        add: Callable[[int, AdapterWeights], KeptAdapter],
        *,
        max_lora_rank: int,
        limit_bytes: int | None,
    ) -> None:
        """Begin without any.

        Args:
            base: the model.
            add: gives an adapter to the backend under a number.
            max_lora_rank: largest rank that the backend has room for; 0 if it takes no adapters.
            limit_bytes: memory that all may take; None stands for what those that come first take,
                and 256 MiB.
        """
        self._base, self._add, self.max_lora_rank = base, add, max_lora_rank
        self.default: str | None = None  # that of prompts which name none
        self._limit_bytes = limit_bytes
        self._named: OrderedDict[str, _Named] = OrderedDict()
        self._handles: WeakSet[KeptAdapter] = WeakSet()  # also of those that have no name any more
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)

    @property
    def names(self) -> list[str]:
        """All names, those in memory and those that would be read again."""
        return sorted(self._named)

    @property
    def num_bytes(self) -> int:
        """Memory that adapters take, those included that only requests under way still have."""
        return sum(handle.num_bytes for handle in list(self._handles))

    @property
    def in_use(self) -> dict[str, int]:
        """How many requests have each adapter; those that none has are left out."""
        counts = {name: len(named.leases) for name, named in list(self._named.items())}
        return {name: count for name, count in counts.items() if count}

    def load(
        self,
        name: str,
        path: Path,
        weights: AdapterWeights | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        """Load an adapter under a name that is free; ``weights`` if they are read already.

        With ``in_place`` the name may be another's, which its requests keep to their ends.

        Raises:
            ValueError: the name is taken, the adapter cannot be had (ModelFileError), its rank is
                too large, or there is no memory for it beside those in use (NoRoom).
        """
        named = _Named(path)
        if in_place or name not in self._named:  # else it is not worth reading
            packed = self._packed(path, weights)
        with self._lock:
            if name in self._named and not in_place:
                raise ValueError(f"there is an adapter {name!r} already: unload it first")
            self._keep(named, *packed)
            self._named[name] = named

    def unload(self, name: str) -> None:
        """Forget an adapter; requests under way keep it. Raises ValueError if there is none."""
        with self._lock:
            self._find(name)
            del self._named[name]

    def path_of(self, name: str) -> Path | None:
        """Return where an adapter was read from, None if there is none of this name."""
        return self._named[name].path if name in self._named else None

    def digest_of(self, name: str) -> bytes:
        """Return the digest of an adapter's values when it was read last; nothing without one."""
        named = self._named.get(name)
        return named.digest if named else b""

    def settle(self) -> None:
        """End the time of those that come first: unless it was said, what they take is known."""
        if self._limit_bytes is None:
            self._limit_bytes = self.num_bytes + _EXTRA_BYTES

    def lease_now(self, name: str) -> Lease | None:
        """Return an adapter for one request, None if it must be read again first.

        Raises ValueError if there is none of this name.
        """
        with self._lock:
            named = self._find(name)
            if named.handle is None:
                return None
            self._named.move_to_end(name)
            lease = Lease(named.number, named.digest, named.handle)
            named.leases.add(lease)
            return lease

    def lease(self, name: str) -> Lease:
        """Return an adapter for one request; read it again if it had to go.

        Raises ValueError if there is none of this name, or no memory for it now (NoRoom).
        """
        while (lease := self.lease_now(name)) is None:
            named = self._find(name)
            packed = self._packed(named.path)
            with self._lock:
                if named.handle is None:
                    self._keep(named, *packed)
        return lease

    def leases(self, lora_request: AnyLora | Sequence[AnyLora], num_prompts: int) -> list[Adapter]:
        """Return the adapter of each prompt: one request is for all of them.

        Raises ValueError as ``lease`` and ``load`` do, and unless there is one for each.
        """
        one = lora_request is None or isinstance(_as_ours(lora_request), str | LoRARequest)
        if not one and not isinstance(lora_request, Sequence):
            raise ValueError(
                f"lora_request must be the name of an adapter, a LoRARequest, or one of these for "
                f"each prompt, not {lora_request!r:.80}"
            )
        many: Sequence[AnyLora] = [lora_request] * num_prompts if one else lora_request  # type: ignore[list-item, assignment]
        if len(many) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(many)} lora_request")
        return [self._of(lora_request) for lora_request in many]

    def _of(self, lora_request: AnyLora) -> Adapter:
        lora_request = self.default if lora_request is None else lora_request
        if lora_request is None:
            return NO_ADAPTER
        lora_request = _as_ours(lora_request)  # type: ignore[assignment]
        if isinstance(lora_request, LoRARequest):
            if lora_request.lora_name not in self._named:
                self.load(lora_request.lora_name, Path(lora_request.lora_path).expanduser())
            return self.lease(lora_request.lora_name)
        if not isinstance(lora_request, str):
            raise ValueError(
                f"lora_request must be the name of an adapter, not {lora_request!r:.80}"
            )
        return self.lease(lora_request)

    def _find(self, name: str) -> _Named:
        if name not in self._named:
            names = ", ".join(self.names) or "none"
            raise ValueError(f"there is no adapter {name!r:.80}; loaded: {names}")
        return self._named[name]

    def _packed(
        self, path: Path, weights: AdapterWeights | None = None
    ) -> tuple[KeptAdapter, int, bytes]:
        """Read an adapter and give it to the backend; return it, its number and its digest.

        This takes time, and no lock: no other thread waits for it.
        """
        weights = weights or read_adapter(path, self._base)
        if weights.rank > self.max_lora_rank:
            raise ValueError(
                f"the adapter {path} has rank {weights.rank}, but there is room for "
                f"{self.max_lora_rank}: start with --max-lora-rank {weights.rank}"
                + ("" if self.max_lora_rank else " and --enable-lora")
            )
        number = next(self._numbers)
        return self._add(number, weights), number, weights.digest

    def _keep(self, named: _Named, handle: KeptAdapter, number: int, digest: bytes) -> None:
        """Take an adapter in, once there is room for it."""
        self._make_room(handle.num_bytes)
        named.handle, named.number, named.digest = handle, number, digest
        self._handles.add(handle)

    def _make_room(self, num_bytes: int) -> None:
        """Drop those used longest ago that no request has, until ``num_bytes`` are free."""
        if self._limit_bytes is None:
            return
        for named in self._named.values():
            if self.num_bytes + num_bytes <= self._limit_bytes:
                return
            if not named.leases:
                named.handle = None
        if self.num_bytes + num_bytes > self._limit_bytes:
            raise NoRoom(
                f"no memory for another adapter of {num_bytes} bytes: those in use take "
                f"{self.num_bytes} of {self._limit_bytes} (--lora-memory)"
            )
