"""The layers of Nemotron-H as shapes: each is a mixer alone, or a network alone.

It reads what the config says of them; a network stands with the mixer before it, as in the engine.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.physics.fields import Fields
from ridgeline.physics.layers import Part, attention, experts, joined, mamba2, mlp, norms
from ridgeline.physics.shapes import Layer

_NAMES = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-",
    "moe": "E",
}  # fmt: skip
# Sizes of halves that a model may not have, though its config names them.
_OF_OTHERS = (
    "intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
)  # fmt: skip


def layers_by_halves(config: Fields, hidden: int) -> tuple[Layer, ...]:
    """Return the layers. Raises ValueError: a key is missing, out of range or not understood."""
    names = config.list_of(str, "layers_block_type")
    config.get("num_hidden_layers", *_OF_OTHERS)
    letters = str(config.get("hybrid_override_pattern") or "")
    if names is not None:
        letters = "".join(_NAMES.get(name, "?") for name in names)
    layers: list[Layer] = []
    for i, letter in enumerate(letters):
        norm = norms(hidden, 1)
        if letter in "M*":
            part = _state(config, hidden) if letter == "M" else _attention(config, hidden)
            layers.append(joined(part, None, norm))
        elif letter in "-E" and layers:
            network = _mlp(config, hidden) if letter == "-" else _experts(config, hidden)
            last = layers[-1]
            layers[-1] = replace(
                last,
                matrices=(*last.matrices, *network.matrices, *norm),
                mlp_values=network.token_values,
            )
        else:
            config.fail(f"layer {i} is {letter!r}, which is not understood")
    if not layers:
        config.fail("hybrid_override_pattern is missing")
    return tuple(layers)


def _state(config: Fields, hidden: int) -> Part:
    config.get("expand")  # of no size of its own
    return mamba2(
        hidden,
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("n_groups"),
        config.integer("ssm_state_size"),
        config.integer("conv_kernel", default=4),
        biased=config.flag("use_bias", default=False),
        conv_biased=config.flag("use_conv_bias", default=True),
    )


def _attention(config: Fields, hidden: int) -> Part:
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    head_dim = config.integer("head_dim", "attention_head_dim", default=128)
    config.get("attention_head_dim")
    return attention(hidden, heads, kv_heads, head_dim, None)


def _mlp(config: Fields, hidden: int) -> Part:
    biased = config.flag("mlp_bias", default=False)
    return mlp(hidden, config.integer("intermediate_size"), gated=False, biased=biased)


def _experts(config: Fields, hidden: int) -> Part:
    return experts(
        hidden,
        config.integer("moe_intermediate_size"),
        config.integer("n_routed_experts"),
        config.integer("num_experts_per_tok"),
        shared_width=config.integer("moe_shared_expert_intermediate_size"),
        router_bias=True,
        gated=False,
    )
