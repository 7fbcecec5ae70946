"""The layers of a model, from its file: what each sees, and how its positions turn.

It knows the keys that files of all families have in common; what differs is in a ``Family``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family, Parts
from ridgeline.model.files.families.half_layers import Halves, halves_of_config
from ridgeline.model.files.families.layer_overrides import (
    LayerHeads,
    dense_layers,
    layer_heads,
    widened,
    with_shared,
)
from ridgeline.model.files.rope.scaling import rope_from_config, yarn_score_factor
from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, Rope
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm

_MAX_LAYERS = 4096
NO_LIMIT = 1 << 15  # tokens, where no position counts and the config names no length
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
_RECURRENT_KINDS = dict.fromkeys(("conv", "linear_attention", "mamba"), "recurrent")
_RECURRENT_KINDS |= {"attention": "full"}
GUESSING = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MIXERS = {"conv": Conv, "delta": Delta, "ssm": Ssm}
_Ropes = Mapping[str, Rope | None]  # by kind of layer: "full" or "sliding"


def layers_from_config(
    config: ConfigReader, family: Family, parts: Parts
) -> tuple[tuple[Layer, ...], int]:
    """Return the layers that a config describes, and the context length in tokens.

    ``parts`` are the facts that the family reads of the same file.

    Raises:
        ModelFileError: a value is missing, out of range or not supported.
    """
    if family.by_halves:
        halves = _of_halves(config, family, parts, halves_of_config(config))
        return halves, config.integer("max_position_embeddings", NO_LIMIT)
    num_layers = count_layers(config, "num_hidden_layers")
    if not family.has_attention:
        layer = Layer(_recurrent(config, family, parts), Mlp(**parts["ffn"]), **parts["layer"])
        return (layer,) * num_layers, config.integer("max_position_embeddings", NO_LIMIT)
    if parts["latent"]:
        rope, max_position = rope_from_config(config, config.integer("qk_rope_head_dim"))
        config.get("head_dim")  # of newer files: what turns
        scaled = rope, yarn_score_factor(config)
        return _latent_layers(config, family, parts, scaled, num_layers), max_position
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
    by_kind = layer_heads(config, family, kinds, heads, LayerHeads(kv_heads, head_dim))
    ropes, max_position = _ropes(config, family, by_kind)
    if _stands_still(family, window):
        ropes = {**ropes, "full": None}
    mixer = _without_doubles(mixer, family)
    attentions = {
        kind: Attention(heads, rope=None, **of_kind._asdict(), **mixer)
        for kind, of_kind in by_kind.items()
    }
    max_position = context_end(parts, max_position)
    layers = _layers(config, family, parts, attentions, kinds, window, ropes)
    layers = with_shared(config, "num_kv_shared_layers", layers)
    if family.heads_by_layer and config.flag("use_double_wide_mlp", False):
        size = 2 * config.integer("intermediate_size")
        layers = [
            layer if layer.known_attention.kv_of is None else widened(layer, size)
            for layer in layers
        ]
    if sizes := config.beyond.get("widths"):
        layers = list(map(widened, layers, sizes))
    return _each_once(layers), max_position


def _latent_layers(
    config: ConfigReader,
    family: Family,
    parts: Parts,
    scaled: tuple[Rope, float],
    num_layers: int,
) -> tuple[Layer, ...]:
    """Return layers with latent attention.

    ``scaled`` is the rope and what multiplies scores, beside the root of a head's channels.
    """
    (rope, factor), mixer = scaled, parts["mixer"]
    head_dim = mixer["head_dim"]
    if rope.query_growth:
        config.fail("queries that grow with the position are not supported in latent attention")
    if head_dim <= rope.dim:
        config.fail(f"heads of {head_dim} channels of which {rope.dim} turn have none to absorb")
    one = Attention(
        num_kv_heads=1,
        rope=rope,
        scale=head_dim**-0.5 * factor,
        latent=Latent(nope_dim=head_dim - rope.dim, **parts["latent"]),
        **mixer,
    )
    networks = _networks(config, family, parts, num_layers)
    return _each_once([Layer(one, ffn, **parts["layer"]) for ffn in networks])


def _of_halves(
    config: ConfigReader, family: Family, parts: Parts, halves: Sequence[Halves]
) -> tuple[Layer, ...]:
    """Return layers of these halves; positions turn nothing."""
    mixer = parts["mixer"]
    if mixer["num_heads"] % mixer["num_kv_heads"]:
        config.fail("{num_heads} heads cannot share {num_kv_heads} key and value heads evenly"
                   .format_map(mixer))  # fmt: skip
    mixers = {"full": Attention(rope=None, **mixer), "recurrent": _recurrent(config, family, parts)}
    networks: dict[str, Mlp | Experts] = {"": Mlp(0)}
    for name in {half.network for half in halves if half.network}:
        is_plain = name == "dense" and family.has_experts
        plain = Mlp(**parts["dense"]) if is_plain else None
        networks[name] = plain or _feed_forward(config, family, parts)
    return _each_once([Layer(mixers[one.mixer], networks[one.network]) for one in halves])


def _layers(
    config: ConfigReader,
    family: Family,
    parts: Parts,
    attentions: Mapping[str, Attention],
    kinds: list[str],
    window: int | None,
    ropes: _Ropes,
) -> list[Layer]:
    """Return the layers; ``attentions`` has that of each kind but for window and rope."""
    turning = _no_rope_layers(config, family, parts, len(kinds))
    networks = _networks(config, family, parts, len(kinds))
    layers = []
    for kind, turns, ffn in zip(kinds, turning, networks, strict=True):
        mixer: Attention | Recurrent
        if kind == "recurrent":
            mixer = _recurrent(config, family, parts)
        else:
            rope = ropes[kind] if turns else None
            seen = window if kind == "sliding" else None
            mixer = replace(attentions[kind], window=seen, rope=rope)
            if mixer.norm_turned and not (rope and mixer.qk_norm):  # it stands behind rope
                mixer = replace(mixer, qk_norm="", norm_turned=False)
        beside = _recurrent(config, family, parts) if family.beside else None
        layers.append(Layer(mixer, ffn, beside=beside, **parts["layer"]))
    if family.first_norms:
        layers[0] = replace(layers[0], norms=family.first_norms)
    return layers


def _networks(
    config: ConfigReader, family: Family, parts: Parts, num_layers: int
) -> list[Mlp | Experts]:
    """Return each layer's feed-forward network: experts, but where the file says a dense one."""
    ffn = _feed_forward(config, family, parts)
    dense = dense_layers(config, family, num_layers)
    if not any(dense):
        return [ffn] * num_layers
    plain = Mlp(**parts["dense"])
    return [plain if is_dense else ffn for is_dense in dense]


