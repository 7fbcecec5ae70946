"""The bytes and operations of each kind of compiled work in a step.

Operations come from ``costs``, bytes from the packed weights and cache records as they really are,
each counted once a step, however many threads and rows share them. Tokens count as greedy: of a
head with a proxy they read the proxy, and a percent or two of the head that is not counted. Of
the last layer prompts take keys and values, and one token the rest: ``backends.cpu.batch``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ridgeline.backends.cpu.layout.model_weights import Weights
from ridgeline.backends.cpu.layout.shapes import TOKENS, KernelConfig
from ridgeline.backends.interface import Traffic
from ridgeline.core.records import StepRecord
from ridgeline.model.cost.costs import (
    attention_flops,
    head_flops,
    kv_read_bytes,
    layer_attention_flops,
    linear_flops,
)
from ridgeline.model.shape.model import Experts, ModelArch

_FORMS = {"floats": "f32", "bf16": "bf16"}  # of activations; all others are bytes


def step_traffic(
    arch: ModelArch,
    sizes: KernelConfig,
    weights: Weights,
    step: StepRecord,
    num_experts: int | None = None,
) -> dict[str, Traffic]:
    """Return the traffic of a step by kind: linears, head and attention.

    Of the matrices of experts those of ``num_experts`` were read, in all layers; if that is not
    known, of as many as the tokens meet if all are equally likely.
    """
    form = _FORMS.get(sizes.activations, "int8")
    num_tokens = sum(count for _, _, count in step.work)
    drafts = {seq_id: len(tokens) for seq_id, tokens in step.drafts}
    beams = {seq_id for seq_id, _ in step.ranked}
    drawn = [  # rows that are drawn from, or ranked, of each item
        (bool(tokens) or seq_id in beams) + drafts.get(seq_id, 0)
        for (seq_id, _, _), tokens in zip(step.work, step.sampled, strict=True)
    ]
    num_rows = sum(drawn)
    head = weights.proxy if weights.proxy and weights.prunes(num_rows) else weights.head
    without_output: list[tuple[int, int]] = []
    if num_tokens > sizes.mixed_rows:
        pairs = zip(step.work, drawn, strict=True)
        without_output = [(start, n - num_drawn) for (_, start, n), num_drawn in pairs]
    last = arch.layers[-1]  # of which only keys, values and states are computed, for such tokens
    behind_keys = 2 * last.input_size * arch.hidden_size
    behind_keys += last.ffn.active_weights(arch.hidden_size)
    if last.attention is not None:
        behind_keys += last.attention.o_size * arch.hidden_size
    if last.recurrent is not None:
        behind_keys += math.prod(last.recurrent.shapes(arch.hidden_size)["out"])
    left_out = 2 * sum(n for _, n in without_output) * behind_keys
    unseen = sum(
        layer_attention_flops(last.attention, start, n)
        for start, n in without_output
        if last.attention is not None
    )
    return {
        "linears": Traffic(
            _layer_bytes(arch, weights, num_tokens, num_experts),
            linear_flops(arch, num_tokens) - left_out,
            form,
        ),
        "head": Traffic(
            head.data.nbytes if head and num_rows else 0, head_flops(arch, num_rows), form
        ),
        "attention": Traffic(
            sum(_kv_bytes(arch, sizes, start, n) for _, start, n in step.work),
            sum(attention_flops(arch, start, n) for _, start, n in step.work) - unseen,
            "int8" if sizes.kinds[0].heads.is_quantised else "f32",
        ),
    }


def _kv_bytes(arch: ModelArch, sizes: KernelConfig, start: int, num_tokens: int) -> int:
    """Return the bytes of the cache that a chunk reads, of all layers."""
    num_bytes = 0
    for heads in sizes.all_heads:
        pairs = zip(arch.layers, sizes.layers, strict=True)
        alike = replace(arch, layers=tuple(one for one, kind in pairs if kind.heads == heads))
        bytes_per_value = heads.record_bytes / (heads.parts * TOKENS * heads.num_channels)
        num_bytes += kv_read_bytes(alike, start, num_tokens, bytes_per_value)
    return num_bytes


def _layer_bytes(
    arch: ModelArch, weights: Weights, num_tokens: int, num_experts: int | None
) -> int:
    """Return the bytes of the layers' weights that a step reads."""
    experts = {
        f"layers.{i}.{part}": layer.ffn
        for i, layer in enumerate(arch.layers)
        for part in ("gate", "up", "down")
        if isinstance(layer.ffn, Experts)
    }
    of_layers = [layer.ffn for layer in arch.layers if isinstance(layer.ffn, Experts)]
    in_all = sum(ffn.num for ffn in of_layers)
    met = sum(ffn.expected_met(num_tokens) for ffn in of_layers)
    if num_experts is not None:
        met = min(num_experts, in_all)  # threads with rows of their own read some twice
    read = of_experts = 0
    for name, (_, data) in weights.arrays.items():
        if name in experts:
            of_experts += data.nbytes
        elif name.startswith("layers.") or name == "inputs_proj":
            read += data.nbytes
    return read + int(of_experts * met / max(in_all, 1))
