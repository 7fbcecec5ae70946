"""The layers of a model, and the model that they make, from a config and its family's facts.

It knows the keys that files of all families have in common; what differs is in a ``Family``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.attention import LayerKinds, layer_kinds
from ridgeline.model.files.families.family import Family, Parts
from ridgeline.model.files.families.rope import rope_from_config, yarn_score_factor
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, ModelArch, Rope
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm

_MAX_LAYERS = 4096
NO_LIMIT = 1 << 15  # tokens, where no position counts and the config names no length
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MIXERS = {"conv": Conv, "delta": Delta, "ssm": Ssm}
_LETTERS = {"M": "recurrent", "*": "full", "-": "dense", "E": "experts"}
_NAMES = {
    "attention": "full", "full_attention": "full", "linear_attention": "recurrent",
    "mamba": "recurrent", "mlp": "dense", "moe": "experts",
}  # fmt: skip
_MIXER_HALVES = ("recurrent", "full")


def arch_of(
    config: ConfigReader, family: Family, parts: Parts, raw: Mapping[str, Tensor], **overrides: Any
) -> ModelArch:
    """Return the model that a config describes, with the facts that its family reads.

    ``overrides`` are fields of the model that are known without either.

    Raises:
        ModelFileError: something is missing or out of range.
    """
    layers, max_position = _layers_from_config(config, family, parts)
    overrides = {"max_position": max_position, "num_guessing": _num_guessing(config)} | overrides
    if "positions" in family.outer:
        in_file = family.outer["positions"]
        if in_file not in raw:
            config.fail(f"tensor {in_file!r} is missing")
        num_rows = raw[in_file].shape[0]
        overrides |= {"position_rows": num_rows * family.num_segments}
        overrides |= {"num_segments": family.num_segments}
    fields = parts[""] | overrides
    if not fields.get("has_head", True):
        fields["head_bias"] = False
    if "positions" in family.outer:
        longest = num_rows - fields.get("position_offset", 0)
        fields["max_position"] = min(fields["max_position"], longest)
    chunk = parts["chunk"].get("size", 0)
    arch = ModelArch(layers=layers, chunk=chunk, **fields)
    if "layer.input_size" in family.facts:
        num_rows = config.get("vocab_size_per_layer_input")
        if arch.input_size and num_rows not in (None, arch.vocab_size):
            config.fail(
                "vocab_size_per_layer_input differs from vocab_size, which is not supported"
            )
    return arch


def _layers_from_config(
    config: ConfigReader, family: Family, parts: Parts
) -> tuple[tuple[Layer, ...], int]:
    """Return the layers that a config describes, and the context length in tokens."""
    if family.layers_are_halves:
        halves = _of_halves(config, family, parts, _halves_of_config(config))
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
    kinds = layer_kinds(config, family, parts, num_layers)
    if limits := parts["chunk"]:  # layers would see chunks, or queries would grow
        chunks = min(limits["size"], limits["grows_at"] - 1)
        kinds = kinds._replace(max_position=min(kinds.max_position, chunks))
    layers = _with_shared(config, _layers(config, family, parts, kinds))
    if family.heads_by_layer and config.flag("use_double_wide_mlp", False):
        size = 2 * config.integer("intermediate_size")
        layers = [
            layer if layer.known_attention.kv_of is None else _widened(layer, size)
            for layer in layers
        ]
    if sizes := config.beyond.get("widths"):
        layers = list(map(_widened, layers, sizes))
    return _each_once(layers), kinds.max_position


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


def _layers(config: ConfigReader, family: Family, parts: Parts, kinds: LayerKinds) -> list[Layer]:
    """Return the layers of these kinds."""
    num_layers = len(kinds.kinds)
    turning = _no_rope_layers(config, family, parts, num_layers)
    of_layers = _networks(config, family, parts, num_layers)
    layers = []
    for kind, turns, ffn in zip(kinds.kinds, turning, of_layers, strict=True):
        mixer: Attention | Recurrent
        if kind == "recurrent":
            mixer = _recurrent(config, family, parts)
        else:
            mixer = kinds.attentions[kind]
            mixer = mixer if turns else replace(mixer, rope=None)
            if mixer.norm_turned and not (mixer.rope and mixer.qk_norm):  # it stands behind rope
                mixer = replace(mixer, qk_norm="", norm_turned=False)
        beside = _recurrent(config, family, parts) if family.parallel_mixer else None
        layers.append(Layer(mixer, ffn, beside=beside, **parts["layer"]))
    if family.first_norms:
        layers[0] = replace(layers[0], norms=family.first_norms)
    return layers


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


def _with_shared(config: ConfigReader, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers, of which the last few read keys and values of the last one of their kind.

    A key says how many have none of their own (Brandon et al., 2024).

    Raises:
        ModelFileError: it is out of range, or a layer finds none of its kind before.
    """
    key = "num_kv_shared_layers"
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


