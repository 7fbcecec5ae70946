"""The cache behind the cache: what was published goes to files, and comes back for later prompts.

It stands beside the engine and decides nothing in it. Behind a step it copies the blocks that were
filled, and a thread writes them: no step waits for a disk. Before a prompt enters the engine, the
blocks that files have and memory has not are read, and put into free blocks of the pool, as if a
request that has ended had computed them. A key is never believed: tokens and parents are compared,
and a checksum says whether the bytes are those that were written.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.cache.kvcache import KVCache, hash_block
from ridgeline.core.engine import Engine
from ridgeline.core.records import Record, StepRecord
from ridgeline.core.request import Content
from ridgeline.kv_disk.segments import KeptBlock, Segments

_MOST_QUEUED_BYTES = 256 << 20  # beyond that blocks are dropped: the disk is too slow
_READ_BYTES_PER_S = 200e6  # until it is measured
_NEW_SHARE = 0.3  # of a measurement, in what is known so far
_PIECE = 32  # blocks that are read together: memory that was used before costs less than new
_LEAST_TOKENS = 64  # of a prompt in a step that says how fast prompts are computed


class KeptPrompt(NamedTuple):
    """What files have more of a prompt than memory: the keys of its blocks, and where it ends."""

    root: bytes
    keys: list[bytes]
    tokens: list[tuple[int, ...]]
    num_known: int  # of its blocks, in memory


class Tier:
    """Blocks of one engine's cache in files.

    Attributes:
        counts: blocks that were written, read, and dropped as the disk was too slow.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: NDArray[np.uint8],
        segments: Segments,
        *,
        least_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        """Keep the ``blocks`` of ``engine``'s cache, ``[blocks, bytes]``, in ``segments``.

        Prompts of fewer than ``least_tokens`` are neither written nor read.
        """
        self._engine, self._blocks, self._segments = engine, blocks, segments
        self._kv: KVCache = engine.scheduler.queues.kv
        self._least_tokens, self._say = least_tokens, say
        self.counts = dict.fromkeys(("written", "read", "dropped"), 0)
        self._read_bytes_per_s = _READ_BYTES_PER_S
        self._tokens_per_s: float | None = None  # how fast prompts are computed
        self._queue: queue.SimpleQueue[KeptBlock | threading.Event | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._writer = threading.Thread(target=self._write, name="kv-disk", daemon=True)
        self._writer.start()
        engine.listeners.append(self._on_record)

    @property
    def counted(self) -> dict[str, int]:
        """All counts, with that of damaged blocks. Any thread may call."""
        return self.counts | {"damaged": self._segments.num_bad}

    # --- writing -------------------------------------------------------------------------------

    def _on_record(self, record: Record) -> None:
        """Copy the blocks that a step has filled, in the engine's thread."""
        if not isinstance(record, StepRecord):
            return
        size = self._kv.block_size
        num_prompt_tokens = record.num_prompt_tokens
        if num_prompt_tokens >= _LEAST_TOKENS:
            now = num_prompt_tokens / max(record.execute_s, 1e-9)
            self._tokens_per_s = _mixed(self._tokens_per_s, now)
        if not self._segments.can_write:
            return
        for (number, index), start, count in record.work:
            first, end = start // size, (start + count) // size
            request = self._engine.requests.get(number)
            if first == end or request is None or len(request.prompt) < self._least_tokens:
                continue
            for seq in request.sequences:
                if seq.id == (number, index):
                    for key in seq.keys[first:end]:
                        self._keep(key)

    def _keep(self, key: bytes) -> None:
        """Queue a block that was published, unless files have it or it is gone."""
        pool = self._kv.pool
        blocks = [index.get(key) for index in pool.index]
        known = [block for block in blocks if block is not None]
        if key in self._segments or len(known) < len(blocks):
            return
        content = pool.content[known[0]]
        assert content is not None
        if self._queued_bytes > _MOST_QUEUED_BYTES:
            self.counts["dropped"] += 1
            return
        parent = content.parent if isinstance(content.parent, bytes) else content.parent.key
        record = KeptBlock(key, parent, content.tokens, self._blocks[known].tobytes())
        self._queued_bytes += len(record.data)
        self._queue.put(record)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                if self._segments.can_write:
                    self._segments.append(item)
                    self.counts["written"] += 1
            except OSError as error:
                self._say(f"--kv-disk: no more blocks are kept: {error.strerror}")
            self._queued_bytes -= len(item.data)

    def settle(self) -> None:
        """Wait until all that was queued is written."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Write what is queued, and let go of the folder."""
        if self._writer.is_alive():
            self._engine.listeners.remove(self._on_record)
            self._queue.put(None)
            self._writer.join()
            self._segments.close()

    # --- reading -------------------------------------------------------------------------------

    def wanted(self, tokens: Sequence[int], root: bytes) -> KeptPrompt | None:
        """Return what is worth reading for a prompt, None if nothing is.

        Any thread may call: meanwhile memory may change, which is looked at again later.
        """
        if len(tokens) < self._least_tokens:
            return None
        size, pool = self._kv.block_size, self._kv.pool
        keys, parts = list[bytes](), list[tuple[int, ...]]()
        parent, num_known = root, 0
        for i in range((len(tokens) - 1) // size):
            part = tuple(tokens[i * size : (i + 1) * size])
            parent = hash_block(parent, part)
            in_memory = num_known == i and all(parent in index for index in pool.index)
            if not in_memory and parent not in self._segments:
                break
            num_known += in_memory
            keys.append(parent)
            parts.append(part)
        num_more = len(keys) - num_known
        if num_more <= 0:
            return None
        read_s = num_more * self._bytes_per_place / self._read_bytes_per_s
        if self._tokens_per_s is not None and num_more * size / self._tokens_per_s < read_s:
            return None
        return KeptPrompt(root, keys, parts, num_known)

    @property
    def _bytes_per_place(self) -> int:
        return int(self._blocks[0].nbytes) * len(self._kv.windows)

    def pieces(self, tokens: Sequence[int], root: bytes) -> Iterator[Callable[[], int]]:
        """Read what is worth it of a prompt, piece by piece; any thread may call.

        Each yields what puts it into the cache (``place``), which is to be called before the next.
        """
        if (wanted := self.wanted(tokens, root)) is None:
            return
        num_keys = len(wanted.keys)
        rooms = self._segments.room(min(_PIECE, num_keys - wanted.num_known))
        for first in range(wanted.num_known, num_keys, _PIECE):
            records = self._read(wanted, first, rooms)
            yield partial(self._place, wanted, first, records)
            if len(records) < min(_PIECE, num_keys - first):
                return

    def _read(self, wanted: KeptPrompt, first: int, rooms: Sequence[memoryview]) -> list[KeptBlock]:
        """Return records of a prompt's blocks, up to the first that is not what it should be."""
        found: list[KeptBlock] = []
        begin_s = time.perf_counter()
        for i, room in enumerate(rooms[: len(wanted.keys) - first], start=first):
            parent = wanted.keys[i - 1] if i else wanted.root
            record = self._segments.read(wanted.keys[i], room)
            if record is None or (record.parent, record.tokens) != (parent, wanted.tokens[i]):
                break
            found.append(record)
        took_s = max(time.perf_counter() - begin_s, 1e-9)
        if found:
            now = len(found) * self._bytes_per_place / took_s
            self._read_bytes_per_s = _mixed(self._read_bytes_per_s, now)
        return found

    def _place(self, wanted: KeptPrompt, first: int, records: Sequence[KeptBlock]) -> int:
        """Put records, from ``first``, into free blocks, between two steps; return how many.

        What the next token does not see behind a window is left out. Blocks of this prompt that are
        in memory are held meanwhile, so that they do not make room for the others.
        """
        kv, pool = self._kv, self._kv.pool
        end, size = len(wanted.keys), kv.block_size
        behind = [0 if w is None else max(end * size - w + 1, 0) // size for w in kv.windows]
        held, chain = list[int](), list[Content]()
        num_placed = 0
        for i in range(first + len(records)):
            parent = chain[-1] if chain else wanted.root
            known = wanted.keys[i], parent, wanted.tokens[i]
            content = pool.find(*known)
            if content is None and known[0] in pool.known:
                break  # another content has this key
            content = content or Content(*known)
            pool.known[content.key] = content
            chain.append(content)
            absent = [
                group
                for group, index in enumerate(pool.index)
                if i >= behind[group] and content.key not in index
            ]
            present = [index[content.key] for index in pool.index if content.key in index]
            for block in present:
                pool.share(block)
            held += present
            if not absent:
                continue
            if i < first or len(pool.free) < len(absent):  # it was there, and is gone
                break
            parts = np.frombuffer(records[i - first].data, np.uint8).reshape(len(kv.windows), -1)
            for group in absent:
                block = pool.take(group)
                self._blocks[block] = parts[group]
                pool.publish(block, *known)
                held.append(block)
            num_placed += 1
        for block in reversed(held):
            pool.release(block)
        self.counts["read"] += num_placed
        return num_placed

    def load(self, tokens: Sequence[int], root: bytes) -> None:
        """Put what is worth reading of a prompt into the cache, between two steps."""
        for place in self.pieces(tokens, root):
            if not place():
                break


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW_SHARE * (new - known)
