"""A setting has one word, from the flag down to the kernels.

``Options`` has the settings as people type them, ``EngineConfig`` as they are decided, and all else
is handed some of them. Two things would give a setting a second word: a name from the table below,
and a value that is handed on under another name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields

import pytest

from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import EngineConfig
from tests.house import PACKAGE

# Words that stood for a setting here, and those of other engines.
SECOND = {
    "block_size": ("kv_block_size", "page_size", "tokens_per_block"),
    "enable_prefix_caching": ("prefix_caching", "caches_prefixes", "use_prefix_cache"),
    "gpu_memory_utilization": ("utilization", "memory_fraction", "mem_fraction"),
    "kv_cache_dtype": ("cache_dtype", "kv_dtype", "cache_type", "kv_cache_type", "cache_format"),
    "max_lora_rank": ("max_rank", "lora_rank", "max_adapter_rank"),
    "max_model_len": ("model_len", "max_seq_len", "max_context_len", "wanted_model_len"),
    "max_num_batched_tokens": ("batched", "longest_step", "max_batched_tokens", "max_step_tokens"),
    "max_num_seqs": ("max_seqs", "max_sequences", "max_running_seqs"),
    "num_blocks": ("num_kv_blocks", "num_cache_blocks", "n_blocks"),
    "speculative_config": ("speculative", "speculation_config"),
    "threads": ("num_threads", "n_threads", "thread_count", "nthreads"),
}
# Names of settings that mean other things as well: of an array, of a request, of a rank.
GENERAL = {"backend", "dtype", "policy", "seed", "stages", "tensor_parallel_size"}
OUTSIDE = {"limits"}  # a library's word: threadpoolctl's
SETTINGS = ({f.name for f in fields(Options)} & {f.name for f in fields(EngineConfig)}) - GENERAL
WORD = {second: word for word, seconds in SECOND.items() for second in seconds}


def names(node: ast.AST) -> Iterator[str]:
    """Yield what a node names; arguments of compiled kernels are named by keys of ``args``."""
    match node:
        case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name):
            yield name
        case ast.keyword(arg=str(name)) | ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name


def handed_on(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield pairs: the name of a value, and the name under which it is handed on or kept."""
    match node:
        case ast.keyword(arg=str(to), value=value):
            pairs = [(value, to)]
        case ast.Assign(targets=[ast.Attribute(attr=to)], value=value):
            pairs = [(value, to)]
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = [
                (v, t.attr)
                for t, v in zip(targets, values, strict=False)
                if isinstance(t, ast.Attribute)
            ]
        case _:
            return
    for value, to in pairs:
        if isinstance(value, ast.Attribute | ast.Name):
            yield value.attr if isinstance(value, ast.Attribute) else value.id, to


def second_words(source: str) -> list[str]:
    """Return the places where a setting is called otherwise, with its word."""
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        found += [f"{line}: {n} is {WORD[n]}" for n in names(node) if n.strip("_") in WORD]
        for name, to in handed_on(node):
            if name.strip("_") in SETTINGS and to.strip("_") not in (name.strip("_"), *OUTSIDE):
                found.append(f"{line}: {name} is handed on as {to}")
    return found


def test_the_words_are_those_of_the_two_classes() -> None:
    assert {"threads", "kv_cache_dtype", "max_lora_rank", "max_num_batched_tokens"} <= SETTINGS
    assert not SETTINGS & WORD.keys()


def test_a_setting_has_one_word() -> None:
    assert [
        f"{path.relative_to(PACKAGE)}:{place}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for place in second_words(path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "class Sizes:\n    max_rank: int",
        "def load(num_threads): ...",
        "load(cache_dtype='int8')",
        "args['num_threads']",
        "load(most=setup.max_lora_rank)",
        "self._most = engine.settings.max_model_len",
        "self.a, self.rows = 1, setup.max_num_batched_tokens",
    ],
)
def test_a_second_word_is_found(source: str) -> None:
    assert len(second_words(source)) == 1
