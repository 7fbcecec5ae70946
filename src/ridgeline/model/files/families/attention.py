"""Attention of each kind of layer: windows, heads, and how positions turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family, Parts
from ridgeline.model.files.families.rope import rope_from_config
from ridgeline.model.shape.model import Attention, Rope

_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
_RECURRENT_KINDS = dict.fromkeys(("conv", "linear_attention", "mamba"), "recurrent")
_RECURRENT_KINDS |= {"attention": "full"}
_Ropes = Mapping[str, Rope | None]  # by kind of layer: "full" or "sliding"


class LayerKinds(NamedTuple):
    """The layers of a model by the kinds of their mixers: "full", "sliding" or "recurrent".

    Attributes:
        kinds: of each layer.
        attentions: of "full" and "sliding" layers.
        max_position: how many tokens a text may have by its rope.
    """

    kinds: list[str]
    attentions: Mapping[str, Attention]
    max_position: int


def layer_kinds(config: ConfigReader, family: Family, parts: Parts, num_layers: int) -> LayerKinds:
    """Return which kind each layer is of, and the attention of each kind.

    Raises:
        ModelFileError: a value is missing, out of range or not supported.
    """
    mixer = {**parts["mixer"]}
    heads, hidden_size = mixer.pop("num_heads"), config.integer("hidden_size")
    if num_layers in family.wide_scale_layers:
        mixer["scale"] = (hidden_size // heads) ** -0.5
    head_dim = mixer.pop("head_dim", None) or config.integer("head_dim", hidden_size // heads)
    kv_heads = config.integer("num_key_value_heads", heads)
    if (factor := mixer.pop("key_scale", 1.0)) != 1.0:
        mixer["scale"] = head_dim**-0.5 * factor
    kinds, window = _windows(config, family, num_layers)
    window = _reach(config, window, mixer)
    if family.heads_by_layer and family.pattern:
        kinds[-1] = "full"  # transformers has no other last layer, whatever the config says
    by_kind = _layer_heads(config, family, kinds, heads, _LayerHeads(kv_heads, head_dim))
    ropes, max_position = _ropes(config, family, by_kind)
    if _stands_still(family, window):
        ropes = {**ropes, "full": None}
    # Projections that always have a bias share it with no key.
    if mixer.get("qkv_bias") is True and "mixer.o_bias" not in family.facts:
        mixer["o_bias"] = False
    attentions = {
        kind: Attention(
            heads,
            rope=ropes[kind],
            window=window if kind == "sliding" else None,
            **of_kind._asdict(),
            **mixer,
        )
        for kind, of_kind in by_kind.items()
    }
    return LayerKinds(kinds, attentions, max_position)


def _windows(config: ConfigReader, family: Family, num_layers: int) -> tuple[list[str], int | None]:
    """Return each layer's kind, and the window of sliding ones.

    A token at ``p`` of such a layer sees positions above ``p - window``.
    """
    has_switch = family.windows.startswith("switch")
    is_on = config.flag("use_sliding_window", False) if has_switch else family.windows != "none"
    kinds_of_attention = config.get("attn_type_list")
    if type(kinds_of_attention) is list and 0 in kinds_of_attention:  # MiniMax's older models
        config.fail("attn_type_list has layers of linear attention, which are not supported")
    window = family.default_window
    if config.has("sliding_window"):
        window = config.integer("sliding_window", 0, low=0) or None
    window = window if is_on else None
    spares = family.windows == "switch"
    first = config.integer("max_window_layers", 28, low=0) if spares else 0
    kinds: Any = config.get("layer_types")
    names = _KINDS | (_RECURRENT_KINDS if family.recurrent else {})
    if "chunk.size" in family.facts:  # the context ends with the first chunk
        names |= {"chunked_attention": "full"}
    if kinds is not None:
        if (
            type(kinds) is not list
            or len(kinds) != num_layers
            or any(k not in names for k in kinds)
        ):
            config.fail(f"layer_types must name one of {', '.join(names)} for each of the layers")
        if window is None and "sliding_attention" in kinds and config.get("sliding_window") == 0:
            config.fail("layer_types has sliding_attention, and sliding_window is 0")
        config.get(family.attention_layers)  # the same in other words
        if family.windows == "pattern":  # as well: transformers 5 saves both, and goes by the kinds
            config.get("sliding_window_pattern")
        return [names[kind] for kind in kinds], window
    if family.attention_layers:
        return _attention_layers(config, family, num_layers), window
    if family.windows == "pattern":
        return kinds_in_turn(config, "sliding_window_pattern", family, num_layers), window
    windowed = window and family.windows != "named"
    return ["sliding" if i >= first and windowed else "full" for i in range(num_layers)], window


def _reach(config: ConfigReader, window: int | None, mixer: Mapping[str, Any]) -> int | None:
    """Return how far a token sees: to both sides, half of what a file calls an encoder's window.

    Of a decoder whose tokens see what follows them the window is said of one side, without itself.
    """
    if window is None or mixer.get("causal", True):
        return window
    return window + 1 if config.get("is_causal") is False else window // 2 + 1


def _attention_layers(config: ConfigReader, family: Family, num_layers: int) -> list[str]:
    """Return kinds by the layers with attention: a list of them, or one in every few."""
    key = family.attention_layers
    value = config.get(key)
    if value is None and not family.pattern:
        config.fail(f"layer_types, or {key}, is missing")
    if value is None or type(value) in (int, float):
        every = config.integer(key, family.pattern)
        place = config.integer("attn_layer_offset", every - 1, low=0)  # of Jamba
        return ["full" if i % every == place else "recurrent" for i in range(num_layers)]
    if type(value) is not list or any(type(i) is not int for i in value):
        config.fail(f"{key} must be a list of numbers of layers")
    return ["full" if i in value else "recurrent" for i in range(num_layers)]


def kinds_in_turn(config: ConfigReader, key: str, family: Family, num_layers: int) -> list[str]:
    """Return kinds in turn: one layer in every few is full; or as an array says."""
    stored = config.get(key)
    if isinstance(stored, np.ndarray | list):
        flags = [bool(value) for value in stored]
        if len(flags) != num_layers:
            config.fail(f"{config.name(key)} has {len(flags)} values for {num_layers} layers")
        return ["sliding" if value else "full" for value in flags]
    every = config.integer(key, family.pattern or None)
    shift = 0 if family.full_first else 1
    return ["sliding" if (i + shift) % every else "full" for i in range(num_layers)]


class _LayerHeads(NamedTuple):
    """Keys and values of a layer: their heads, their channels, and whether both are the same."""

    num_kv_heads: int
    head_dim: int
    v_is_k: bool = False


def _layer_heads(
    config: ConfigReader, family: Family, kinds: Sequence[str], num_heads: int, sliding: _LayerHeads
) -> dict[str, _LayerHeads]:
    """Return the heads of each kind of layer, of which ``sliding`` are those of sliding ones.

    Raises:
        ModelFileError: a value is out of range, or layers of one kind differ.
    """
    by_kind = {"sliding": sliding, "full": sliding}
    if family.heads_by_layer:
        is_key = config.flag("attention_k_eq_v", False)
        head_dim = config.integer("global_head_dim", 512)
        others = config.integer("num_global_key_value_heads", sliding.num_kv_heads)
        full = _LayerHeads(others if is_key else sliding.num_kv_heads, head_dim, is_key)
        by_kind["full"] = full
        if config.get("per_layer_config") is not None:  # newer files have this instead
            changes = _changes_by_kind(config, kinds)
            by_kind = {kind: _LayerHeads(**(sliding._asdict() | changes[kind])) for kind in by_kind}
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
    keys = ("head_dim", "num_key_value_heads")
    if type(per_layer) is not dict or not all(
        str(number).isdigit()
        and int(number) < len(kinds)
        and type(changes) is dict
        and all(key in keys for key in changes)
        for number, changes in per_layer.items()
    ):
        config.fail(f"per_layer_config must have {' and '.join(keys)} by the number of a layer")
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


def _ropes(
    config: ConfigReader, family: Family, heads: Mapping[str, _LayerHeads]
) -> tuple[_Ropes, int]:
    """Return the rope of each kind of layer, and the context length."""
    stored: Any = config.get("rope_parameters")
    of_kinds = {k: stored[k] for k in stored if k in _KINDS} if type(stored) is dict else {}
    local = family.ropes.get("sliding")
    if of_kinds and family.windows == "pattern":
        ropes: dict[str, Rope | None] = {}
        for kind, parameters in of_kinds.items():
            said = {**config.values, "rope_parameters": parameters}
            if local and kind == "sliding_attention":
                said["rope_theta"] = config.number(local, 10_000.0)
            of_kind = replace(config, values=said)
            head_dim = heads[_KINDS[kind]].head_dim
            ropes[_KINDS[kind]], max_position = rope_from_config(of_kind, head_dim)
        if ropes.keys() != {"full", "sliding"}:
            config.fail("rope_parameters must describe full_attention and sliding_attention")
    elif family.heads_by_layer and not config.beyond:
        config.fail("rope_parameters must describe full_attention and sliding_attention")
    else:
        channels = heads["full"].head_dim
        channels += channels % 2 if family.ropes.get("full") == "none" else 0  # none turns
        rope, max_position = rope_from_config(config, channels)
        ropes = {"full": rope, "sliding": rope}
        if sliding := config.beyond.get("sliding_rope"):
            ropes["sliding"] = sliding
        elif local:
            ropes["sliding"] = Rope(config.number(local, 10_000.0), rope.dim)
    return ropes, max_position


def _stands_still(family: Family, window: int | None) -> bool:
    """Return whether positions do not turn queries and keys in layers that see everything."""
    rope = family.ropes.get("full")
    return rope == "none" or (rope == "none beside windows" and bool(window))
