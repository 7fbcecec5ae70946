"""What the best-known published formula says of a model's memory, and where it errs.

The formula is that of the Streamlit estimator of david-share (Estimate-Inference-Memory, 2024),
as it is coded there, in decimal GB. It is here to compare with, never to plan with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ridgeline.model.cost.shapes import ModelShape, weight_params
from ridgeline.planner.memory.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Published:
    """The formula's figures in decimal GB.

    Attributes:
        weights_gb: parameters times bits.
        activations_gb: with flash attention, its smallest figure.
        plain_activations_gb: without it.
        kv_gb: of the cache.
        total_gb: weights, cache and the smallest activations.
        plain_total_gb: the same without flash attention.
        why_wrong: each error in a sentence.
    """

    weights_gb: float
    activations_gb: float
    plain_activations_gb: float
    kv_gb: float
    total_gb: float
    plain_total_gb: float
    why_wrong: tuple[str, ...]

    @property
    def in_words(self) -> str:
        """What it says, behind "it says"."""
        return (
            f"{self.total_gb:.2f} GB: weights {self.weights_gb:.2f}, KV {self.kv_gb:.2f}, "
            f"activations {self.activations_gb:.2f}; without flash attention "
            f"{self.plain_total_gb:.2f} GB, of which activations {self.plain_activations_gb:.2f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the "published" of a plan's document."""
        return {
            "weights_gb": round(self.weights_gb, 2),
            "activations_gb": round(self.activations_gb, 2),
            "plain_activations_gb": round(self.plain_activations_gb, 2),
            "kv_gb": round(self.kv_gb, 2),
            "total_gb": round(self.total_gb, 2),
            "plain_total_gb": round(self.plain_total_gb, 2),
            "why_wrong": list(self.why_wrong),
        }


def published_formula(spec: ModelSpec, context: int, concurrency: int) -> Published:
    """Return what the formula says of ``concurrency`` sequences of ``context`` tokens."""
    shape = spec.shape
    layers, hidden, heads, kv_heads = _as_the_formula_reads(shape)
    tokens = context * concurrency
    bits = spec.storage.plain.bits
    weights = weight_params(shape) * bits / 8
    plain: float
    kv: float
    if heads == kv_heads:
        plain = (32 * tokens * hidden + 4 * heads * context * tokens) * 2
        kv = 2 * layers * tokens * hidden * 2
    else:
        plain = 28 * tokens * hidden + (2 * kv_heads / heads) * tokens * hidden
        plain = (plain + 4 * kv_heads * context * tokens) * 2
        kv = 2 * layers * tokens * (hidden / kv_heads) * 2
    flash = (32 * tokens * hidden + 4 * 128 * tokens) * 2
    return Published(
        weights_gb=weights / 1e9,
        activations_gb=flash / 1e9,
        plain_activations_gb=plain / 1e9,
        kv_gb=kv / 1e9,
        total_gb=(weights + kv + flash) / 1e9,
        plain_total_gb=(weights + kv + plain) / 1e9,
        why_wrong=tuple(_why_wrong(spec, tokens, kv, flash)),
    )


def _as_the_formula_reads(shape: ModelShape) -> tuple[int, int, int, int]:
    return len(shape.layers), shape.hidden_size, shape.num_heads, shape.num_kv_heads


def _why_wrong(spec: ModelSpec, tokens: int, kv: float, flash: float) -> Iterator[str]:
    shape = spec.shape
    right = sum(layer.cache.values_per_token() for layer in shape.layers) * 2 * tokens
    if right and abs(kv / right - 1) > 0.01:
        ratio = right / kv
        low = f"{ratio:.1f} times too low" if ratio > 1 else f"{1 / ratio:.1f} times too high"
        cause = "it divides the width by the key and value heads, where it must multiply by their "
        cause += "share of all heads"
        if shape.num_heads == shape.num_kv_heads:
            cause = "it takes the width of the model for that of keys and values"
        if "mla" in shape.kinds:
            cause = "it leaves out latent caches"
        yield f"KV cache {low} ({right / 1e9:.2f} GB in 16 bits): {cause}"
    yield (
        f"activations of {flash / 1e9:.2f} GB are of whole prompts at once, and doubled: "
        f"coefficients that are bytes already are taken twice; engines compute prompts in pieces"
    )
    if spec.storage.linear != spec.storage.plain:
        yield "quantised weights are more than bits times parameters: there are scales too"
    if any(layer.cache.window for layer in shape.layers):
        yield "it leaves out sliding windows"
    if "moe" in shape.kinds:
        yield "it leaves out experts: parameters must be typed by hand"
    yield "no driver, graphs, collectives, logits or margin; decimal GB are compared with GiB"
