"""The weights of a layer, as backends that compute with arrays hold them: by name, some stacked.

Arrays may be numpy's or another library's: what a tensor is made of, ``get`` decides, and ``join``
puts several side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.shape.model import Experts, Mlp, ModelArch

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, slots=True)
class Norm:
    """A norm's weight, and its bias if it has one."""

    weight: Floats
    bias: Floats | None = None


@dataclass(frozen=True, eq=False, slots=True)
class AttentionWeights:
    """Weights of attention, ``(out, in)``; absent biases and norms are None.

    Stacked in ``qkv`` are ``Attention.projections``.
    """

    qkv: Floats
    qkv_bias: Floats | None
    q_norm: Floats | None
    k_norm: Floats | None
    o: Floats
    o_bias: Floats | None
    gate: Floats | None
    sinks: Floats | None


@dataclass(frozen=True, eq=False, slots=True)
class FeedForwardWeights:
    """Weights of a feed-forward network, gate and up stacked; absent ones are None."""

    gate_up: Floats
    gate_up_bias: Floats | None
    down: Floats
    down_bias: Floats | None
    router: Floats | None
    router_bias: Floats | None
    choice_bias: Floats | None
    shared_scale: Floats | None
    shared: FeedForwardWeights | None  # that of the expert that all tokens meet
    beside: FeedForwardWeights | None  # that of the network beside experts
    expert_scales: Floats | None


@dataclass(frozen=True, eq=False, slots=True)
class LayerWeights:
    """Weights of one layer; what it does not have is None or empty."""

    norms: dict[str, Norm]  # by canonical name
    attention: AttentionWeights | None
    latent: dict[str, Floats]  # of latent attention, by canonical name
    recurrent: dict[str, Floats]  # the same
    ffn: FeedForwardWeights | None
    inputs: dict[str, Floats]  # what adds the layer's own input, by canonical name
    out_scale: Floats | None

    def arrays(self) -> dict[str, list[Floats]]:
        """Return all arrays: the matrices of attention and of the rest, and all vectors."""
        norms = [array for norm in self.norms.values() for array in (norm.weight, norm.bias)]
        attention = [] if self.attention is None else _fields(self.attention)
        ffn = [] if self.ffn is None else _fields(self.ffn)
        mixers = [*attention, *self.latent.values(), *self.recurrent.values()]
        ffn += self.inputs.values()
        vectors = [*norms, *mixers, *ffn, self.out_scale]
        return {
            "attention": [array for array in mixers if array is not None and array.ndim > 1],
            "mlp": [array for array in ffn if array is not None and array.ndim > 1],
            "norms": [array for array in vectors if array is not None and array.ndim == 1],
        }


def _fields(weights: AttentionWeights | FeedForwardWeights) -> list[Floats | None]:
    arrays: list[Floats | None] = []
    for field in fields(weights):
        value = getattr(weights, field.name)
        arrays += _fields(value) if isinstance(value, FeedForwardWeights) else [value]
    return arrays


def load_layer(
    get: Callable[[str], Floats],
    arch: ModelArch,
    index: int,
    join: Callable[[Sequence[Floats]], Floats] = np.concatenate,
) -> LayerWeights:
    """Return a layer's weights; ``get`` returns a tensor by its canonical name."""
    layer = arch.layers[index]

    def part(name: str) -> Floats:
        return get(f"layers.{index}.{name}")

    def both(*names: str) -> Floats:
        return join([part(name) for name in names])

    def stack(wanted: bool, *names: str) -> Floats | None:
        return both(*names) if wanted else None

    attention, ffn = layer.attention, layer.ffn
    norms = {
        name: Norm(part(name), part(f"{name}_bias") if arch.norm_bias else None)
        for name in layer.norm_names
    }
    of_attention, of_latent = None, dict[str, Floats]()
    if attention is not None and attention.latent is not None:
        of_latent = {name: part(name) for name in attention.shapes(arch.hidden_size)}
    elif attention is not None:
        of_attention = AttentionWeights(
            qkv=both(*attention.projections),
            qkv_bias=stack(attention.qkv_bias, *(f"{name}_bias" for name in attention.projections)),
            q_norm=stack(bool(attention.qk_norm), "q_norm"),
            k_norm=stack(bool(attention.qk_norm) and attention.kv_of is None, "k_norm"),
            o=part("o"),
            o_bias=stack(attention.o_bias, "o_bias"),
            gate=stack(attention.gated, "q_gate"),
            sinks=stack(attention.sinks, "sinks"),
        )
    mixer = layer.recurrent
    recurrent = {} if mixer is None else {n: part(n) for n in mixer.shapes(arch.hidden_size)}

    def network(ffn: Mlp | Experts, prefix: str = "") -> FeedForwardWeights:
        inner = [f"{prefix}{name}" for name in (("gate", "up") if ffn.gated else ("up",))]
        has_experts = isinstance(ffn, Experts)
        shared, beside = (ffn.shared, ffn.beside) if isinstance(ffn, Experts) else (None, None)
        return FeedForwardWeights(
            gate_up=both(*inner),
            gate_up_bias=stack(ffn.bias, *(f"{name}_bias" for name in inner)),
            down=part(f"{prefix}down"),
            down_bias=stack(ffn.bias, f"{prefix}down_bias"),
            router=stack(has_experts, "router"),
            router_bias=stack(has_experts and ffn.bias, "router_bias"),
            choice_bias=stack(isinstance(ffn, Experts) and ffn.choice_bias, "choice_bias"),
            shared_scale=stack(isinstance(ffn, Experts) and ffn.shared_gated, "shared_scale"),
            shared=network(shared, "shared_") if shared else None,
            beside=network(beside, "beside_") if beside else None,
            expert_scales=stack(isinstance(ffn, Experts) and ffn.own_scales, "expert_scales"),
        )

    inputs = ("input_gate", "input_proj") if layer.input_size else ()
    return LayerWeights(
        norms,
        of_attention,
        of_latent,
        recurrent,
        network(ffn) if ffn.size else None,
        {name: part(name) for name in inputs},
        stack(layer.out_scale, "out_scale"),
    )
