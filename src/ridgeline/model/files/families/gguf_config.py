"""A GGUF file's metadata as a config.json would say it: one reader reads the layers of both.

Facts stay where they are: a family reads them by GGUF's own keys (``gguf.FACTS``). What is made
here is the rest: how many layers there are, and which heads, windows and ropes they have. What no
config.json can say is in ``beyond`` of the config:

    attention_factor, original_max_position  of the rope, whatever its scaling
    divisors, long_divisors                  of the rope, from tensors of the file
    sliding_rope                             the rope of layers with a window
    widths                                   of the feed-forward network of each layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ridgeline.model.files.config import ConfigReader, positive
from ridgeline.model.files.families.attention import check_sharing, kinds_in_turn
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.layers import NO_LIMIT, count_layers
from ridgeline.model.files.families.rope import checked_dim, magnitude
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import Rope

STANDS_STILL = 1e30  # what GGUF files divide the frequency of such a pair by
_POOLINGS = ("", "mean", "cls", "last")  # by their numbers
_LOG_MULTIPLIER, _GROWTH = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
_KV_HEADS, _WIDTH = "attention.head_count_kv", "feed_forward_length"
_EMBEDDING = "token_embd.weight"
# Usual keys to those of GGUF, for messages.
_NAMES = {
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "layers_block_type": _WIDTH,
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": _KV_HEADS,
    "num_kv_shared_layers": "attention.shared_kv_layers",
}
_KINDS = {"full": "full_attention", "sliding": "sliding_attention", "recurrent": "linear_attention"}
_HALVES = {"full": "attention", "recurrent": "mamba", "dense": "mlp", "experts": "moe"}
_Values = dict[str, Any]


class GGUFConfig(NamedTuple):
    """What a GGUF file says of a model.

    Attributes:
        config: its structure, by the keys of a config.json.
        metadata: of which a family reads its facts, with one number where the file lists some.
        overrides: fields of the model that tensors show.
    """

    config: ConfigReader
    metadata: ConfigReader
    overrides: _Values


def config_of_gguf(meta: ConfigReader, family: Family, raw: Mapping[str, Tensor]) -> GGUFConfig:
    """Return the metadata of a file of this family as a config; ``meta`` has its prefix.

    Raises:
        ModelFileError: a value is missing, out of range or not supported.
    """
    if _EMBEDDING not in raw:
        meta.fail(f"tensor {_EMBEDDING!r} is missing")
    overrides = {
        "vocab_size": raw[_EMBEDDING].shape[0],
        "tied_embeddings": "output.weight" not in raw,
        **_pooling(meta),
    }
    num_blocks = count_layers(meta, "block_count")
    guessing = meta.integer("nextn_predict_layers", 0, low=0)  # the last blocks
    if guessing >= num_blocks:
        meta.fail(f"{meta.name('nextn_predict_layers')} is {guessing}, of all blocks")
    num_layers, beyond = num_blocks - guessing, _Values()
    context = meta.integer("context_length")
    said: _Values = {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": guessing,
        "max_position_embeddings": context if family.has_attention else min(context, NO_LIMIT),
    }
    metadata = meta
    if family.layers_are_halves:
        metadata, said["layers_block_type"] = _halves(meta, family, num_layers)
    elif any(name.startswith("latent.") for name in family.facts):
        said["qk_rope_head_dim"] = meta.integer("rope.dimension_count")
        meta.get(_LOG_MULTIPLIER)  # which says nothing without yarn
        _add_rope(said, beyond, meta, raw, said["qk_rope_head_dim"], is_latent=True)
    elif family.has_attention:
        metadata = _add_attention(said, beyond, meta, family, raw)
    for key in {family.dense_layers, family.experts_every} - {""}:
        said[key] = meta.get(key)
    values = {meta.prefix + key: value for key, value in said.items()}
    config = replace(meta, values=values, read_keys=set(), names=_NAMES, beyond=beyond)
    return GGUFConfig(config, metadata, overrides)


def _pooling(meta: ConfigReader) -> _Values:
    if meta.get("pooling_type") is None:
        return {}
    number = meta.integer("pooling_type", low=0)
    if number >= len(_POOLINGS):
        meta.fail(f"{meta.name('pooling_type')} is {number}: supported are 0 to 3, no ranks")
    return {"pooling": _POOLINGS[number]}


def _with(meta: ConfigReader, values: _Values) -> ConfigReader:
    """Return metadata with other values of some keys."""
    changed = {meta.prefix + key: value for key, value in values.items()}
    return replace(meta, values={**meta.values, **changed})


def _halves(meta: ConfigReader, family: Family, num_layers: int) -> tuple[ConfigReader, list[str]]:
    """Return metadata with one number where the file has one for each half, and what each is.

    A half has heads, or a width, or neither: then it keeps a state.
    """
    heads, widths = (
        _by_layer(meta, key, meta.integer("block_count"))[:num_layers]
        for key in (_KV_HEADS, _WIDTH)
    )
    network = "experts" if family.has_experts else "dense"
    names = [
        _HALVES[network if width else "full" if head else "recurrent"]
        for head, width in zip(heads, widths, strict=True)
    ]
    return _with(meta, {_KV_HEADS: max(heads), _WIDTH: max(widths)}), names


def _by_layer(meta: ConfigReader, key: str, count: int, most: int = 1) -> list[int]:
    """Return a list of ``count`` numbers, of which ``most`` differ, beside 0."""
    stored: Any = meta.get(key)
    numbers = [int(value) for value in stored] if isinstance(stored, np.ndarray | list) else []
    if len(numbers) != count or len({*numbers} - {0}) > most or min(numbers, default=0) < 0:
        meta.fail(f"{meta.name(key)} must have one number, or 0, for each of the layers")
    return numbers


def _add_attention(
    said: _Values, beyond: _Values, meta: ConfigReader, family: Family, raw: Mapping[str, Tensor]
) -> ConfigReader:
    """Add what the file says of attention; return metadata with one width."""
    num_layers = said["num_hidden_layers"]
    num_heads, hidden_size = (meta.integer(k) for k in ("attention.head_count", "embedding_length"))
    metadata = meta
    if sizes := _widths(meta, num_layers):
        metadata, beyond["widths"] = _with(meta, {_WIDTH: sizes[0]}), sizes
    window = 0
    if family.windows != "none":
        window = meta.integer("attention.sliding_window", family.default_window, low=0)
        said["sliding_window"] = window
    kinds: list[str] = []
    if family.windows == "pattern":
        kinds = ["full"] * num_layers
        if window:
            key = "attention.sliding_window_pattern"
            kinds = kinds_in_turn(meta, key, family, num_layers)
    kv_heads = _kv_heads(meta, family, num_heads, num_layers)
    check_sharing(meta, num_heads, kv_heads)
    if family.attention_layers:
        said[family.attention_layers] = meta.get(family.attention_layers)
    elif family.recurrent and not family.parallel_mixer:
        kinds = ["full" if number else "recurrent" for number in kv_heads]
    elif 0 in kv_heads:
        meta.fail(f"{meta.name(_KV_HEADS)} has layers without attention")
    if kinds:
        said["layer_types"] = [_KINDS[kind] for kind in kinds]
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    _check_values(meta, "attention.value_length", head_dim)
    said |= {
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "num_key_value_heads": max(kv_heads),
        "num_kv_shared_layers": meta.get("attention.shared_kv_layers"),
    }
    if family.heads_by_layer:
        said |= _heads_by_layer(meta, family, kinds, kv_heads, head_dim, raw)
    dim = _add_rope(said, beyond, meta, raw, head_dim)
    if base := family.ropes.get("sliding"):
        default = float(base) if base.isdigit() else meta.number(base, 10_000.0)
        if family.heads_by_layer:
            dim = meta.integer("rope.dimension_count_swa", dim)
            checked_dim(meta, dim, said["head_dim"])
        beyond["sliding_rope"] = Rope(meta.number("rope.freq_base_swa", default), dim)
    return metadata


def _kv_heads(meta: ConfigReader, family: Family, num_heads: int, num_layers: int) -> list[int]:
    """Return each layer's key and value heads; if the family says no more, one number or none."""
    if isinstance(meta.get(_KV_HEADS), np.ndarray | list):
        return _by_layer(meta, _KV_HEADS, num_layers, most=2 if family.heads_by_layer else 1)
    return [meta.integer(_KV_HEADS, num_heads)] * num_layers


