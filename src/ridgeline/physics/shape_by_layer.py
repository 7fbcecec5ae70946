"""The layers of Gemma 4 as shapes: heads by layer, shared keys and values, inputs, experts beside.

It reads what its config says of them; all else is as in other families: see ``config_shape``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.physics.fields import Fields
from ridgeline.physics.layers import (
    Part,
    attention,
    experts,
    joined,
    layer_input,
    layer_inputs,
    mlp,
    norms,
    vector,
)
from ridgeline.physics.shapes import Layer, Matrix

_KIND_NORMS, _EXPERT_NORMS = 4, 4  # of a layer; more of one with experts


def layers_by_layer(
    config: Fields, hidden: int, windows: Sequence[int | None], usual_input: int
) -> tuple[tuple[Layer, ...], tuple[Matrix, ...]]:
    """Return the layers, and what makes the inputs of all.

    Args:
        config: the values.
        hidden: width of the residual stream.
        windows: of each layer; None where it sees everything.
        usual_input: channels of a layer's own input, where the config does not mention it.

    Raises:
        ValueError: a key is missing or out of range.
    """
    count, input_size = len(windows), _input_size(config, usual_input)
    own = count - config.integer("num_kv_shared_layers", default=0, low=0)
    if own < 1:
        config.fail(f"num_kv_shared_layers is {count - own}, but there are {count} layers")
    made = []
    for i, window in enumerate(windows):
        part = _inner(config, hidden, keeps_cache=i < own)
        has_experts = any(matrix.copies > 1 for matrix in part.matrices)
        between = norms(hidden, _KIND_NORMS + _EXPERT_NORMS * has_experts + bool(input_size))
        between += (vector("layer_scalar", "norms", 1),)
        if input_size:
            between += layer_input(hidden, input_size)
        mixer = _attention(config, hidden, i, window, keeps_cache=i < own)
        made.append(joined(mixer, part, between))
    if not input_size:
        return tuple(made), ()
    vocab = config.integer("vocab_size_per_layer_input", "vocab_size")
    norm = vector("per_layer_projection_norm", "norms", input_size)
    return tuple(made), (*layer_inputs(hidden, vocab, count * input_size), norm)


def _input_size(config: Fields, usual: int) -> int:
    key = "hidden_size_per_layer_input"
    default = 0 if key in config.values else usual  # null is none
    config.get("vocab_size_per_layer_input")
    return config.integer(key, default=default, low=0)


def _attention(
    config: Fields, hidden: int, i: int, window: int | None, *, keeps_cache: bool
) -> Part:
    heads = config.integer("num_attention_heads")
    kv_heads, head_dim = (
        config.integer("num_key_value_heads"),
        config.integer("head_dim", default=256),
    )
    is_key = config.flag("attention_k_eq_v", default=False) and window is None
    others = config.integer("num_global_key_value_heads", default=kv_heads)
    full_dim = config.integer("global_head_dim", default=512)
    per_layer = config.get("per_layer_config")
    if per_layer is not None:
        changes = _changes(config, per_layer, i)
        head_dim, kv_heads = (
            changes.get("head_dim", head_dim),
            changes.get("num_key_value_heads", kv_heads),
        )
    elif window is None:
        head_dim, kv_heads = full_dim, others if is_key else kv_heads
    if heads % kv_heads:
        config.fail(f"{heads} heads cannot share {kv_heads} key and value heads evenly")
    biased = config.flag("attention_bias", default=False)
    projections = (("q", "k") if is_key else ("q", "k", "v")) if keeps_cache else ("q",)
    return attention(
        hidden, heads, kv_heads, head_dim, window, qkv_bias=biased, o_bias=biased, qk_norm="head",
        keeps_cache=keeps_cache, projections=projections,
    )  # fmt: skip


def _changes(config: Fields, per_layer: Any, i: int) -> Mapping[str, int]:
    """Return what newer files say of layer ``i`` by its number, which may begin with zeros."""
    of_layers: Mapping[str, Any] = per_layer if isinstance(per_layer, Mapping) else {"": None}
    matching = [
        changes
        for number, changes in of_layers.items()
        if str(number).lstrip("0") == str(i).lstrip("0")
    ]
    if "" in of_layers or any(not isinstance(changes, Mapping) for changes in matching):
        config.fail("per_layer_config is no object with an object by the number of a layer")
    of_layer = Fields(matching[0] if matching else {}, f"{config.where}: per_layer_config")
    return {key: of_layer.integer(key) for key in of_layer.values}


def _inner(config: Fields, hidden: int, *, keeps_cache: bool) -> Part:
    """Return the network of a layer; those that read others' keys and values may be wider."""
    is_wide = config.flag("use_double_wide_mlp", default=False) and not keeps_cache
    dense = mlp(hidden, config.integer("intermediate_size") * (2 if is_wide else 1))
    config.get("moe_intermediate_size", "num_experts", "top_k_experts")
    if not config.flag("enable_moe_block", default=False):
        return dense
    count, active = config.integer("num_experts"), config.integer("top_k_experts")
    if active > count:
        config.fail(f"{active} experts for a token, but there are {count}")
    width = config.integer("moe_intermediate_size")
    part = experts(hidden, width, count, active, own_scales=True)
    return part._replace(
        matrices=part.matrices + dense.matrices,
        token_values=part.token_values + dense.token_values,
    )
