"""llama.cpp's own routes, and LM Studio's list of models; OpenAI's completions answer them.

Among them is a list of the sampling fields, for programs that let people set them, and its slots:
what runs in each place for sequences, and what it can save. Prefixes are cached for all requests of
a key, so a request runs in any place. The number that it gives, ``id_slot``, only says by what its
prompt and answer are remembered: of each key by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from fastapi import FastAPI, Request
from pydantic import Discriminator, Tag, TypeAdapter
from starlette.responses import Response

from ridgeline.core.decoding.search import with_recommended
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request as EngineRequest
from ridgeline.model.files.summary import Summary
from ridgeline.serve.answer.protocol import ChatRequest, CompletionRequest
from ridgeline.serve.answer.schemas import ERRORS, Completion, documented
from ridgeline.serve.dialects.llamacpp.infill import (
    Infilled,
    InfillRequest,
    LlamaCppRequest,
    LlamaCppWriter,
    TemplateRequest,
)
from ridgeline.serve.engine.between_steps import between_steps, read, write
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.request_body import RequestModel, bad_value, in_turn
from ridgeline.serve.http.request_state import own_view
from ridgeline.serve.model_server import ModelServer
from ridgeline.serve.prepare import Ids
from ridgeline.version import __version__

if TYPE_CHECKING:  # imported only where a server has such files
    from ridgeline.engine.kv_disk.cache_tier import Tier

INFILL_CHUNKS = "After each `data: ` a piece as `content`; the last has `stop: true`, and no text."
# Sampling fields: what most people set comes first, then all others in the order in which they act.
_SHOWN = (
    *("max_tokens", "temperature", "top_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "bad_words", "top_k", "typical_p", "min_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "min_tokens", "stop"),
)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum")
_FAR = 1 << 31  # a bound this large only says what a field can hold
_KINDS = ("array", "integer", "number")


def _kind_of_completion(body: Any) -> str:
    """Return whose kind of request this is: OpenAI's clients always name a model."""
    if isinstance(body, dict):
        return "[openai]" if body.get("model") is not None else "[llama.cpp]"
    return "[llama.cpp]" if isinstance(body, LlamaCppRequest) else "[openai]"


EitherCompletion = Annotated[
    Annotated[CompletionRequest, Tag("[openai]")] | Annotated[LlamaCppRequest, Tag("[llama.cpp]")],
    Discriminator(_kind_of_completion),
]


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


class SlotFile(RequestModel):
    """The body of POST /slots/{id}; to erase one needs none. A router reads the model's name."""

    filename: str = ""
    model: str | None = None


_SLOT_FILE = TypeAdapter(SlotFile)


class SlotTokens(NamedTuple):
    """A prompt with its answer, behind its root (``Request.cache_root``)."""

    root: bytes
    tokens: tuple[int, ...]