def _heads_by_layer(
    meta: ConfigReader,
    family: Family,
    kinds: Sequence[str],
    kv_heads: Sequence[int],
    head_dim: int,
    raw: Mapping[str, Tensor],
) -> _Values:
    """Return the heads of layers with a window, and for each of the others what is its own.

    ``head_dim`` is that of the others. Whether their keys are their values is shown by tensors.
    """
    sliding_dim = meta.integer("attention.key_length_swa", head_dim)
    _check_values(meta, "attention.value_length_swa", sliding_dim)
    own = len(kinds) - meta.integer("attention.shared_kv_layers", 0, low=0)
    numbers, lack_values = dict[str, int](), dict[str, bool]()
    for kind in ("full", "sliding"):
        layers = [i for i, name in enumerate(kinds) if name == kind]
        names = (f"{family.prefix.format(i)}{family.layer['v']}" for i in layers if i < own)
        has_values = {name in raw for name in names}
        if len({kv_heads[i] for i in layers}) > 1 or len(has_values) > 1:
            meta.fail("layers of one kind differ in their heads, which is not supported")
        numbers[kind] = kv_heads[layers[0]] if layers else max(kv_heads)
        lack_values[kind] = False in has_values
    full = {"head_dim": head_dim, "num_key_value_heads": numbers["full"]}
    return {
        "head_dim": sliding_dim,
        "num_key_value_heads": numbers["sliding"],
        "attention_k_eq_v": lack_values["full"],
        "per_layer_config": {str(i): full for i, kind in enumerate(kinds) if kind == "full"},
    }


