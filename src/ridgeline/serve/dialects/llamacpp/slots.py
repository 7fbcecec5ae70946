"""Slots as llama.cpp has them: what runs in each place for sequences, and what it can save.

Prefixes are cached for all requests of a key, so a request runs in any place. The number that it
gives, ``id_slot``, only says by what its prompt and answer are remembered: of each key by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.core.request import Request
from ridgeline.serve.engine.between_steps import between_steps, read, write
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_model import Strict, bad_value
from ridgeline.serve.http.turns import in_thread

if TYPE_CHECKING:  # imported only where a server has such files
    from ridgeline.engine.kv_disk.cache_tier import Tier


def slot(index: int, max_model_len: int, sequence: dict[str, Any] | None) -> dict[str, Any]:
    """Return a slot with a sequence of ``engine.view``, or with none.

    There are no texts in it, and no parameters.
    """
    shown = {
        "id": index,
        "n_ctx": max_model_len,
        "speculative": False,
        "is_processing": sequence is not None,
    }
    if sequence is None:
        return shown
    num_left = sequence["max_tokens"] - sequence["generated_tokens"]
    num_decoded = sequence["generated_tokens"]
    return shown | {
        "id_task": sequence["id"][0],
        "n_prompt_tokens": sequence["prompt_tokens"],
        "n_prompt_tokens_processed": sequence["computed_tokens"],
        "n_prompt_tokens_cache": sequence["cached_tokens"],
        "next_token": [
            {"has_next_token": True, "n_remain": num_left, "n_decoded": num_decoded},
        ],
    }


class SlotFile(Strict):
    """The body of POST /slots/{id}; to erase one needs none. A router reads the model's name."""

    filename: str = ""
    model: str | None = None


class SlotTokens(NamedTuple):
    """A prompt with its answer, behind its root (``Request.cache_root``)."""

    root: bytes
    tokens: tuple[int, ...]


class LlamaCppSlots:
    """The last prompt and answer of each slot of each key, and the files where they are saved."""

    def __init__(self, engine: EngineClient, kept: Tier | None, model: str) -> None:
        """Save blocks where they are ``kept``; without that nothing is remembered."""
        self._engine, self._kept, self._model = engine, kept, model
        self._held: dict[tuple[str, int], SlotTokens] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key

    def check(self, id_slot: int) -> None:
        """Raise ApiError 400 if there is no slot of this number; -1 is none in particular."""
        num_slots = self._engine.settings.max_num_seqs
        if id_slot >= num_slots:
            why = f"it is {id_slot}, but there are slots 0 to {num_slots - 1} (--max-num-seqs)"
            raise bad_value("id_slot", why)

    def remembering(self, key: str, id_slot: int) -> Callable[[Request], None]:
        """Return what remembers a request of this key, in the place of the slot's last one."""

        def remember(request: Request) -> None:
            if self._kept is not None and id_slot >= 0:
                held = SlotTokens(request.cache_root, tuple(request.sequences[0].tokens))
                self._held[key, id_slot] = held

        return remember

    async def act(self, key: str, id_slot: int, action: str, file: SlotFile) -> dict[str, Any]:
        """Save, restore or erase a slot of a key, and say so in llama.cpp's names.

        Raises ApiError.
        """
        if (kept := self._kept) is None:
            message = "This server does not support slots action. Start it with --kv-disk PATH:SIZE"
            raise ApiError(501, message, code="not_supported")
        if id_slot < 0:
            raise bad_value("id_slot", f"it is {id_slot}, and slots begin with 0")
        self.check(id_slot)
        if action == "erase":
            held = self._held.pop((key, id_slot), None)
            return {"id_slot": id_slot, "n_erased": len(held.tokens) if held else 0}
        if action not in ("save", "restore"):
            raise bad_value("action", "send ?action=save, restore or erase")
        work = self._save if action == "save" else self._restore
        async with self._turns[key]:  # one at a time: others of this key wait
            begin_s = time.perf_counter()
            try:
                done = await work(kept, key, id_slot, file.filename)
            except ValueError as error:
                raise bad_value("filename", str(error)) from None
            took_ms = round(1e3 * (time.perf_counter() - begin_s), 3)
        shown = {"id_slot": id_slot, "filename": file.filename}
        return shown | done | {"timings": {f"{action}_ms": took_ms}}

    async def _save(self, kept: Tier, key: str, id_slot: int, name: str) -> dict[str, int]:
        if (held := self._held.get((key, id_slot))) is None:
            why = f"slot {id_slot} holds nothing: send /completion with this id_slot before"
            raise bad_value("id_slot", why)
        if not kept.can_write:
            why = "nothing can be saved: the folder is full, only read, or another server's"
            raise ApiError(503, f"{why}; the server's log says which", code="kv_disk")
        kept.saved.check(name)
        await write(self._engine, kept, held.tokens, held.root)
        saving = partial(kept.saved.write, key, name, self._model, held.root, held.tokens)
        try:
            num_bytes = await in_thread(saving)
        except OSError as error:
            message = f"the slot cannot be saved: {error.strerror}"
            raise ApiError(503, message, code="kv_disk") from None
        num_saved = await in_thread(kept.num_kept, held.tokens, held.root)
        return {"n_saved": num_saved, "n_written": num_bytes + kept.bytes_of(num_saved)}

    async def _restore(self, kept: Tier, key: str, id_slot: int, name: str) -> dict[str, int]:
        root, tokens, num_bytes = await in_thread(kept.saved.read, key, name)
        await read(self._engine, kept, tokens, root, is_asked=True)
        num_restored = await between_steps(self._engine, partial(kept.num_cached, tokens, root))
        self._held[key, id_slot] = SlotTokens(root, tokens)
        return {"n_restored": num_restored, "n_read": num_bytes + kept.bytes_of(num_restored)}
