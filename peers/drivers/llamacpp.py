"""llama.cpp, through its C interface as llama-cpp-python hands it on.

One context per shape, a cache per stream (``kv_unified`` off), flash attention where llama.cpp
chooses it. The greedy choice is numpy's argmax over all streams' logits, which costs less than
llama.cpp's own sampler; anything else is drawn by that, one for each stream. A schema becomes a
grammar, which is asked as llama.cpp's server does: about the likeliest token first, and about the
whole vocabulary only where that one is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as lib  # type: ignore[import-not-found]
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf  # type: ignore[import-not-found]
from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
    LlamaPromptLookupDecoding,
)
from numpy.typing import NDArray

from peers.drivers.measure import Engine, Generate, main
from peers.shapes import DRAFT_TOKENS, Job, Shape

_BATCH_TOKENS = 2048
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_silence = lib.llama_log_callback(lambda level, text, data: None)


def open_engine(job: Job) -> Engine:
    """Load the model once; a context is made for each shape."""
    lib.llama_log_set(_silence, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(job.model.encode(), lib.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp cannot load {Path(job.model).name}")
    contexts: list[lib.llama_context_p] = []

    def ready(shape: Shape) -> Generate:
        num_streams, max_tokens = shape.num_streams, shape.max_tokens
        for old in contexts:
            lib.llama_free(old)
        params = lib.llama_context_default_params()
        params.n_seq_max = num_streams
        params.n_ctx = num_streams * max_tokens
        params.n_batch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = job.threads
        params.kv_unified = False
        contexts[:] = [lib.llama_init_from_model(model, params)]
        if not contexts[0]:
            raise ValueError(f"llama.cpp refuses {num_streams} streams of {max_tokens} tokens")
        grammars = [_grammar(model, shape.schema) for _ in range(num_streams * bool(shape.schema))]
        if job.drafts:
            return _with_lookup(contexts[0], job.vocab_size)
        return _generator(contexts[0], job.vocab_size, shape, grammars)

    return ready


def _fill(
    batch: lib.llama_batch, stream: int, position: int, tokens: Sequence[int], num_logits: int
) -> None:
    """Add a stream's tokens to a batch; the last ``num_logits`` of them get logits."""
    for i, token in enumerate(tokens):
        row = batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = position + i
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = stream
        batch.logits[row] = i >= len(tokens) - num_logits
        batch.n_tokens += 1


def _with_lookup(context: lib.llama_context_p, vocab_size: int) -> Generate:
    """One stream, greedy, with llama-cpp-python's own prompt lookup."""
    batch = lib.llama_batch_init(_BATCH_TOKENS, 0, 1)
    guess = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=DRAFT_TOKENS)
    memory = lib.llama_get_memory(context)

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        [prompt] = prompts
        lib.llama_memory_clear(memory, False)
        drafts: list[int] = []
        text, num_cached = list(prompt), 0
        while len(text) < len(prompt) + new_tokens:
            batch.n_tokens = 0
            _fill(batch, 0, num_cached, [*text[num_cached:], *drafts], len(drafts) + 1)
            if status := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            shape = len(drafts) + 1, vocab_size
            best = np.ctypeslib.as_array(lib.llama_get_logits(context), shape).argmax(axis=1)
            right = [*map(int.__eq__, best.tolist(), drafts), False].index(False)
            num_cached = len(text) + right
            text += best[: right + 1].tolist()
            lib.llama_memory_seq_rm(memory, 0, num_cached, -1)
            left = len(prompt) + new_tokens - len(text) - 1
            drafts = guess(np.array(text, np.intc)).tolist()[: max(left, 0)]
        return [text[len(prompt) :]]

    return generate


def _sampler(shape: Shape, seed: int) -> lib.llama_sampler_p:
    """Return a chain of samplers in llama.cpp's own order."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    parts = [lib.llama_sampler_init_temp(shape.temperature), lib.llama_sampler_init_dist(seed)]
    if shape.top_p < 1:
        parts.insert(0, lib.llama_sampler_init_top_p(shape.top_p, 1))
    if shape.top_k:
        parts.insert(0, lib.llama_sampler_init_top_k(shape.top_k))
    for part in parts:
        lib.llama_sampler_chain_add(chain, part)
    return chain


def _grammar(model: lib.llama_model_p, schema: str) -> lib.llama_sampler_p:
    vocab, text = lib.llama_model_get_vocab(model), json_schema_to_gbnf(schema)
    grammar = lib.llama_sampler_init_grammar(vocab, text.encode(), b"root")
    if not grammar:
        raise ValueError("llama.cpp refuses the grammar of the schema")
    return grammar


def _allowed(
    grammar: lib.llama_sampler_p, ids: NDArray[np.int32], logits: NDArray[np.float32]
) -> int:
    """Return the likeliest of ``ids`` that the grammar has next; -1 if it has none of them."""
    candidates = np.zeros(len(ids), _CANDIDATE)
    candidates["id"], candidates["logit"] = ids, logits
    data = candidates.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
    array = lib.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
    lib.llama_sampler_apply(grammar, ctypes.byref(array))
    best = int(candidates["logit"].argmax())
    return int(ids[best]) if np.isfinite(candidates["logit"][best]) else -1


def _generator(
    context: lib.llama_context_p,
    vocab_size: int,
    shape: Shape,
    grammars: Sequence[lib.llama_sampler_p],
) -> Generate:
    batch = lib.llama_batch_init(_BATCH_TOKENS, 0, 1)
    samplers = [_sampler(shape, stream) for stream in range(shape.num_streams)]
    all_ids = np.arange(vocab_size, dtype=np.int32)

    def constrained(stream: int, likeliest: int, logits: NDArray[np.float32]) -> int:
        grammar, first = grammars[stream], all_ids[likeliest : likeliest + 1]
        token = _allowed(grammar, first, logits[first])
        if token < 0:
            token = _allowed(grammar, all_ids, logits)
        lib.llama_sampler_accept(grammar, token)
        return token

    def step(work: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
        """Run (stream, position, tokens) each and return the next token of each."""
        batch.n_tokens = 0
        ends = []
        for stream, position, tokens in work:
            _fill(batch, stream, position, tokens, 1)
            ends.append((stream, batch.n_tokens - 1))
        if status := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        if shape.temperature:
            return [lib.llama_sampler_sample(samplers[s], context, row) for s, row in ends]
        logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(work), vocab_size))
        best: list[int] = logits.argmax(axis=1).tolist()
        if grammars:
            return [constrained(work[i][0], best[i], logits[i]) for i in range(len(work))]
        return best

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        for grammar in grammars:
            lib.llama_sampler_reset(grammar)
        lengths = [len(prompt) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        at_once = max(_BATCH_TOKENS // max(lengths), 1)
        for first in range(0, len(prompts), at_once):
            streams = range(first, min(first + at_once, len(prompts)))
            tokens = step([(s, 0, prompts[s]) for s in streams])
            for stream, token in zip(streams, tokens, strict=True):
                answers[stream].append(token)
        for i in range(new_tokens - 1):
            work = [(s, length + i, answers[s][-1:]) for s, length in enumerate(lengths)]
            for stream, token in enumerate(step(work)):
                answers[stream].append(token)
        return answers

    return generate


if __name__ == "__main__":
    main(open_engine, lambda: str(lib.__version__))
