"""What differs from layer to layer: heads, whose keys and values are read, dense networks, widths.

It knows the keys that say so, and which layers they speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp


class LayerHeads(NamedTuple):
    """Keys and values of a layer: their heads, their channels, and whether both are the same."""

    num_kv_heads: int
    head_dim: int
    v_is_k: bool = False


def layer_heads(
    config: ConfigReader, family: Family, kinds: Sequence[str], num_heads: int, sliding: LayerHeads
) -> dict[str, LayerHeads]:
    """Return the heads of each kind of layer, of which ``sliding`` are those of sliding ones.

    Raises:
        ModelFileError: a value is out of range, or layers of one kind differ.
    """
    by_kind = {"sliding": sliding, "full": sliding}
    if family.heads_by_layer:
        is_key = config.flag("attention_k_eq_v", False)
        head_dim = config.integer("global_head_dim", 512)
        others = config.integer("num_global_key_value_heads", sliding.num_kv_heads)
        full = LayerHeads(others if is_key else sliding.num_kv_heads, head_dim, is_key)
        by_kind["full"] = full
        if config.get("per_layer_config") is not None:  # newer files have this instead
            changes = _changes_by_kind(config, kinds)
            by_kind = {kind: LayerHeads(**(sliding._asdict() | changes[kind])) for kind in by_kind}
            by_kind["full"] = by_kind["full"]._replace(v_is_k=is_key)
    check_sharing(config, num_heads, [heads.num_kv_heads for heads in by_kind.values()])
    return by_kind


def check_sharing(config: ConfigReader, num_heads: int, kv_heads: Sequence[int]) -> None:
    """Raise ModelFileError unless heads share key and value heads evenly, where there are some."""
    for number in filter(None, kv_heads):
        if num_heads % number:
            config.fail(f"{num_heads} heads cannot share {number} key and value heads evenly")


def _changes_by_kind(config: ConfigReader, kinds: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return what ``per_layer_config`` changes in layers of each kind."""
    per_layer: Any = config.get("per_layer_config")
    known = ("head_dim", "num_key_value_heads")
    if type(per_layer) is not dict or not all(
        str(number).isdigit()
        and int(number) < len(kinds)
        and type(changes) is dict
        and all(key in known for key in changes)
        for number, changes in per_layer.items()
    ):
        config.fail(f"per_layer_config must have {' and '.join(known)} by the number of a layer")
    by_number = {int(number): changes for number, changes in per_layer.items()}
    by_kind: dict[str, dict[str, int]] = {"full": {}, "sliding": {}}
    for kind in by_kind:
        of_kind = [by_number.get(i, {}) for i, name in enumerate(kinds) if name == kind]
        if any(changes != of_kind[0] for changes in of_kind):
            config.fail("per_layer_config: layers of one kind differ, which is not supported")
        for changes in of_kind[:1]:
            of_layer = ConfigReader(changes, f"{config.where}: per_layer_config")
            names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
            by_kind[kind] = {names[key]: of_layer.integer(key) for key in changes}
    return by_kind


def with_shared(config: ConfigReader, key: str, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers, of which the last few read keys and values of the last one of their kind.

    ``key`` says how many have none of their own (Brandon et al., 2024).

    Raises:
        ModelFileError: it is out of range, or a layer finds none of its kind before.
    """
    shared, new_layers = config.integer(key, 0, low=0), list(layers)
    first = len(layers) - shared
    for i in range(max(first, 0), len(layers)):
        mixer = layers[i].mixer
        if isinstance(mixer, Attention):
            alike = [j for j, layer in enumerate(layers[: max(first, 0)]) if layer.mixer == mixer]
            if not alike:
                config.fail(
                    f"{config.name(key)} is {shared}: layer {i} finds no layer of its kind that "
                    f"has keys and values"
                )
            new_layers[i] = replace(layers[i], mixer=replace(mixer, kv_of=alike[-1]))
    return new_layers


def widened(layer: Layer, size: int) -> Layer:
    """Return a layer whose dense network has another width."""
    ffn = layer.ffn
    if isinstance(ffn, Mlp):
        return replace(layer, ffn=replace(ffn, size=size))
    assert isinstance(ffn, Experts)
    assert ffn.beside is not None
    return replace(layer, ffn=replace(ffn, beside=replace(ffn.beside, size=size)))


def dense_layers(config: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Return which layers of a model with experts have a dense network instead.

    Raises:
        ModelFileError: the file names layers that there are not.
    """
    if not family.dense_layers:
        return [False] * num_layers
    types = config.get("mlp_layer_types")  # newer files of GLM
    if types is not None:
        config.get(family.dense_layers)  # says the same
        if (
            type(types) is not list
            or len(types) != num_layers
            or any(name not in ("dense", "sparse") for name in types)
        ):
            config.fail("mlp_layer_types must name 'dense' or 'sparse' for each of the layers")
        return [name == "dense" for name in types]
    sparse = config.get("moe_layers") if family.experts_every else None  # of Llama 4
    if sparse is not None:
        config.get(family.experts_every)  # says the same
        if type(sparse) is not list or any(i not in range(num_layers) for i in sparse):
            config.fail("moe_layers must be a list of numbers of layers")
        return [i not in sparse for i in range(num_layers)]
    if family.experts_every:
        numbers, every = config.get(family.dense_layers), config.integer(family.experts_every, 1)
        numbers = [] if numbers is None else numbers
        if type(numbers) is not list or any(i not in range(num_layers) for i in numbers):
            config.fail(
                f"{family.dense_layers} must be a list of numbers of layers, each less than "
                f"num_hidden_layers, which is {num_layers}"
            )
        place = config.integer("expert_layer_offset", every - 1, low=0)  # of Jamba
        return [i in numbers or i % every != place for i in range(num_layers)]
    last = config.get("moe_layer_end_index")  # of ERNIE
    if last not in (None, -1, num_layers - 1):
        config.fail(
            f"moe_layer_end_index is {last!r}: dense networks behind experts are not supported"
        )
    count = config.integer(family.dense_layers, 0, low=0)
    if count > num_layers:
        config.fail(f"{config.name(family.dense_layers)} is {count}, of {num_layers} layers")
    return [i < count for i in range(num_layers)]