def _feed_forward(config: ConfigReader, family: Family, parts: Parts) -> Mlp | Experts:
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


def _each_once(layers: list[Layer]) -> tuple[Layer, ...]:
    """Return the layers; equal ones are the same object."""
    made: dict[Layer, Layer] = {}
    return tuple(made.setdefault(layer, layer) for layer in layers)


def _recurrent(config: ConfigReader, family: Family, parts: Parts) -> Recurrent:
    """Return what keeps a state. Raises ModelFileError if its heads do not fit together."""
    mixer: Recurrent = _MIXERS[family.recurrent](**parts["recurrent"])
    match mixer:
        case Delta():
            heads, shared = mixer.num_value_heads, mixer.num_key_heads
        case Ssm():
            heads, shared = mixer.num_heads, mixer.num_groups
        case Conv():
            heads = shared = 1
    if heads % shared:
        config.fail(f"{heads} heads with a state cannot share {shared} of what feeds them evenly")
    return mixer


def _without_doubles(mixer: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the facts of attention: projections that always have a bias share it with no key."""
    if mixer.get("qkv_bias") is True and "mixer.o_bias" not in family.facts:
        mixer["o_bias"] = False
    return mixer


def count_layers(config: ConfigReader, key: str, default: int | None = None) -> int:
    """Return a number of layers. Raises ModelFileError for one that no model has."""
    num_layers = config.integer(key, default, low=1 if default is None else default)
    if num_layers > _MAX_LAYERS:
        config.fail(f"{config.name(key)} is {num_layers}, more than {_MAX_LAYERS}")
    return num_layers


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
    known = _KINDS | (_RECURRENT_KINDS if family.recurrent else {})
    if "chunk.size" in family.facts:  # the context ends with the first chunk
        known |= {"chunked_attention": "full"}
    if kinds is not None:
        if (
            type(kinds) is not list
            or len(kinds) != num_layers
            or any(k not in known for k in kinds)
        ):
            config.fail(f"layer_types must name one of {', '.join(known)} for each of the layers")
        if window is None and "sliding_attention" in kinds and config.get("sliding_window") == 0:
            config.fail("layer_types has sliding_attention, and sliding_window is 0")
        config.get(family.attention_layers)  # the same in other words
        if family.windows == "pattern":  # as well: transformers 5 saves both, and goes by the kinds
            config.get("sliding_window_pattern")
        return [known[kind] for kind in kinds], window
    if family.attention_layers:
        return _attention_layers(config, family, num_layers), window
    if family.windows == "pattern":
        return kinds_in_turn(config, "sliding_window_pattern", family, num_layers), window
    windowed = window and family.windows != "named"
    return ["sliding" if i >= first and windowed else "full" for i in range(num_layers)], window


def context_end(parts: Parts, num_tokens: int) -> int:
    """Return the context length, which ends where layers would see chunks or queries would grow."""
    limits = parts["chunk"]
    return min(num_tokens, limits["size"], limits["grows_at"] - 1) if limits else num_tokens


def num_guessing(config: ConfigReader) -> int:
    """Return how many layers behind the others guess tokens ahead: no answer needs them.

    Raises ModelFileError for a number that no model has.
    """
    said = replace(config, seen=set())  # not every family may have them
    return max(count_layers(said, key, 0) for key in GUESSING)


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


def _ropes(
    config: ConfigReader, family: Family, heads: Mapping[str, LayerHeads]
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


def _no_rope_layers(
    config: ConfigReader, family: Family, parts: Parts, num_layers: int
) -> list[bool]:
    """Return which layers turn queries and keys at all: SmolLM3's list has 1 for those that do."""
    if "no_rope_layers" not in family.ropes:
        return [parts["rope"].get("turns", True)] * num_layers
    every = config.integer("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers")
    if flags in (None, []):
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if type(flags) is not list or len(flags) != num_layers or any(v not in (0, 1) for v in flags):
        config.fail("no_rope_layers must have 0 or 1 for each of the layers")
    return [bool(value) for value in flags]
