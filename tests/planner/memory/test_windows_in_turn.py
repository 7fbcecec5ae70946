"""Windows in turn: what ``plan`` says, what the engine makes of it, and what the arrays take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.backends import BACKENDS
from ridgeline.backends.interface import BackendContext
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.planner import plan
from tests.core.harness import make_request
from tests.model.files import quantizers
from tests.model.files.tiny import CONFIG, hf_weights


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_plan_engine_and_arrays_agree_on_windows_in_turn(backend: str, tmp_path: Path) -> None:
    """What a sequence holds as it grows, what the pool takes, and what is said of both."""
    config = CONFIG | {
        "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "use_sliding_window": True,
        "sliding_window": 20, "max_window_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    stored = {name: ("F32", array) for name, array in hf_weights(config, biases="qkv").items()}
    quantizers.write_safetensors(tmp_path / "model.safetensors", stored)
    checkpoint = load_checkpoint(tmp_path)
    options = Options(backend=backend, kv_cache_memory="1MiB", max_num_batched_tokens=16)
    made = resolve(options, checkpoint)
    windows = tuple(group.window for group in made.groups)
    assert windows == (None, 20, 20, 20)
    runner = BACKENDS[backend].new_runner(checkpoint, made, BackendContext(lambda: tmp_path))
    close = getattr(runner, "close", lambda: None)
    block_bytes = runner.memory()["kv_cache"].num_bytes / made.num_blocks
    assert made.kv_bytes == runner.memory()["kv_cache"].num_bytes
    close()
    kv = KVCache(made.num_blocks, made.block_size, windows=windows)
    (seq,) = make_request(0, [1] * 112, max_tokens=16).sequences
    assert kv.admit(seq, 112, 16)
    held = 0
    for end in range(16, 129):
        assert kv.reserve(seq, end)
        seq.num_computed = end
        seq.num_pending = len(seq.tokens) - end
        if end > 113:  # the prompt is read; until then a step has its blocks too
            held = max(held, sum(kv.pool.refs))
    assert held == 8 + 3 * 3
    if backend == "cpu":
        line = next(n for name, n, _ in plan(tmp_path).best.ledger.lines if name == "KV cache")
        assert line == held * block_bytes
        longest = plan(tmp_path, concurrency=3, context=128).best.ledger.kv_bytes
        assert longest == 3 * held * block_bytes
