"""What a token goes through by itself in each layer: an MLP, or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family, Parts
from ridgeline.model.shape.model import Experts, Layer, Mlp


def layer_networks(
    config: ConfigReader, family: Family, parts: Parts, num_layers: int
) -> list[Mlp | Experts]:
    """Return each layer's feed-forward network: experts, but where the file says a dense one."""
    ffn = feed_forward(config, family, parts)
    dense = _dense_layers(config, family, num_layers)
    if not any(dense):
        return [ffn] * num_layers
    plain = Mlp(**parts["dense"])
    return [plain if is_dense else ffn for is_dense in dense]


def feed_forward(config: ConfigReader, family: Family, parts: Parts) -> Mlp | Experts:
    """Return what a token goes through by itself. Raises ModelFileError for numbers that clash."""
    if not family.has_experts:
        network = Mlp(**parts["ffn"])
        if scales := parts["scales"]:
            gate_scale, out_scale = scales["ffn"]
            network = replace(network, gate_scale=gate_scale, out_scale=out_scale)
        return network
    ffn = Experts(**parts["ffn"])
    shared = parts["shared"]
    if shared and shared["size"]:
        ffn = replace(ffn, shared=Mlp(**shared))
    if dense := parts["beside"]:
        ffn = replace(ffn, beside=Mlp(**dense))
    if ffn.per_token > ffn.num:
        config.fail(f"a token cannot go to {ffn.per_token} of {ffn.num} experts")
    of_group = ffn.num // ffn.num_groups
    if ffn.num % ffn.num_groups or ffn.groups_met > ffn.num_groups:
        config.fail(
            f"{ffn.num} experts cannot stand in {ffn.num_groups} groups of which a token goes to "
            f"{ffn.groups_met}"
        )
    if ffn.per_token > of_group * ffn.groups_met or (ffn.num_groups > 1 and of_group < 2):
        key = family.facts["ffn.num"].keys[0]
        config.fail(
            f"{config.name(key)} is {ffn.num}: groups of {of_group} experts are too small, as a "
            f"token goes to {ffn.per_token}"
        )
    return ffn


def _dense_layers(config: ConfigReader, family: Family, num_layers: int) -> list[bool]:
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


def widened(layer: Layer, size: int) -> Layer:
    """Return a layer whose dense network has another width."""
    ffn = layer.ffn
    if isinstance(ffn, Mlp):
        return replace(layer, ffn=replace(ffn, size=size))
    assert isinstance(ffn, Experts)
    assert ffn.beside is not None
    return replace(layer, ffn=replace(ffn, beside=replace(ffn.beside, size=size)))
