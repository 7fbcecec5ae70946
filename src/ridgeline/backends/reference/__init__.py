"""The reference backend: numpy, float32, written to be read. All others must agree with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ridgeline.backends.interface import BackendContext, Footprint, S, Setup
from ridgeline.backends.reference.runner import Observe, ReferenceRunner
from ridgeline.backends.reference.tiles import POSITIONS, SCORES
from ridgeline.backends.sampler.step_output import PROMPT_ROWS
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.core.scheduling.speculate import max_draws
from ridgeline.model.cost.costs import state_bytes_per_seq, weight_bytes
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import one_group
from ridgeline.model.shape.model import ModelArch


def check(setup: S, arch: ModelArch) -> S:
    """Return a setup without "auto". Raises ValueError, which names the flag, if it cannot be."""
    del arch  # everything is f32
    for flag, value in (("--dtype", setup.dtype), ("--kv-cache-dtype", setup.kv_cache_dtype)):
        if value not in ("auto", "f32"):
            raise ValueError(f"{flag} {value}: the reference backend has f32 only")
    return replace(setup, dtype="f32", kv_cache_dtype="f32")


def new_runner(checkpoint: Checkpoint, setup: Setup, context: BackendContext) -> ReferenceRunner:
    """Decode the weights and allocate the cache."""
    return ReferenceRunner(checkpoint, setup, context.progress)


def run_observed(
    checkpoint: Checkpoint, windows: Sequence[Sequence[int]], threads: int, observe: Observe
) -> None:
    """Compute texts, the weights of one layer in memory at a time, and show what matrices read.

    ``observe(layer, weight, rows, *names)`` gets the matrices of these names, one below the other,
    ``[outputs, inputs]``, and all texts' rows ``[tokens, inputs]`` that meet them. The model uses
    the matrices that it returns. Those of experts, of recurrent layers and of latent attention are
    not shown.
    """
    used, windows = _used_rows(checkpoint, windows)
    longest, block_size = max(map(len, windows)), 16
    setup = Setup(
        dtype="f32",
        kv_cache_dtype="f32",
        block_size=block_size,
        threads=threads,
        max_model_len=longest,
        max_num_seqs=len(windows),
        max_num_batched_tokens=sum(map(len, windows)),
        num_blocks=len(windows) * -(-longest // block_size),
        num_states=len(windows),
    )
    ReferenceRunner(used, setup, observe=observe).run_whole(windows)


def _used_rows(
    checkpoint: Checkpoint, windows: Sequence[Sequence[int]]
) -> tuple[Checkpoint, Sequence[Sequence[int]]]:
    """Return a model with the used rows of its embedding alone, and the texts by their numbers.

    The head, which nobody asks for, is as small.
    """
    if "inputs" in checkpoint.tensors:  # layers have tables of their own for tokens
        return checkpoint, windows
    ids, places = np.unique(np.concatenate(windows), return_inverse=True)
    embed = checkpoint.tensors["embed"].rows(ids)
    small = {name: embed for name in ("embed", "head") if name in checkpoint.tensors}
    ends = np.cumsum([len(window) for window in windows])[:-1]
    numbers = [part.tolist() for part in np.split(places, ends)]
    return replace(checkpoint, tensors={**checkpoint.tensors, **small}), numbers


def budget_bytes(checkpoint: Checkpoint, setup: Setup) -> None:
    """Return None: a model takes the machine's memory."""


def least_prompt_tokens(arch: ModelArch, setup: Setup) -> int:
    """Return what the policy takes by itself: it was found for processors."""
    del arch, setup
    return SplitFuse.min_chunk


def looks_ahead(arch: ModelArch, setup: Setup) -> bool:
    """Return no: a step begins when it is asked for."""
    del arch, setup
    return False


def step_knots() -> tuple[int, ...]:
    """Return powers of two: at which sizes matrix products change their ways is not documented."""
    return tuple(1 << power for power in range(12))


def describe() -> str:
    """Return the library that it computes with."""
    return "numpy, float32"


def footprint(arch: ModelArch, setup: Setup) -> Footprint:
    """Return how much memory a setup takes."""
    max_model_len, max_num_batched_tokens = setup.max_model_len, setup.max_num_batched_tokens
    kv_size = max((mixer.num_kv_heads * mixer.key_dim for mixer in arch.attentions), default=0)
    q_size = max((mixer.num_heads * mixer.key_dim for mixer in arch.attentions), default=0)
    num_heads = max((mixer.num_heads for mixer in arch.attentions), default=0)
    inner = max(layer.ffn.size for layer in arch.layers)
    widest = max(  # projections of a recurrent layer, and what is made of them
        max(rows for rows, *_ in layer.mixer.shapes(arch.hidden_size).values())
        if layer.recurrent else 0
        for layer in arch.layers
    )  # fmt: skip
    of_inputs = arch.num_layers * arch.input_size
    activations = 6 * arch.hidden_size + 4 * (inner + kv_size + q_size + widest + of_inputs)
    scores = 2 * num_heads * min(SCORES, max_num_batched_tokens * max_model_len)
    gathered = 2 * max(POSITIONS, max_model_len) * kv_size
    # Of samples, with a byte each that says whether they are finite, and beside them of a prompt.
    logits = (
        1.25 * max_draws(setup.max_num_seqs) + min(max_num_batched_tokens, PROMPT_ROWS)
    ) * arch.vocab_size
    step_bytes = int(4 * (max_num_batched_tokens * activations + scores + gathered + logits))
    kv_bytes = max(
        4 * sum(arch.layers[i].known_attention.cache_size for i in group.layers)
        for group in setup.groups or one_group(arch)
    )
    return Footprint(step_bytes, kv_bytes, state_bytes_per_seq(arch))


def packed_bytes(checkpoint: Checkpoint, setup: Setup) -> Mapping[str, int]:
    """Return the bytes of the weights as this backend holds them: all in f32."""
    return {"all": _weight_bytes(checkpoint.arch)}


def _weight_bytes(arch: ModelArch) -> int:
    """Return the bytes of all weights but the table of layers' inputs, which is never decoded."""
    return weight_bytes(arch, 4) - 4 * arch.vocab_size * arch.num_layers * arch.input_size
