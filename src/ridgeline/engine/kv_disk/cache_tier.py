"""The cache behind the cache: what was published goes to files, and comes back for later prompts.

It stands beside the engine and decides nothing in it. Behind a step it copies the blocks that were
filled, and a thread writes them: no step waits for a disk. Before a prompt enters the engine, the
blocks that files have and memory has not are read, and put into free blocks of the pool, as if a
request that has ended had computed them. Where layers keep a state, a prompt goes on behind the
last block whose state was kept; of that block it is read too. A key is never believed: tokens and
parents are compared, and a checksum says whether the bytes are those that were written.

Sequences that clients saved by a name are a small file each, with tokens alone: their blocks stand
in the segments, where those of all prompts do. ``PATH/slots/OWNER/NAME`` is a checksum in a line,
and JSON. An owner is a key, and no other sees its files.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.cache.kvcache import NOWHERE, KVCache, hash_block
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, StepRecord
from ridgeline.core.request import Content, Request
from ridgeline.engine.kv_disk.segments import KeptBlock, Segments
from ridgeline.system.machine import write_whole

_MOST_FILES = 256  # of an owner: then the one that was saved first goes
_MOST_NAME_BYTES = 255  # as file systems have it
_FOLDER_MODE = 0o700
_MOST_SAID = 31  # letters of a setting: a longer one is kept as its digest, which has 32
_MOST_QUEUED_BYTES = 256 << 20  # beyond that blocks are dropped: the disk is too slow
_READ_BYTES_PER_S = 200e6  # until it is measured
_NEW_SHARE = 0.3  # of a measurement, in what is known so far
_PIECE = 32  # blocks that are read together: memory that was used before costs less than new
_LOOK_S = 0.5  # from one look whether there is still a writer to the next
_LEAST_TOKENS = 64  # of a prompt in a step that says how fast prompts are computed


class SavedSequences:
    """The files of one folder, of which those that name this form can be used."""

    def __init__(self, folder: Path, form: str, settings: Mapping[str, object]) -> None:
        """``form`` is the digest by which segments of the same model, formats and code go.

        It is made from ``settings``, by name, which say what differs where a digest does.
        """
        self._folder, self._form = folder, form
        self._settings = {name: _in_short(value) for name, value in settings.items()}

    def write(self, owner: str, name: str, model: str, root: bytes, tokens: Sequence[int]) -> int:
        """Save the tokens behind a root, in the place of an earlier file; return its bytes.

        Raises ValueError, in a line, for a name that cannot be one, and OSError.
        """
        path = self._path(owner, name)
        for folder in (self._folder, path.parent):
            folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        fields = {"model": model, "form": self._form, "root": root.hex(), "tokens": [*tokens]}
        body = json.dumps(fields | {"settings": self._settings}).encode()
        data = _digest(body) + b"\n" + body
        write_whole(path, lambda file: file.write(data))
        others = [one for one in path.parent.iterdir() if one != path]
        oldest_first = sorted(others, key=lambda one: one.stat().st_mtime_ns)
        for one in oldest_first[: max(0, len(others) + 1 - _MOST_FILES)]:
            one.unlink(missing_ok=True)
        return len(data)

    def read(self, owner: str, name: str) -> tuple[bytes, tuple[int, ...], int]:
        """Return a file's root and tokens, and its bytes.

        Raises ValueError, in a line, if there is none that the model, as it is now, can use.
        """
        try:
            data = self._path(owner, name).read_bytes()
        except FileNotFoundError:
            raise ValueError(f"nothing was saved as {name!r}") from None
        except OSError as error:
            raise ValueError(f"{name!r} cannot be read: {error.strerror}") from None
        check, _, body = data.partition(b"\n")
        if check != _digest(body):
            raise ValueError(f"{name!r} is damaged: save the slot again")
        fields = json.loads(body)
        if fields["form"] != self._form:
            raise ValueError(
                f"{name!r} was saved by {fields['model']} with {self._differing(fields)}: its "
                "cache is of no use here, so restore it where it was saved, or save again"
            )
        return bytes.fromhex(fields["root"]), tuple(fields["tokens"]), len(data)

    def _differing(self, fields: Mapping[str, Any]) -> str:
        """Return which settings a file was saved with that are others here."""
        then = fields.get("settings", {})
        differing = [name for name, here in self._settings.items() if then.get(name) != here]
        if not then or not differing:
            return "other settings, which it does not name"
        said = [
            f"{name} {then[name]} (here {self._settings[name]})"
            if max(len(then.get(name, "")), len(self._settings[name])) <= _MOST_SAID
            and name in then
            else f"another {name}"
            for name in differing
        ]
        return ", ".join(said)

    @staticmethod
    def check(name: str) -> None:
        """Raise ValueError, in a line, for what cannot be the name of a file."""
        has_controls = any(unicodedata.category(one) == "Cc" for one in name)
        if name in ("", ".") or "/" in name or ".." in name or has_controls:
            raise ValueError(
                f"{name!r} cannot be a file's name: leave out '/', '..' and control characters"
            )
        if len(name.encode()) > _MOST_NAME_BYTES:
            raise ValueError(f"the name has more than {_MOST_NAME_BYTES} bytes")

    def _path(self, owner: str, name: str) -> Path:
        self.check(name)
        return self._folder / blake2b(owner.encode(), digest_size=16).hexdigest() / name


def _in_short(setting: object) -> str:
    """Return a setting as a few words; a long one as its digest."""
    text = " ".join(map(str, setting)) if isinstance(setting, list | tuple) else str(setting)
    return text if len(text) <= _MOST_SAID else _digest(text.encode()).decode()


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).hexdigest().encode()


class KeptPrompt(NamedTuple):
    """What files have more of a prompt than memory: the keys of its blocks, and where it ends.

    With states that is behind a block whose state files have.
    """

    root: bytes
    keys: list[bytes]
    tokens: list[tuple[int, ...]]
    num_known: int  # of its blocks, in memory


class Tier:
    """Blocks of one engine's cache in files.

    Attributes:
        counts: blocks and states that were written, read, and dropped as the disk was too slow.
        saved: sequences that clients have saved by a name.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: NDArray[np.uint8],
        states: Sequence[NDArray[np.float32]],
        segments: Segments,
        *,
        settings: Mapping[str, object],
        least_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        """Keep the ``blocks`` of ``engine``'s cache, ``[blocks, bytes]``, in ``segments``.

        So are ``states`` of recurrent layers, ``[slots, ...]`` each, of which there may be none.
        Prompts of fewer than ``least_tokens`` are neither written nor read. The name of the
        segments is made from ``settings``.
        """
        self._engine, self._blocks, self._segments = engine, blocks, segments
        self._kv: KVCache = engine.scheduler.queues.kv
        self._states, self._slots = states, self._kv.states
        self._least_tokens, self._say = least_tokens, say
        self.counts = dict.fromkeys(("written", "read", "dropped"), 0)
        slots = segments.folder.parent / "slots"
        self.saved = SavedSequences(slots, segments.folder.name, settings)
        self._read_bytes_per_s = _READ_BYTES_PER_S
        self._tokens_per_s: float | None = None  # how fast prompts are computed
        self._queue: queue.SimpleQueue[KeptBlock | threading.Event | None] = queue.SimpleQueue()
        self._queued = set[bytes]()  # keys
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
        """Copy what a step has filled, or what a new prompt adopted, in the engine's thread."""
        if not isinstance(record, StepRecord):
            return
        size = self._kv.block_size
        num_prompt_tokens = record.num_prompt_tokens
        if num_prompt_tokens >= _LEAST_TOKENS:
            now = num_prompt_tokens / max(record.execute_s, 1e-9)
            self._tokens_per_s = _mixed(self._tokens_per_s, now)
        if not self._segments.can_write:
            return
        admitted = dict(record.admitted)
        for (number, index), start, count in record.work:
            first, end = start // size, (start + count) // size
            if (number, index) in admitted:  # a shorter prompt may have left this unwritten
                first = 0
            request = self._engine.requests.get(number)
            if first == end or request is None or len(request.prompt) < self._least_tokens:
                continue
            for seq in request.sequences:
                if seq.id == (number, index):
                    for key in seq.keys[first:end]:
                        self._keep(key)

    def _keep(self, key: bytes) -> None:
        """Queue a block that was published, and its state, unless files have it or it is gone."""
        pool = self._kv.pool
        blocks = [index.get(key) for index in pool.index]
        present = [block for block in blocks if block is not None]
        if len(present) < len(blocks):
            return
        content = pool.content[present[0]]
        assert content is not None
        parent = content.parent if isinstance(content.parent, bytes) else content.parent.key
        self._put(key, parent, content.tokens, lambda: self._blocks[present].tobytes())
        if self._slots is None:
            return
        checkpoint = self._slots.checkpoints.get(present[0])
        if checkpoint is not None and checkpoint[0] is content:
            copied = partial(self._copied_state, checkpoint[1])
            self._put(_state_key(key), key, content.tokens, copied)

    def _put(
        self, key: bytes, parent: bytes, tokens: tuple[int, ...], copied: Callable[[], bytes]
    ) -> None:
        """Queue a record, whose data is copied only if files are to have it."""
        if key in self._segments or key in self._queued:
            return
        if self._queued_bytes > _MOST_QUEUED_BYTES:
            self.counts["dropped"] += 1
            return
        record = KeptBlock(key, parent, tokens, copied())
        self._queued.add(key)
        self._queued_bytes += len(record.data)
        self._queue.put(record)

    def _copied_state(self, slot: int) -> bytes:
        return b"".join(array[slot].tobytes() for array in self._states)

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
            self._queued.discard(item.key)

    def settle(self) -> None:
        """Wait until all that was queued is written."""
        done = threading.Event()
        self._queue.put(done)
        while self._writer.is_alive() and not done.wait(_LOOK_S):
            pass  # a writer that has ended would write nothing

    def saving(self, tokens: Sequence[int], root: bytes) -> Iterator[Callable[[], None]]:
        """Write what memory has of a sequence, however short, piece by piece; any thread may call.

        Each yields what queues a piece, which is to be called between two steps, before the next.
        """
        keys = [key for key, _ in self._chain(tokens, root)]
        for first in range(0, len(keys), _PIECE):
            yield partial(self._keep_all, keys[first : first + _PIECE])
            self.settle()

    def _keep_all(self, keys: Sequence[bytes]) -> None:
        for key in keys if self._segments.can_write else ():
            self._keep(key)

    @property
    def can_write(self) -> bool:
        """Whether blocks are added to the files."""
        return self._segments.can_write

    def close(self) -> None:
        """Write what is queued, and let go of the folder."""
        if self._writer.is_alive():
            self._engine.listeners.remove(self._on_record)
            self._queue.put(None)
            self._writer.join()
            self._segments.close()

    # --- reading -------------------------------------------------------------------------------

    def num_kept(self, tokens: Sequence[int], root: bytes) -> int:
        """Return how many tokens of a sequence, from its beginning, a later server would find."""
        keys = [key for key, _ in self._chain(tokens, root)]
        num_kept = next((i for i, key in enumerate(keys) if key not in self._segments), len(keys))
        return self._end(keys[:num_kept]) * self._kv.block_size

    def num_cached(self, tokens: Sequence[int], root: bytes) -> int:
        """Return how many tokens of a sequence a prompt of all of them would find in memory."""
        most = len(tokens) + 1
        request = Request(0, tuple(tokens), SamplingParams(), max_model_len=most, cache_root=root)
        return self._kv.num_cached(request.sequences[0])

    def bytes_of(self, num_tokens: int) -> int:
        """Return what this many tokens take in files, with the state behind the last."""
        return self._bytes_of(num_tokens // self._kv.block_size) if num_tokens else 0

    def _chain(self, tokens: Sequence[int], root: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Yield keys and tokens of the whole blocks before the last token, which is computed."""
        size, key = self._kv.block_size, root
        for begin in range(0, len(tokens) - size, size):
            part = tuple(tokens[begin : begin + size])
            key = hash_block(key, part)
            yield key, part

    def _end(self, keys: Sequence[bytes]) -> int:
        """Return behind how many of these blocks, which files have, a prompt can go on."""
        if self._slots is None:
            return len(keys)
        ends = range(len(keys), 0, -1)
        return next((i for i in ends if _state_key(keys[i - 1]) in self._segments), 0)

    def wanted(
        self, tokens: Sequence[int], root: bytes, *, is_asked: bool = False
    ) -> KeptPrompt | None:
        """Return what is worth reading for a prompt, None if nothing is.

        If a client has asked for it, all is that memory has not. Any thread may call: meanwhile
        memory may change, which is looked at again later.
        """
        if len(tokens) < self._least_tokens and not is_asked:
            return None
        size, pool = self._kv.block_size, self._kv.pool
        keys, parts = list[bytes](), list[tuple[int, ...]]()
        num_known = 0
        for i, (key, part) in enumerate(self._chain(tokens, root)):
            in_memory = num_known == i and all(key in index for index in pool.index)
            if not in_memory and key not in self._segments:
                break
            num_known += in_memory
            keys.append(key)
            parts.append(part)
        end, num_resumable = self._end(keys), num_known
        if self._slots is not None:
            ends = range(min(num_known, end), 0, -1)
            num_resumable = next((i for i in ends if self._has_state(keys[i - 1])), 0)
        if end <= num_resumable:
            return None
        wanted = KeptPrompt(root, keys[:end], parts[:end], min(num_known, end))
        read_s = self._bytes_of(end - wanted.num_known) / self._read_bytes_per_s
        num_tokens = (end - num_resumable) * size
        is_slow = self._tokens_per_s is not None and num_tokens / self._tokens_per_s < read_s
        return None if is_slow and not is_asked else wanted

    def _bytes_of(self, num_blocks: int) -> int:
        of_block, *of_states = (form.record_bytes for form in self._segments.forms)
        return num_blocks * of_block + sum(of_states)

    def _has_state(self, key: bytes) -> bool:
        """Whether memory has the state behind a block."""
        block = self._kv.pool.index[0].get(key, NOWHERE)
        checkpoint = self._slots.checkpoints.get(block) if self._slots else None
        return checkpoint is not None and checkpoint[0] is self._kv.pool.content[block]

    def pieces(
        self, tokens: Sequence[int], root: bytes, *, is_asked: bool = False
    ) -> Iterator[Callable[[], int]]:
        """Read what is worth it of a prompt (``wanted``), piece by piece; any thread may call.

        Each yields what puts it into the cache (``place``), which is to be called before the next.
        """
        if (wanted := self.wanted(tokens, root, is_asked=is_asked)) is None:
            return
        num_keys, of_block = len(wanted.keys), self._segments.forms[0]
        parents = [root, *wanted.keys]
        if wanted.num_known < num_keys:
            rooms = self._segments.room(min(_PIECE, num_keys - wanted.num_known), of_block)
        for first in range(wanted.num_known, num_keys, _PIECE):
            end = min(first + _PIECE, num_keys)
            expected = zip(
                wanted.keys[first:end], parents[first:end], wanted.tokens[first:end], strict=True
            )
            records = self._read(expected, rooms)
            yield partial(self._place, wanted, first, records)
            if len(records) < end - first:
                return
        if self._slots is not None:
            rooms = self._segments.room(1, self._segments.forms[-1])
            last = wanted.keys[-1]
            for record in self._read([(_state_key(last), last, wanted.tokens[-1])], rooms):
                yield partial(self._place_state, wanted, record)

    def _read(
        self, expected: Iterable[tuple[bytes, bytes, tuple[int, ...]]], rooms: Sequence[memoryview]
    ) -> list[KeptBlock]:
        """Return records, each with its key, parent and tokens, up to the first that is another."""
        records: list[KeptBlock] = []
        begin_s = time.perf_counter()
        for (key, parent, tokens), room in zip(expected, rooms, strict=False):
            record = self._segments.read(key, room)
            if record is None or (record.parent, record.tokens) != (parent, tokens):
                break
            records.append(record)
        took_s = max(time.perf_counter() - begin_s, 1e-9)
        if records:
            now = len(records) * len(rooms[0]) / took_s
            self._read_bytes_per_s = _mixed(self._read_bytes_per_s, now)
        return records

    def _place(self, wanted: KeptPrompt, first: int, records: Sequence[KeptBlock]) -> int:
        """Put records, from ``first``, into free blocks, between two steps; return how many.

        What the next token does not see behind a window is left out. Blocks of this prompt that are
        in memory are held meanwhile, so that they do not make room for the others.
        """
        kv, pool = self._kv, self._kv.pool
        end, size = len(wanted.keys), kv.block_size
        behind = [0 if w is None else max(end * size - w + 1, 0) // size for w in kv.windows]
        shared_blocks, chain = list[int](), list[Content]()
        num_placed = 0
        for i in range(first + len(records)):
            parent = chain[-1] if chain else wanted.root
            identity = wanted.keys[i], parent, wanted.tokens[i]
            content = pool.find(*identity)
            if content is None and identity[0] in pool.by_key:
                break  # another content has this key
            content = content or Content(*identity)
            pool.by_key[content.key] = content
            chain.append(content)
            absent = [
                group
                for group, index in enumerate(pool.index)
                if i >= behind[group] and content.key not in index
            ]
            present = [index[content.key] for index in pool.index if content.key in index]
            for block in present:
                pool.share(block)
            shared_blocks += present
            if not absent:
                continue
            if i < first or len(pool.free) < len(absent):  # it was there, and is gone
                break
            parts = np.frombuffer(records[i - first].data, np.uint8)
            parts = parts.reshape(len(kv.windows), self._blocks.shape[1])
            for group in absent:
                block = pool.take(group)
                self._blocks[block] = parts[group]
                pool.publish(block, *identity)
                shared_blocks.append(block)
            num_placed += 1
        for block in reversed(shared_blocks):
            pool.release(block)
        self.counts["read"] += num_placed
        return num_placed

    def _place_state(self, wanted: KeptPrompt, record: KeptBlock) -> int:
        """Put the state behind a prompt's last block into a slot, between two steps.

        Return how many: none if that block has left, or all slots are held.
        """
        pool, slots, content = self._kv.pool, self._slots, None
        for key, tokens in zip(wanted.keys, wanted.tokens, strict=True):
            if (content := pool.find(key, content or wanted.root, tokens)) is None:
                return 0
        block = pool.index[0].get(wanted.keys[-1])
        if slots is None or content is None or block is None:
            return 0
        if not slots.free and not slots.checkpoints:
            return 0
        slot, begin = slots.restore(block, content), 0
        for array in self._states:
            end = begin + array[slot].nbytes
            part = np.frombuffer(record.data[begin:end], np.float32)
            array[slot] = part.reshape(array[slot].shape)
            begin = end
        self.counts["read"] += 1
        return 1

    def load(self, tokens: Sequence[int], root: bytes) -> None:
        """Put what is worth reading of a prompt into the cache, between two steps."""
        for place in self.pieces(tokens, root):
            if not place():
                break


def _state_key(key: bytes) -> bytes:
    """Return the key of the state behind a block."""
    return blake2b(key, digest_size=16, person=b"state").digest()


def _mixed(average: float | None, new: float) -> float:
    return new if average is None else average + _NEW_SHARE * (new - average)