class LlamaCppSlots:
    """The last prompt and answer of each slot of each key, and the files where they are saved."""

    def __init__(self, engine: EngineClient, kv_disk: Tier | None, model: str) -> None:
        """Save blocks on ``kv_disk``; without that nothing is remembered."""
        self._engine, self._kv_disk, self._model = engine, kv_disk, model
        self._contents: dict[tuple[str, int], SlotTokens] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key

    def check(self, id_slot: int) -> None:
        """Raise ApiError 400 if there is no slot of this number; -1 is none in particular."""
        num_slots = self._engine.settings.max_num_seqs
        if id_slot >= num_slots:
            why = f"it is {id_slot}, but there are slots 0 to {num_slots - 1} (--max-num-seqs)"
            raise bad_value("id_slot", why)

    def remembering(self, key: str, id_slot: int) -> Callable[[EngineRequest], None]:
        """Return what remembers a request of this key, in the place of the slot's last one."""

        def remember(request: EngineRequest) -> None:
            if self._kv_disk is not None and id_slot >= 0:
                content = SlotTokens(request.cache_root, tuple(request.sequences[0].tokens))
                self._contents[key, id_slot] = content

        return remember

    async def act(self, key: str, id_slot: int, action: str, file: SlotFile) -> dict[str, Any]:
        """Save, restore or erase a slot of a key, and say so in llama.cpp's names.

        Raises ApiError.
        """
        if (kv_disk := self._kv_disk) is None:
            message = "This server does not support slots action. Start it with --kv-disk PATH:SIZE"
            raise ApiError(501, message, code="not_supported")
        if id_slot < 0:
            raise bad_value("id_slot", f"it is {id_slot}, and slots begin with 0")
        self.check(id_slot)
        if action == "erase":
            content = self._contents.pop((key, id_slot), None)
            return {"id_slot": id_slot, "n_erased": len(content.tokens) if content else 0}
        if action not in ("save", "restore"):
            raise bad_value("action", "send ?action=save, restore or erase")
        work = self._save if action == "save" else self._restore
        async with self._turns[key]:  # one at a time: others of this key wait
            begin_s = time.perf_counter()
            try:
                done = await work(kv_disk, key, id_slot, file.filename)
            except ValueError as error:
                raise bad_value("filename", str(error)) from None
            took_ms = round(1e3 * (time.perf_counter() - begin_s), 3)
        shown = {"id_slot": id_slot, "filename": file.filename}
        return shown | done | {"timings": {f"{action}_ms": took_ms}}

    async def _save(self, kv_disk: Tier, key: str, id_slot: int, name: str) -> dict[str, int]:
        if (content := self._contents.get((key, id_slot))) is None:
            why = f"slot {id_slot} holds nothing: send /completion with this id_slot before"
            raise bad_value("id_slot", why)
        if not kv_disk.can_write:
            why = "nothing can be saved: the folder is full, only read, or another server's"
            raise ApiError(503, f"{why}; the server's log says which", code="kv_disk")
        kv_disk.saved.check(name)
        await write(self._engine, kv_disk, content.tokens, content.root)
        saving = partial(kv_disk.saved.write, key, name, self._model, content.root, content.tokens)
        try:
            num_bytes = await in_thread(saving)
        except OSError as error:
            message = f"the slot cannot be saved: {error.strerror}"
            raise ApiError(503, message, code="kv_disk") from None
        num_saved = await in_thread(kv_disk.num_kept, content.tokens, content.root)
        return {"n_saved": num_saved, "n_written": num_bytes + kv_disk.bytes_of(num_saved)}

    async def _restore(self, kv_disk: Tier, key: str, id_slot: int, name: str) -> dict[str, int]:
        root, tokens, num_bytes = await in_thread(kv_disk.saved.read, key, name)
        await read(self._engine, kv_disk, tokens, root, is_asked=True)
        num_restored = await between_steps(self._engine, partial(kv_disk.num_cached, tokens, root))
        self._contents[key, id_slot] = SlotTokens(root, tokens)
        return {"n_restored": num_restored, "n_read": num_bytes + kv_disk.bytes_of(num_restored)}


def add_llamacpp(app: FastAPI, server: ModelServer) -> None:
    """Add the routes to an application."""
    answered = ERRORS | documented(Infilled, INFILL_CHUNKS)
    slots = LlamaCppSlots(server.engine, server.kv_disk, server.name)

    def new_writer_of(
        body: LlamaCppRequest, request: Request, prompts: Sequence[Ids]
    ) -> partial[LlamaCppWriter]:
        remember = slots.remembering(request.state.tenant, body.id_slot)
        return partial(LlamaCppWriter, body=body, prompts=prompts, remember=remember)

    @app.post("/infill", responses=answered)
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill in what stands at the cursor of a text, as llama.cpp does."""
        server.check_open(body.model)
        slots.check(body.id_slot)
        prompt, is_truncated = await server.preparer.from_cursor(body)
        new_writer = partial(new_writer_of(body, request, [prompt]), is_truncated=is_truncated)
        param = "input_prefix"
        return await server.reply(
            request, body, [prompt], param, is_middle=True, new_writer=new_writer
        )

    listed = ERRORS | documented(Infilled | list[Infilled], INFILL_CHUNKS)

    @app.post("/completion", responses=listed)
    async def completion(body: LlamaCppRequest, request: Request) -> Response:
        """Continue one prompt or many, as llama.cpp does."""
        server.check_open(body.model)
        slots.check(body.id_slot)
        server.check_count(len(body.prompts))
        prompts = await server.preparer.from_pieces(body)
        new_writer = new_writer_of(body, request, prompts)
        return await server.reply(request, body, prompts, "prompt", new_writer=new_writer)

    @app.post("/completions", responses=ERRORS | documented(Completion | Infilled | list[Infilled]))
    async def either(body: EitherCompletion, request: Request) -> Response:
        """Continue a prompt: as OpenAI does if a model is named, and else as llama.cpp does."""
        if isinstance(body, LlamaCppRequest):
            return await completion(body, request)
        return await server.complete(body, request)

    @app.post("/apply-template", responses=ERRORS)
    async def apply_template(body: TemplateRequest) -> dict[str, str]:
        """Return the prompt that the model's template makes of a conversation, as text."""
        server.check_open(body.model)
        return {"prompt": await server.preparer.text_from_chat(body)}

    @app.post("/v1/chat/completions/input_tokens", responses=ERRORS)
    async def input_tokens(body: ChatRequest) -> dict[str, Any]:
        """Count the tokens of a conversation's prompt."""
        server.check_open(body.model)
        prompt = await server.preparer.from_chat(body)
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    @app.post("/slots/{id_slot}", include_in_schema=False)
    async def act(id_slot: str, request: Request, action: str = "") -> dict[str, Any]:
        """Save a slot's prompt and answer in files, have them cached again, or forget them."""
        data = await request.body() or b"{}"
        file: SlotFile = await in_turn(request.app.state.work, _SLOT_FILE, data)
        server.check_open(file.model)
        if not re.fullmatch("-?[0-9]{1,9}", id_slot):
            raise bad_value("id_slot", "it must be a number")
        return await slots.act(request.state.tenant, int(id_slot), action, file)

    _add_state(app, server)
    _add_lm_studio(app, server)


