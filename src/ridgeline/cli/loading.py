"""A model for a command: loaded, with what it had to give up said, and its sampling checked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.cli.flags import UsageError
from ridgeline.engine.setup.options import Options, guard_options

_CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}  # where the model's files say nothing


@contextmanager
def load_model(
    model: str, options: Options, sampling: dict[str, Any], *, picks_adapter: bool = True
) -> Iterator[tuple[LLM, SamplingParams]]:
    """Load a model, say what it had to give up, and check sampling parameters first of all.

    All answers have the adapter, if there is one, unless requests are to pick it.
    """
    if picks_adapter and len(options.adapters) > 1:
        raise UsageError("--lora: give only one adapter here; ridgeline serve takes several")
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise UsageError(error) from error
    with LLM(model, **{f.name: getattr(options, f.name) for f in fields(options)}) as llm:
        if picks_adapter:
            llm.adapters.default = next(iter(options.adapters), None)
        llm.tokenizer.prepare()  # before a prompt is asked for, and before Ctrl-C means an answer
        yield llm, SamplingParams(**(_CHAT_DEFAULTS | llm.text.generation_defaults | sampling))


def seeded(options: Options) -> Options:
    """Return ``options`` with a fresh seed unless they have one, short enough to type again."""
    return options if options.seed is not None else replace(options, seed=secrets.randbelow(10**6))


@contextmanager
def loaded(model: str, options: Options) -> Iterator[LLM]:
    """Load a model whose requests have their own sampling, and may pick an adapter."""
    with load_model(model, options, {}, picks_adapter=False) as (llm, _):
        yield llm


def load_guard(name: str, options: Options) -> AbstractContextManager[LLM]:
    """Load a model that judges beside one with these options."""
    return loaded(name, guard_options(options))
