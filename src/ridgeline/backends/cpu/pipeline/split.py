"""Which layers a stage has, and what cannot be divided."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

from ridgeline.backends.interface import Setup
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import CacheGroup, one_group
from ridgeline.model.shape.model import ModelArch


def check_stages(arch: ModelArch, setup: Setup) -> None:
    """Raise ValueError, with the way out, unless a model can be divided into stages."""
    flag, why = f"--stages {setup.stages}", ""
    if setup.stages > arch.num_layers:
        why = f"the model has {arch.num_layers} layers: take fewer stages"
    elif arch.num_state_values:
        why = "layers with states cannot be divided yet: leave it out"
    elif arch.reads_whole:
        why = "a model that reads texts whole cannot be divided yet: leave it out"
    elif arch.input_size:
        why = "layers with inputs of their own cannot be divided yet: leave it out"
    elif any(mixer.kv_of is not None for mixer in arch.attentions):
        why = "layers that read the keys of others cannot be divided yet: leave it out"
    elif setup.max_lora_rank:
        why = "a model that is divided has no adapters (--lora) yet: leave out one of them"
    if why:
        raise ValueError(f"{flag}: {why}")


def bounds(arch: ModelArch, count: int) -> list[int]:
    """Return where each stage's layers begin, and the end of the last, by what must be read.

    The last stage has the head as well. Each has a layer at least. Of the head a quarter counts:
    all tokens that are drawn need it, but of a prompt only the last one (docs/results.md#server).
    """
    costs = [0] * arch.num_layers
    for name, shape in arch.matrix_shapes().items():
        if name.startswith("layers."):
            costs[int(name.split(".")[1])] += math.prod(shape)
    head = arch.vocab_size * arch.hidden_size // 4
    upto = [0, *accumulate(costs)]
    target = (upto[-1] + head) / count
    begins = [0]
    for stage in range(1, count):
        nearest = min(range(len(upto)), key=lambda i: abs(upto[i] - target * stage))
        last = arch.num_layers - (count - stage)
        begins.append(min(max(nearest, begins[-1] + 1), last))
    return [*begins, arch.num_layers]


def layers_of(checkpoint: Checkpoint, first: int, end: int) -> Checkpoint:
    """Return a checkpoint of some layers: with the head if they are the last."""
    arch = checkpoint.arch
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if not name.startswith("layers."):
            tensors[name] = tensor
            continue
        _, number, rest = name.split(".", 2)
        if first <= int(number) < end:
            tensors[f"layers.{int(number) - first}.{rest}"] = tensor
    has_head = arch.has_head and end == arch.num_layers
    own = replace(arch, layers=arch.layers[first:end], has_head=has_head)
    return replace(checkpoint, arch=own, tensors=tensors, part=f"{first}-{end}")


def setup_of(setup: Setup, arch: ModelArch, first: int, end: int) -> Setup:
    """Return the setup of some layers of a model: its groups keep their order, and may be empty."""
    groups = tuple(
        CacheGroup(group.window, tuple(i - first for i in group.layers if first <= i < end))
        for group in setup.groups or one_group(arch)
    )
    return replace(setup, groups=groups)
