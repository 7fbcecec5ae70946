"""Weights that are larger than memory: what is held, what is left for the cache, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.backends import cpu
from ridgeline.backends.cpu.layout import model_weights
from ridgeline.backends.interface import Setup
from ridgeline.engine.setup import resolve as resolving
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import EngineConfig, resolve
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from tests.engine.test_llm import GREEDY, model
from tests.tiny import PLAIN, RECURRENT, changed, checkpoint

__all__ = ["model"]  # a fixture

LARGE = checkpoint(changed(PLAIN, windows=(None,) * 24, vocab_size=8000, max_position=4096))
SMALL: dict[str, Any] = {
    "max_num_batched_tokens": 16, "max_num_seqs": 4, "threads": 1, "dtype": "f32", "backend": "cpu",
}  # fmt: skip


def with_memory(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch, stored: Checkpoint = LARGE, **options: Any
) -> EngineConfig:
    monkeypatch.setattr(resolving, "available_bytes", lambda: num_bytes)
    return resolve(Options(**SMALL | options), stored)


def least_memory(stored: Checkpoint, options: dict[str, Any], patch: pytest.MonkeyPatch) -> int:
    """Return about the least memory with which a model starts."""
    num_bytes = 1 << 16
    while True:
        try:
            with_memory(num_bytes, patch, stored, **options)
        except ValueError:
            num_bytes += num_bytes // 50
        else:
            return num_bytes


def test_weights_get_three_quarters_of_what_they_do_not_fit_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eight = {"kv_cache_dtype": "int8"}  # a cache that is small beside the weights
    plenty = with_memory(1 << 40, monkeypatch, **eight)
    assert not plenty.notes
    beside = plenty.total_bytes - plenty.kv_bytes
    memory = beside - plenty.weights_bytes // 2
    tight = with_memory(memory, monkeypatch, **eight)
    assert "fit into memory: the others are read from the disk" in tight.notes[0]
    assert tight.weights_bytes == plenty.weights_bytes
    assert memory * 9 // 10 < tight.total_bytes <= memory * 19 // 20
    assert tight.kv_bytes < memory // 4
    # As long as all of them fit beside a short sequence, they do.
    beside += 512 * plenty.kv_bytes // (16 * plenty.num_blocks)
    room = beside * 20 // 19
    assert not with_memory(room + 20, monkeypatch, max_model_len=512, **eight).notes
    assert "the disk" in with_memory(room - 4096, monkeypatch, **eight).notes[0]


def test_the_rows_of_an_embedding_need_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps read few of them."""
    setup = Setup("f32", "f32", 16, 1, LARGE.arch.max_position, 4, 16)
    plenty = with_memory(1 << 40, monkeypatch)
    step_bytes = cpu.footprint(LARGE.arch, setup).step_bytes
    held = plenty.total_bytes - plenty.kv_bytes - step_bytes
    assert held == plenty.weights_bytes - cpu.packed_bytes(LARGE, setup)["embedding"]


def test_a_backend_that_decodes_all_weights_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not enough memory"):
        with_memory(4 << 20, monkeypatch, backend="reference")


def test_a_step_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"not enough memory: 100\.0 KiB is available"):
        with_memory(100 << 10, monkeypatch)


def test_states_get_room_beside_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = checkpoint(changed(RECURRENT["delta rule"], vocab_size=8000))
    memory = least_memory(stored, {"max_num_seqs": 1}, monkeypatch)
    tight = with_memory(memory * 11 // 10, monkeypatch, stored, max_num_seqs=1)
    assert "fit into memory: the others are read from the disk" in tight.notes[0]
    assert tight.num_checkpoints is not None
    assert tight.total_bytes <= memory * 11 // 10


def test_the_answers_are_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_weights, "_WORTH_KEEPING_BYTES", 1)
    with LLM(model, **SMALL) as llm:
        wanted = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
        assert not llm.config.notes
    memory = least_memory(load_checkpoint(model), {}, monkeypatch) * 21 // 20
    monkeypatch.setattr(resolving, "available_bytes", lambda: memory)
    with LLM(model, **SMALL) as llm:
        assert "read from the disk" in llm.config.notes[0]
        found = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
        assert all(line.is_mapped for line in llm.memory().lines if line.name == "weights.mlp")
    assert found == wanted


def test_where_no_file_can_be_kept_it_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_weights, "_WORTH_KEEPING_BYTES", 1)
    monkeypatch.setattr(model_weights, "available_bytes", lambda: 1)
    home = tmp_path / "home"
    home.mkdir()
    (home / "packed").write_text("in the way")
    monkeypatch.setenv("RIDGELINE_HOME", str(home))
    with pytest.raises(ValueError, match=r"fit into memory, and .*packed has no room for a file"):
        LLM(model, threads=1)
