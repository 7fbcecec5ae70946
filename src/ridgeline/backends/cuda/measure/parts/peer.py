"""transformers' continuous batching with the same shapes and workload, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import random
import time
from functools import partial
from typing import Any

import torch

from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.measure.parts.engine import TINY_WORKLOAD, WORKLOAD
from ridgeline.backends.cuda.measure.shapes import models


def measure(part: Part) -> None:
    """Measure ``generate_batch``, with each of its kernels."""
    if importlib.util.find_spec("transformers") is None:
        part.say("skipped", why="transformers is not installed")
        return
    transformers: Any = importlib.import_module("transformers")
    models: list[Any] = []
    part.run([("model", lambda: models.append(_model(part, transformers)))], are_ours=False)
    kernels = ("sdpa",) if part.is_tiny else ("sdpa", "flash_attention_2")
    if models:
        run = partial(_workload, part, transformers, models[0])
        cases = [(f"transformers {kernel}", partial(run, kernel)) for kernel in kernels]
        part.run(cases, need_s=8, are_ours=False)


def _model(part: Part, transformers: Any) -> Any:
    """Return a model of random weights, made on the device."""
    (shape,) = models(part, "llama3-8b").values()
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
    )
    begin_s = time.perf_counter()
    with torch.inference_mode(False), torch.no_grad(), part.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=part.dtype)
    model.train(False)
    part.say("made", seconds=time.perf_counter() - begin_s, transformers=transformers.__version__)
    return model


def _workload(part: Part, transformers: Any, model: Any, kernel: str) -> None:
    batching: Any = importlib.import_module("transformers.generation.configuration_utils")
    count, num_in, num_out = TINY_WORKLOAD if part.is_tiny else WORKLOAD
    chosen, (shape,) = random.Random(3), models(part, "llama3-8b").values()
    prompts = [[chosen.randrange(shape.vocab) for _ in range(num_in)] for _ in range(count)]
    generation = transformers.GenerationConfig(
        max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # By itself it takes most of a machine's memory.
    limits: dict[str, Any] = {"max_memory_percent": 0.7}
    if part.is_tiny:
        limits = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    model.set_attn_implementation(f"paged|{kernel}")
    for what in ("cold", "warm"):
        begin_s = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            outputs = model.generate_batch(
                inputs=prompts,
                generation_config=generation,
                continuous_batching_config=batching.ContinuousBatchingConfig(**limits),
            )
        took_s = time.perf_counter() - begin_s
        tokens = sum(len(one.generated_tokens) for one in outputs.values())
        name = f"transformers {kernel} {count} x ({num_in} + {num_out}), {what}"
        part.say(name, tok_per_s=tokens / took_s, seconds=took_s, peer=what)