def _add_state(app: FastAPI, server: ModelServer) -> None:
    @cache
    def fields() -> list[dict[str, Any]]:
        """Return the samplers' fields, which are read from a schema: that takes a while."""
        return sampler_list(server.text.generation_defaults)

    @app.get("/slots", responses=ERRORS)
    async def slots(request: Request) -> list[dict[str, Any]]:
        """Say what runs in each slot: to a key what is its own, to operators all."""
        view = await between_steps(
            server.engine, partial(server.engine.view, own_view(request.state))
        )
        running = [one for one in view["sequences"] if one["status"] == "running"]
        num_slots = server.engine.settings.max_num_seqs
        return [
            slot(index, server.max_model_len, running[index] if index < len(running) else None)
            for index in range(num_slots)
        ]

    @app.get("/props", responses=ERRORS)
    async def props() -> dict[str, Any]:
        """Say what llama.cpp's clients, and the page, ask before their first request."""
        text = server.text
        samplers = await server.work.reports.run(fields)
        given = {one["name"]: one["default"] for one in samplers if one["default"] is not None}
        seed = server.engine.settings.seed
        sampling = {**text.generation_defaults, **given, "n_predict": -1, "seed": seed}
        slots = server.engine.settings.max_num_seqs
        return {
            "default_generation_settings": {"n_ctx": server.max_model_len, "params": sampling},
            "total_slots": slots,
            "model_alias": server.name,
            "model_path": server.file_name,
            "chat_template": text.chat_template.source,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"ridgeline {__version__}",
            "is_sleeping": server.sleep_state.level > 0,
            "reasoning": text.reasoning is not None,
            "sampling_fields": samplers,
        }


def _add_lm_studio(app: FastAPI, server: ModelServer) -> None:
    @app.get("/api/v0/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """List the model as LM Studio does."""
        summary, max_model_len = server.summary, server.max_model_len
        return {
            "object": "list",
            "data": [listed(name, summary, max_model_len) for name in server.names],
        }


def listed(name: str, summary: Summary, max_model_len: int | None) -> dict[str, Any]:
    """Return a model as LM Studio lists it; ``max_model_len`` is None while it is not loaded."""
    shown = {
        "id": name,
        "object": "model",
        "type": "llm" if summary.has_head else "embeddings",
        "publisher": "ridgeline",
        "arch": summary.family,
        "compatibility_type": "gguf" if summary.is_gguf else "safetensors",
        "quantization": next(iter(summary.formats)),
        "state": "not-loaded" if max_model_len is None else "loaded",
        "max_context_length": summary.context_length,
        "capabilities": ["tool_use"] if summary.can_chat else [],
    }
    return shown if max_model_len is None else shown | {"loaded_context_length": max_model_len}


def sampler_list(recommended: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each field with its type and bounds, its default and what it does.

    ``recommended`` is what a model's files recommend: their defaults. None is a default too: such
    a field does nothing unless it is given.
    """
    defaults = with_recommended(recommended, max_tokens=None)
    schema = ChatRequest.model_json_schema()
    about = _descriptions()
    return [
        {
            "name": name,
            **_type_and_bounds(schema, schema["properties"][name]),
            "default": getattr(defaults, name),
            "description": about.get(name, ""),
        }
        for name in _SHOWN
    ]


def _type_and_bounds(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema says of a field that may be null: of a list or a text, of the list."""
    kinds = {one.get("type"): one for one in field["anyOf"]}
    kind = next(kind for kind in _KINDS if kind in kinds)
    bounds = {n: kinds[kind][n] for n in _BOUNDS if abs(kinds[kind].get(n, _FAR)) < _FAR}
    return {"type": kind, **bounds}


def _descriptions() -> dict[str, str]:
    """Return what ``SamplingParams`` says of each of its attributes; nothing without docstrings."""
    _, _, attributes = (inspect.getdoc(SamplingParams) or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
