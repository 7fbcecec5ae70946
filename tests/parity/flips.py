"""Other legal values of each key of a config, by the key's name and type: what is flipped in turn.

The last flip of each key leaves it out, and transformers takes its default.

One table of kinds of keys serves every family, so that a new key of an old kind needs no line here.
It knows nothing of the models that are made of the configs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

ORIGINAL = 64  # tokens, the context before a rope was stretched
_WINDOW = 24


LEFT_OUT = "left out"


class Flip(NamedTuple):
    """Another value of one key, or none.

    ``changes`` is what the config is told instead of its own; ``absent`` names the keys that
    config.json then lacks, each as the way to it through objects.
    """

    key: str
    value: Any
    changes: Mapping[str, Any]
    absent: tuple[tuple[str, ...], ...] = ()


def flips(config: Any, known: frozenset[str]) -> Iterator[Flip]:
    """Yield every flip of a config of transformers; keys in ``known`` are left as they are."""
    harmless: dict[str, Any] = {}
    unsaid: dict[str, Any] = {}
    all_fields, config = dataclasses.fields(config), SimpleNamespace(**_plain(config))
    for one in all_fields:
        if one.name in known:
            continue
        value = getattr(config, one.name, None)
        if one.name == "rope_parameters":
            yield from _rope_flips(value, config)
            continue
        if dataclasses.is_dataclass(value):
            yield from _inner_flips(one.name, value, known)
            continue
        others = _others(one.name, value, _types(one.type), config)
        if re.search(_HARMLESS, one.name):
            unsaid[one.name] = _default(one)
            if others:
                harmless[one.name] = others[0]
            continue
        for other in others:
            yield Flip(one.name, other, {one.name: other} | _beside(one.name, other, config))
        default = _default(one)
        changes = {one.name: default} | _beside(one.name, default, config)
        yield Flip(one.name, LEFT_OUT, changes, ((one.name,),))
    if harmless:
        yield Flip(", ".join(harmless), tuple(harmless.values()), harmless)
    if unsaid:
        yield Flip(", ".join(unsaid), LEFT_OUT, unsaid, tuple((name,) for name in unsaid))


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return what a config takes for a key that is not said."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _inner_flips(key: str, inner: Any, known: frozenset[str]) -> Iterator[Flip]:
    """Yield the flips of an object within a config, as MPT has one of its attention."""
    for flip in flips(inner, known):
        absent = tuple((key, *way) for way in flip.absent)
        yield Flip(f"{key}.{flip.key}", flip.value, {key: _plain(inner) | {**flip.changes}}, absent)


def _plain(inner: Any) -> dict[str, Any]:
    """Return the values of all fields; Gemma 4's differ by layer, and are those of most."""
    inner = deepcopy(inner)
    inner.allow_global_per_layer_attribute_access = True
    return {one.name: getattr(inner, one.name) for one in dataclasses.fields(inner)}


def _types(annotation: Any) -> frozenset[str]:
    """Return the names of the plain types that a field may have."""
    parts = get_args(annotation) or (annotation,)
    names = {getattr(part, "__name__", str(part)) for part in parts}
    return frozenset(names | {f"{name}?" for name in names if "NoneType" in names})


def _others(key: str, value: Any, types: frozenset[str], config: Any) -> list[Any]:
    """Return other legal values of a key; transformers may still refuse some beside other keys."""
    if key in _WORDS:
        found: Sequence[Any] = _WORDS[key]
    elif key in _KINDS_OF_LAYERS and isinstance(value, list | tuple):
        found = _orders(list(value), config)
    elif isinstance(value, list | tuple):
        found = _other_lists(list(value))
    elif isinstance(value, bool) or (value is None and "bool" in types):
        found = (True, False)
    elif isinstance(value, str) or (value is None and types & {"str"} and "int" not in types):
        found = ACTIVATIONS if re.search("act(ivation)?(_f|$)|_act$", key) else ()
    else:
        found = _numbers(key, value, types, config)
    others: list[Any] = []
    for other in found:
        if other != value and other not in others:
            others.append(other)
    if value is not None and "NoneType" in types:
        others.append(None)
    return others