def _each_once(layers: list[Layer]) -> tuple[Layer, ...]:
    """Return the layers; equal ones are the same object."""
    distinct: dict[Layer, Layer] = {}
    return tuple(distinct.setdefault(layer, layer) for layer in layers)


def count_layers(config: ConfigReader, key: str, default: int | None = None) -> int:
    """Return a number of layers. Raises ModelFileError for one that no model has."""
    num_layers = config.integer(key, default, low=1 if default is None else default)
    if num_layers > _MAX_LAYERS:
        config.fail(f"{config.name(key)} is {num_layers}, more than {_MAX_LAYERS}")
    return num_layers


def _num_guessing(config: ConfigReader) -> int:
    """Return how many layers behind the others guess tokens ahead: no answer needs them.

    Raises ModelFileError for a number that no model has.
    """
    said = replace(config, read_keys=set())  # not every family may have them
    return max(count_layers(said, key, 0) for key in MTP_KEYS)


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


# --- what a token goes through by itself --------------------------------------------------------


def _networks(
    config: ConfigReader, family: Family, parts: Parts, num_layers: int
) -> list[Mlp | Experts]:
    """Return each layer's feed-forward network: experts, but where the file says a dense one."""
    ffn = _feed_forward(config, family, parts)
    dense = _dense_layers(config, family, num_layers)
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


def _widened(layer: Layer, size: int) -> Layer:
    """Return a layer whose dense network has another width."""
    ffn = layer.ffn
    if isinstance(ffn, Mlp):
        return replace(layer, ffn=replace(ffn, size=size))
    assert isinstance(ffn, Experts)
    assert ffn.beside is not None
    return replace(layer, ffn=replace(ffn, beside=replace(ffn.beside, size=size)))


# --- files whose layers are halves of ours: a mixer, or what each token goes through by itself


class Halves(NamedTuple):
    """A layer: its mixer, "recurrent" or "full", and "dense", "experts" or nothing behind it."""

    mixer: str
    network: str = ""


def _halves_of_config(config: ConfigReader) -> list[Halves]:
    """Return the layers that a config names by halves. Raises ModelFileError if they are none."""
    key = "layers_block_type"
    names: Any = config.get(key)
    letters: Any = config.get("hybrid_override_pattern")
    if names is None:
        key, names = "hybrid_override_pattern", letters
    if names is None:
        config.fail(f"layers_block_type, or {key}, is missing")
    halves = _LETTERS if type(names) is str else _NAMES
    if type(names) not in (list, str) or any(name not in halves for name in names):
        config.fail(f"{key} must name each layer, as one of {', '.join(halves)}")
    if config.integer("num_hidden_layers", len(names)) != len(names):
        config.fail(f"{key} names {len(names)} layers, not num_hidden_layers of them")
    return _joined(config, key, [halves[name] for name in names])


def _joined(config: ConfigReader, key: str, names: Sequence[str]) -> list[Halves]:
    """Return the layers of halves. Raises ModelFileError where one has no mixer before it."""
    layers: list[Halves] = []
    for i, name in enumerate(names):
        if name in _MIXER_HALVES:
            layers.append(Halves(name))
        elif not layers or layers[-1].network:
            config.fail(f"{config.name(key)}: layer {i} has no mixer before it: not supported")
        else:
            layers[-1] = Halves(layers[-1].mixer, name)
    if not any(layer.mixer == "full" for layer in layers):
        config.fail(f"{config.name(key)} has no layer with attention, which is not supported")
    return layers