def _check_values(meta: ConfigReader, key: str, head_dim: int) -> None:
    if meta.integer(key, head_dim) != head_dim:
        meta.fail(f"{meta.name(key)} differs from key_length, which is not supported")


def _widths(meta: ConfigReader, num_layers: int) -> list[int]:
    """Return the width of each layer's feed-forward network, if the file has a list."""
    stored = meta.get(_WIDTH)
    if not isinstance(stored, np.ndarray | list):
        return []
    widths = [int(value) for value in stored]
    if len(widths) != num_layers or min(widths) < 1:
        meta.fail(f"{meta.name(_WIDTH)} must have a width for each of the layers")
    return widths


def _add_rope(
    said: _Values,
    beyond: _Values,
    meta: ConfigReader,
    raw: Mapping[str, Tensor],
    head_dim: int,
    *,
    is_latent: bool = False,
) -> int:
    """Add how positions turn; return how many channels do. Of latents scores are scaled apart."""
    dim = checked_dim(meta, meta.integer("rope.dimension_count", head_dim), head_dim)
    context = said["max_position_embeddings"]
    original = meta.integer("rope.scaling.original_context_length", context, low=2)
    attention_factor = meta.number("rope.scaling.attn_factor", 1.0)
    theta = meta.number("rope.freq_base", 10_000.0)
    scaling: _Values = {"rope_theta": theta, "original_max_position_embeddings": original}
    if "rope_factors_short.weight" in raw or "rope_factors_long.weight" in raw:
        for name, key in (("short", "divisors"), ("long", "long_divisors")):
            beyond[key] = _factors(meta, raw, f"rope_factors_{name}.weight", dim)
    else:
        scaling |= _scaling(meta, is_latent=is_latent)
        if scaling["rope_type"] == "yarn" and not is_latent:
            factor = scaling["factor"]
            attention_factor *= magnitude(factor)
            if meta.get(_LOG_MULTIPLIER):
                attention_factor /= magnitude(factor, meta.number(_LOG_MULTIPLIER))
        if "rope_freqs.weight" in raw:
            beyond["divisors"] = _factors(meta, raw, "rope_freqs.weight", dim)
    beyond |= {"attention_factor": attention_factor, "original_max_position": original}
    said |= {"rotary_dim": dim, "rope_parameters": scaling}
    return dim


def _scaling(meta: ConfigReader, *, is_latent: bool) -> _Values:
    """Return the scaling that metadata describe, with the names of a config.json."""
    kind = meta.text("rope.scaling.type", "linear")
    # An absent factor is written as 0 by some converters.
    stored_factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0
    factor = ConfigReader({"rope.scaling.factor": stored_factor}, meta.where).number(
        "rope.scaling.factor"
    )
    if kind == "longrope":
        meta.fail("rope scaling 'longrope' needs its factors: rope_factors_long.weight is missing")
    if kind not in ("none", "linear", "yarn"):
        meta.fail(
            f"rope scaling {kind!r} is not supported; supported: none, linear, yarn, longrope"
        )
    growth = meta.number(_GROWTH) if meta.get(_GROWTH) else None
    if growth and kind != "yarn":
        meta.fail(f"{meta.name(_GROWTH)} without yarn is not supported")
    if kind != "yarn":
        return {"rope_type": "linear" if kind == "linear" and factor != 1.0 else "default",
                "factor": factor}  # fmt: skip
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": meta.flag("rope.scaling.yarn_truncate", True),
        "llama_4_scaling_beta": growth,
    }
    if is_latent:  # these files keep a tenth of it
        scaling["factor"] = meta.number("rope.scaling.factor")
        if meta.get(_LOG_MULTIPLIER):
            scaling["mscale_all_dim"] = 10.0 * meta.number(_LOG_MULTIPLIER)
    return scaling


def _factors(
    meta: ConfigReader, raw: Mapping[str, Tensor], name: str, dim: int
) -> tuple[float, ...]:
    """Return the divisors that a file keeps as a tensor."""
    if name not in raw or raw[name].shape != (dim // 2,):
        shape = raw[name].shape if name in raw else "no such tensor"
        meta.fail(f"tensor {name!r}: found {shape}, wanted shape {(dim // 2,)}")
    factors = raw[name].to_f32().tolist()
    turning = [1.0 if value >= STANDS_STILL else value for value in factors]
    divisors = positive(turning, f"{meta.where}: tensor {name!r}")
    return tuple(
        math.inf if value >= STANDS_STILL else divisor
        for value, divisor in zip(factors, divisors, strict=True)
    )