# Keys of training, of sampling and of other tasks: flipped all at once. Not the padding's, from
# which RoBERTa counts positions.
_HARMLESS = (
    "dropout|pdrop|layerdrop|initializer|init_std|init_device|_coef|z_loss"
    "|(?<!^pad)_token_id$|use_cache"
    "|^summary|pretraining_tp|output_router|^num_logits_to_keep|rescale_prenorm|use_mamba_kernels"
)
ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu",
    "relu2", "leaky_relu", "linear", "mish", "sigmoid", "tanh",
)  # fmt: skip
_WORDS: dict[str, tuple[Any, ...]] = {
    "pad_token_id": (5,),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "position_embedding_type": ("rope", "nope", "absolute", "relative_key"),
    "scoring_func": ("softmax", "sigmoid"),
    "norm_type": ("layer_norm", "low_precision_layernorm", "rms_norm"),
    "time_step_limit": ((0.0, 0.5), (0.3, 2.0), (0.0, float("inf"))),
    "use_bidirectional_attention": (True, False, "all", "vision"),
    "mamba_ssm_cache_dtype": ("float32", "bfloat16"),
    "query_pre_attn_scalar": (1, 17, 224, 256),
    "init_device": ("cpu", "meta"),
    "logit_scale": (0.03, 0.7, 1.0, 2.5, "inv_sqrt_d_model"),
    "time_step_rank": (2, 16),
    "sliding_window_pattern": (2, 3, "LLG", "LG"),
    "attn_type": ("multihead_attention", "multiquery_attention"),
    "classifier_pooling": ("cls", "mean"),
    "mlp_only_layers": ((), [0], [1], [0, 1]),
    "expand": (1, 2, 4),
    "mamba_expand": (1, 2, 4),
    "clip_qkv": (0.5, 8.0),
}
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "mtp_layers_block_type")


def _orders(kinds: list[str], config: Any) -> list[list[str]]:
    """Return odd orders of kinds of layers: backwards, in twos, one in the middle, all of one."""
    known = list(dict.fromkeys(kinds))
    if set(known) <= {"full_attention", "sliding_attention"} and hasattr(config, "sliding_window"):
        known = ["sliding_attention", "full_attention"]
    count = len(kinds)
    orders = [kinds[::-1], kinds[1:] + kinds[:1]]
    orders += [[known[i // step % len(known)] for i in range(count)] for step in (1, 2, 3)]
    for one in known:
        others = [kind for kind in known if kind != one] or known
        orders += [
            [one] * count,
            [others[0], *[one] * (count - 1)],
            [*[one] * (count - 1), others[-1]],
        ]
    return orders


def _other_lists(value: list[Any]) -> list[list[Any]]:
    """Return lists of as many and of fewer items: numbers of layers, flags, multipliers."""
    if all(type(item) is int and item in (0, 1) for item in value):
        return [value[::-1], [1 - item for item in value], [1] * len(value), [0] * len(value)]
    if all(type(item) is int for item in value):
        return [value[:1], value[-1:], [item - 1 for item in value if item]]
    return [value[::-1], [item * 1.3 for item in value], [1.0] * len(value)]


def _numbers(key: str, value: Any, types: frozenset[str], config: Any) -> list[Any]:
    for pattern, others in _KINDS:
        if re.search(pattern, key):
            found = others(value, config)
            break
    else:
        found = (
            _counts(value or 1, config) if "float" not in types else _scales(value or 1.0, config)
        )
    only_whole = "float" not in types
    return [other for other in found if not (only_whole and isinstance(other, float))]


def _counts(value: Any, config: Any) -> list[Any]:
    return [value + 1, max(value - 1, 1), value * 2, max(value // 2, 1)]


def _scales(value: Any, config: Any) -> list[Any]:
    value = value or 1.0
    return [value * 1.7, value * 0.4, 1.0]


def _sizes(value: Any, config: Any) -> list[Any]:
    return [value * 2, value // 2, value + (32 if value >= 64 else 8)] if value else [16, 32]


# The first pattern that a key has decides; each gives numbers for a value, 0 if there is none.
_KINDS: tuple[tuple[str, Callable[[Any, Any], list[Any]]], ...] = (
    ("_token_id$", lambda value, config: [5, 6]),
    ("dropout|pdrop|layerdrop|initializer|init_std|_coef|z_loss", lambda value, config: [0.3, 0.0]),
    ("jitter", lambda value, config: [0.3, 0.05, 0.0]),
    ("softcap", lambda value, config: [1.5, 50.0]),
    ("eps(ilon)?$", lambda value, config: [1e-2, 1e-5, 1e-6, 1e-12]),
    ("time_step_(min|max|floor)", lambda value, config: [1e-30, 1e-4, 0.3, 2.0]),
    ("window$|local_attention", lambda value, config: [1, 5, 48, 500]),
    ("theta|base$", lambda value, config: [500.0, 1e6]),
    ("original_max_position", lambda value, config: [32, 100]),
    ("max_position|n_positions|max_seq_len|seq_length", lambda value, config: [300, 2048]),
    ("per_tok|top_k|moe_k$", lambda value, config: [1, 2, 3, (value or 0) + 1]),
    ("topk_group|n_group$|num_ln_in|num_dense_layers", lambda value, config: [1, 2, 3]),
    ("heads?$|_heads_", lambda value, config: [1, 2, 4, 8]),
    ("factor|multiplier|scal|alpha|limit", _scales),
    ("size|dim|rank|width|d_model|n_embd|n_inner|d_state|d_head|d_ssm", _sizes),
)


def _beside(key: str, other: Any, config: Any) -> dict[str, Any]:
    """Return what else must change for a value to mean something."""
    beside: dict[str, Any] = {}
    slides = key == "layer_types" and "sliding_attention" in (other or ())
    if slides and not getattr(config, "sliding_window", _WINDOW):  # ModernBERT names it otherwise
        beside["sliding_window"] = _WINDOW
    if key in ("num_hidden_layers", "n_layer", "n_layers"):
        beside |= {one: None for one in _KINDS_OF_LAYERS if getattr(config, one, None)}
    if key == "layers_block_type" and other is None and hasattr(config, "mlp_bias"):
        beside["mlp_bias"] = False  # the layers are Nemotron-H's own then, some of experts
    if key == "use_sliding_window" and other:
        beside |= {"sliding_window": _WINDOW, "layer_types": None, "max_window_layers": 1}
    if key in ("sliding_window", "max_window_layers") and hasattr(config, "max_window_layers"):
        beside |= {"use_sliding_window": True, "layer_types": None}
        if key == "max_window_layers":
            beside["sliding_window"] = _WINDOW
    if key in ("n_group", "topk_group") and getattr(config, "topk_method", None):
        beside["topk_method"] = "group_limited_greedy"
    return beside


def _rope_flips(rope: Any, config: Any) -> Iterator[Flip]:
    """Yield every kind of rope, and every number of each kind, in place of a config's own."""
    if not isinstance(rope, Mapping):
        return
    plain = {key: dict(value) for key, value in rope.items() if isinstance(value, Mapping)}
    for kind in plain or ("",):
        own = plain[kind] if kind else dict(rope)
        base = own | {"rope_theta": own.get("rope_theta", 10_000.0)}
        for key, value, other in _ropes(base, config):
            name = f"rope_parameters.{kind}.{key}" if kind else f"rope_parameters.{key}"
            wanted = deepcopy(plain) | {kind: other} if kind else other
            yield Flip(name, value, {"rope_parameters": wanted})
        for key in own:
            name = f"rope_parameters.{kind}.{key}" if kind else f"rope_parameters.{key}"
            other = {one: number for one, number in own.items() if one != key}
            wanted = deepcopy(plain) | {kind: other} if kind else other
            yield Flip(name, LEFT_OUT, {"rope_parameters": wanted}, (tuple(name.split(".")),))
    yield Flip("rope_parameters", LEFT_OUT, {"rope_parameters": None}, (("rope_parameters",),))


def _ropes(own: dict[str, Any], config: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    share = own.get("partial_rotary_factor", 1.0)
    half = int(head_dim * share) // 2
    theta = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 3.0},
        "dynamic": {"factor": 3.0, "original_max_position_embeddings": ORIGINAL},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "yarn": {
            "factor": 5.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 4.0,
            "beta_slow": 0.25,
        },
        "longrope": {
            "factor": 5.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0 + 0.1 * i for i in range(half)],
            "long_factor": [1.2 + 0.7 * i for i in range(half)],
        },
    }
    for kind, numbers in kinds.items():
        base = {"rope_type": kind, **theta, **numbers}
        yield "rope_type", kind, base
        for key, values in _OF_ROPE.items():
            if kind in values:
                for value in values[kind]:
                    changed = base | ({"mscale": 1.3} if key == "mscale_all_dim" else {})
                    yield key, f"{kind}: {value}", changed | {key: value}
    for key, values in (("rope_theta", (500.0, 1e6)), ("partial_rotary_factor", (0.25, 0.5, 1.0))):
        for value in values:
            yield key, value, own | {key: value}


# What each kind of rope may say, and other values of it.
_OF_ROPE: dict[str, dict[str, tuple[Any, ...]]] = {
    "factor": {"linear": (1.0, 7.5), "llama3": (2.0,), "yarn": (1.0, 20.0), "longrope": (2.0,)},
    "original_max_position_embeddings": {"llama3": (32,), "yarn": (32, 100), "longrope": (100,)},
    "low_freq_factor": {"llama3": (0.5,)},
    "high_freq_factor": {"llama3": (9.0,)},
    "attention_factor": {"yarn": (1.0, 1.4), "longrope": (1.0, 1.4)},
    "beta_fast": {"yarn": (32.0, 2.0)},
    "beta_slow": {"yarn": (1.0, 0.1)},
    "mscale": {"yarn": (0.7, 1.0)},
    "mscale_all_dim": {"yarn": (0.7, 1.3, 0.0)},
    "truncate": {"yarn": (False, True)},
    "llama_4_scaling_beta": {"default": (0.3,), "yarn": (0.3,)},
    "alpha": {"dynamic": (20.0,)},
    "mrope_section": {"default": ([1, 1, 0],)},
}
