"""From any config.json to a ``ModelShape``: also of models that do not run.

It reads the tables that the engine reads, and rows of families that are only counted. A key that
changes no size may say anything; one that was not read and that by its name says a size is refused
by name, so that no count is of another model than the one in the file. It opens no file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Set
from dataclasses import replace
from itertools import repeat, zip_longest
from typing import Any

from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.cost.shapes import LayerCache, LayerShape, Matrix, ModelShape
from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families import arch_of, in_usual_names
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.fields import const
from ridgeline.model.files.families.gguf import HARMLESS as HARMLESS_IN_GGUF
from ridgeline.model.files.families.gguf_config import config_of_gguf
from ridgeline.model.files.families.hf_names import HARMLESS, ONLY
from ridgeline.model.files.families.layers import MTP_KEYS, NO_LIMIT
from ridgeline.model.files.families.lookup import (
    COUNTED,
    GGUF_FAMILIES,
    TABLES,
    architecture,
    class_of_type,
    family_of,
    family_of_gguf,
    first_class,
)
from ridgeline.model.files.families.tables.plan_only import HAS_GATES, NO_LLAMAS
from ridgeline.model.files.families.unread_keys import require
from ridgeline.model.files.tensors import Tensor

_MOST_LETTERS = 80  # of a family's name
_TOWERS = ("vision_config", "audio_config")
_OF_TOWERS = (
    "image_token_index", "mm_tokens_per_image", "vision_soft_tokens", "audio_soft_tokens_per_image",
    "vision_soft_tokens_per_image",
)  # fmt: skip
# Fields of parts whose weights are not counted here, and that keep nothing of a sequence.
_NOT_COUNTED = (
    "laurel_rank", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "altup_num_inputs",
    "altup_active_idx", "activation_sparsity_pattern",
)  # fmt: skip
_WEIGHTS_ALONE = (*_TOWERS, *_OF_TOWERS, *_NOT_COUNTED)
# Facts that change no size, but for the same names of a layer.
_ARITHMETIC = frozenset((
    "activation", "embed_scale", "gate_scale", "in_scale", "jitter", "key_scale", "logit_scale",
    "logit_softcap", "norm_eps", "norm_first", "normalised", "out_scale", "part_scales",
    "residual_scale", "router", "scale", "slopes", "softcap",
))  # fmt: skip
_OF_CHOICE = ("ffn.num_groups", "ffn.groups_met", "scales.ffn")
_GATES = "gated_mlp"  # our own key, for families without a row
_OF_UNLIKE = "block_configs"  # of families whose layers say their sizes each by itself
_MULTIPLE = 256  # to which widths of MLPs are rounded where they are given as a factor
_SIZES_OF_SOME = {"decoder_sparse_step", *ONLY}  # which the engine reads of some families alone
# What is read of rope alone: whatever it says, no size depends on it.
_OF_ROPE = (
    "alpha", "llama_4_scaling_beta", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
)  # fmt: skip
# Words in the names of keys that say how much of something there is.
_SIZE = re.compile(
    r"(?:^|_)(?:num|n|dim|dims|size|width|rank|layers?|heads?|experts?|intermediate|hidden|kv|cache|"
    r"bias|conv|state|ssm|mamba\d?|shared|window|embd|embeds|lora|mtp|nextn|adapter|vision|audio|"
    r"qk_norm|qk_layernorm|image|video|speech|encoder|decoder|tower|index|memory|block|blocks|"
    r"latent|ffn|d|inner|rmsnorm|expansion|expand|query|norm_type)(?:_|$)"
)
# Keys with such names that change no byte of weights or cache, as all known families use them.
_NO_SIZE = re.compile(
    r"(?:.*_(?:token_id|token_ids|token_index|dropout|pdrop|eps|epsilon|coef|alpha|theta|act|scale|"
    r"multipliers?|limit|scalar|prob|method|func|factor|implementation|loss|map|scaling|norm_eps)"
    r"|rope_.*|output_.*|initializer_.*|num_beams?.*|num_labels"
    r"|cross_attention.*|original_max_position_embeddings|initial_context_length|n_group|topk_group"
    r"|ep_size|num_hidden_layers_.*|router_.*|seq_aux|aux_.*|time_step_.*|mamba_dt_.*"
    r"|mamba_ssm_dtype|mamba_chunk_size|chunk_size|use_mamba_kernels|use_mambapy|layernorm_.*"
    r"|residual_in_fp32|rescale_.*|num_logits_to_keep|calc_logits_.*|_.*|transformers_.*"
    r"|pruned_heads|num_assistant_tokens|hidden_act|hidden_activation|hidden_dropout.*|special_.*"
    r"|summary_.*|no_rope_.*|rotary_(?:dim|pct|ndims|emb_base)|first_k_dense_layers"
    r"|attn_config_alibi.*|apply_query_key_layer_scaling|scale_attn_by_inverse_layer_idx|num_kv_heads|n_ctx"
    r"|attn_temperature_tuning|floor_scale|for_llm_compressor)"
)


def shape_of_config(values: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape that a config.json describes.

    Weights that it mentions and that are not counted stand in ``not_counted``.

    Args:
        values: as parsed.
        where: what to call it in messages.

    Raises:
        ModelFileError: a key is missing, out of range, or says a size that is not understood.
    """
    half = next((key for key in ("text_config", "llm_config") if values.get(key)), "")
    outer = {key: values[key] for key in _WEIGHTS_ALONE if key in values} if half else {}
    whole = values
    if half:
        if not isinstance(values[half], Mapping):
            ConfigReader(values, where).fail(f"{half} is not an object")
        text = {key: value for key, value in values[half].items() if value is not None}
        shared = {k: values[k] for k in ("tie_word_embeddings",) if k in values}
        values = {
            **TABLES.text_defaults.get(str(text.get("model_type")), {}),
            **shared,
            **text,
            **outer,
        }
        if "vision_config" not in outer and len(values) < 4:
            ConfigReader(values, where).fail(
                f"{half} does not say the model's sizes: give the config of the text model"
            )
    values, family, is_known = _config_to_count(_with_layers_named(values), whole)
    said = values.get("model_type") or architecture(whole) or "unknown"
    if type(said) is not str:
        ConfigReader(values, where).fail(f"model_type is {reprlib.repr(said)}, not a string")
    name = said[:_MOST_LETTERS]
    assumptions: tuple[str, ...] = ()
    if not is_known:
        if name in NO_LLAMAS:
            ConfigReader(values, where).fail(
                f"models of type {name!r} are not counted: {NO_LLAMAS[name]}; nothing is guessed"
            )
        has_gates = _has_gates(values, name, where)
        family = replace(family, facts={**family.facts, "ffn.gated": const(has_gates)})
        assumptions = (
            f"model_type {name!r} is not known here: taken for a Llama with the sizes of the "
            f"config{'' if has_gates else ', and MLPs without gates'}",
        )
    shape = _counted(values, family, name, where)
    counted = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    left = [key for key in _NOT_COUNTED if values.get(key)]
    if "layer.input_size" in family.facts:
        left = [key for key in left if key not in counted]
    return replace(
        shape,
        not_counted=tuple(left),
        towers=tuple(key for key in _TOWERS if values.get(key)),
        assumptions=(*assumptions, *shape.assumptions),
    )


def _config_to_count(
    values: Mapping[str, Any], whole: Mapping[str, Any]
) -> tuple[dict[str, Any], Family, bool]:
    """Return a model's config in usual names, its family, which need not run, and if it is known.

    A family goes by the model's class, else by its model type. One that is not known is taken for
    a Llama. ``values`` are those of the text half of a ``whole`` config; else both are the same.
    """
    names = (first_class(whole), first_class(values), class_of_type(values), class_of_type(whole))
    rows = (family_of({**values, "architectures": [name]}, COUNTED) for name in names if name)
    found = next((row for row in rows if row is not None), None)
    family = found or family_of({**values, "architectures": ["unknown"]}, COUNTED)
    assert family is not None
    return in_usual_names(values, family), family, found is not None


def _with_layers_named(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config that names its dense layers, where it has 0 for them and 1 for the others."""
    if values.get(_OF_UNLIKE):  # each says its own sizes, which are counted behind
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        return {**values, "num_key_value_heads": heads, "intermediate_size": hidden}
    said = values.get("moe_layer_freq")
    if type(said) is not list or any(one not in (0, 1) for one in said):
        return values
    others = {key: value for key, value in values.items() if key != "moe_layer_freq"}
    return {**others, "mlp_layer_types": ["sparse" if one else "dense" for one in said]}


def _has_gates(values: Mapping[str, Any], name: str, where: str) -> bool:
    """Return whether MLPs of a family without a row have gates: never a guess.

    Raises ModelFileError if neither the table nor the config says it.
    """
    config = ConfigReader(values, where)
    if name in HAS_GATES and config.get(_GATES) is None:
        return HAS_GATES[name]
    if config.get(_GATES) is None:
        config.integer("num_hidden_layers")  # what has none is no config of a model
        config.fail(
            f"model_type {name!r} is not known here, and whether its MLPs have gates stands in no "
            f'config: add "{_GATES}": true if they multiply two projections, as Llama\'s do '
            f"(gate_proj and up_proj), else false; nothing is guessed"
        )
    return config.flag(_GATES, True)


def _counted(values: Mapping[str, Any], family: Family, name: str, where: str) -> ModelShape:
    values = {key: value for key, value in values.items() if key not in _OF_ROPE}
    unsaid = {key: v for key, v in family.defaults.items() if key != "partial_rotary_factor"}
    context = values.get("max_position_embeddings") or unsaid.get("max_position_embeddings") or 0
    values = {**unsaid, **values, "max_position_embeddings": context or NO_LIMIT}
    config, of_sizes = ConfigReader(values, where), _of_sizes(family)
    context = config.integer("max_position_embeddings") if context else 0
    rows = (context + family.spare_positions) * family.num_segments
    if "positions" in family.outer:
        facts = {**of_sizes.facts, "position_rows": const(rows)}
        outer = {part: name for part, name in family.outer.items() if part != "positions"}
        of_sizes = replace(of_sizes, facts=facts, outer=outer)
    arch = arch_of(config, of_sizes, of_sizes.read(config), {}, max_position=context)
    shape = shape_of_arch(arch, name, fused_qkv=family.fused_qkv)
    for key, count in _COUNTED_APART.items():
        if key in family.ignored_keys:
            shape = count(shape, config)
    _refuse_other_sizes(config, family, HARMLESS - _SIZES_OF_SOME)
    return shape


def _with_unlike_layers(shape: ModelShape, config: ConfigReader) -> ModelShape:
    """Return a model each of whose layers says its own sizes, or that a half of it is left out.

    Raises ModelFileError for a layer whose half is another than that of a Llama.
    """
    blocks = config.get(_OF_UNLIKE)
    if type(blocks) is not list or len(blocks) != len(shape.layers):
        config.fail(f"{_OF_UNLIKE} must say the sizes of each of the layers")
    layers = tuple(map(_of_block, shape.layers, repeat(shape), blocks, repeat(config.where)))
    kv_heads = max(layer.cache.num_heads for layer in layers)
    return replace(shape, layers=layers, num_kv_heads=kv_heads)


def _of_block(layer: LayerShape, shape: ModelShape, block: Any, where: str) -> LayerShape:
    """Return a layer with the sizes of a block of NVIDIA's searches for architectures."""
    halves = [block.get(key) if type(block) is dict else None for key in ("attention", "ffn")]
    if not all(type(half) is dict for half in halves):
        ConfigReader({}, where).fail(f"{_OF_UNLIKE} names a block without attention and ffn")
    attention, ffn = (ConfigReader(half, f"{where}: {_OF_UNLIKE}") for half in halves if half)
    for half in (attention, ffn):
        if half.get("no_op"):
            continue
        for key in ("replace_with_linear", "sparsify", "num_sink_tokens", "window_length"):
            if half.get(key):
                half.fail(f"{key} is {half.get(key)!r}, which is not counted")
    matrices = {matrix.name: matrix for matrix in layer.matrices}
    cache = replace(layer.cache, values_per_head=0)
    head_dim, values = layer.cache.values_per_head // 2, 0
    if attention.get("no_op"):
        matrices = {n: m for n, m in matrices.items() if not n.startswith(("self_attn", "input_"))}
    else:
        kv_heads = shape.num_heads // attention.integer("n_heads_in_group", low=1)
        cache = replace(layer.cache, num_heads=kv_heads)
        values = 2 * (shape.num_heads + kv_heads) * head_dim
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            matrices[name] = replace(matrices[name], rows=kv_heads * head_dim, ways=kv_heads)
    size = 0
    if ffn.get("no_op"):
        matrices = {n: m for n, m in matrices.items() if not n.startswith(("mlp", "post_"))}
    else:
        size = int(2 * ffn.number("ffn_mult") * shape.hidden_size / 3)
        size = -(-size // _MULTIPLE) * _MULTIPLE
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            matrices[name] = replace(matrices[name], rows=size, ways=size)
        matrices["mlp.down_proj"] = replace(matrices["mlp.down_proj"], columns=size, ways=size)
    kind = "gqa" if values else "MLP alone"
    return LayerShape(kind, tuple(matrices.values()), cache, values, 3 * size)


def _with_heads_of_windows(shape: ModelShape, config: ConfigReader) -> ModelShape:
    """Return a model whose layers with windows have other heads, and values other widths than keys.

    Raises ModelFileError if it does not say which layers have windows.
    """
    windows = config.get("hybrid_layer_pattern")
    if type(windows) is not list or len(windows) != len(shape.layers):
        config.fail("hybrid_layer_pattern must say 0 or 1 for each of the layers")
    heads, hidden = shape.num_heads, shape.hidden_size

    def of_layer(layer: LayerShape, prefix: str) -> LayerShape:
        kv_heads = config.integer(f"{prefix}num_key_value_heads", low=1)
        dim = config.integer(f"{prefix}head_dim", low=1)
        of_values = config.integer(f"{prefix}v_head_dim", low=1)
        if config.integer(f"{prefix}num_attention_heads", low=1) != heads:
            config.fail(f"{prefix}num_attention_heads is not num_attention_heads: not counted")
        rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * of_values}
        matrices = [m for m in layer.matrices if not m.name.startswith("self_attn.")]
        group = "attention"
        for name, count in rows.items():
            ways = heads if name == "q" else kv_heads
            matrices.append(Matrix(f"self_attn.{name}_proj", group, count, hidden, ways))
        matrices.append(Matrix("self_attn.o_proj", group, hidden, heads * of_values, heads))
        kind = "swa" if prefix else "full"
        window = config.integer("sliding_window", low=1) if prefix else None
        if config.get(f"add_{kind}_attention_sink_bias"):
            matrices.append(Matrix("self_attn.sinks", group, heads, ways=heads, linear=False))
        seen = "sliding window" if prefix else "full attention"
        cache = LayerCache(seen, dim + of_values, kv_heads, window)
        values = sum(rows.values()) + heads * of_values
        return replace(layer, matrices=tuple(matrices), cache=cache, attention_values=values)

    layers = tuple(
        of_layer(layer, "swa_" if has_window else "")
        for layer, has_window in zip(shape.layers, windows, strict=True)
    )
    return replace(shape, layers=layers)


def _with_indexer(shape: ModelShape, config: ConfigReader) -> ModelShape:
    """Return a model with what chooses the tokens that its attention reads, and the keys of that.

    Each rank has all of it. In some models several layers share a choice.
    """
    heads, dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    q_rank, hidden = config.integer("q_lora_rank"), shape.hidden_size
    kinds = config.values.get("indexer_types") or []
    matrices = (
        Matrix("self_attn.indexer.wq_b", "attention", heads * dim, q_rank),
        Matrix("self_attn.indexer.wk", "attention", dim, hidden),
        Matrix("self_attn.indexer.k_norm", "norms", 2 * dim, linear=False),
        Matrix("self_attn.indexer.weights_proj", "attention", heads, hidden),
    )
    layers = tuple(
        _with_keys(layer, matrices, dim) if kind != "shared" else layer
        for layer, kind in zip_longest(shape.layers, kinds[: len(shape.layers)])
    )
    return replace(shape, layers=layers, assumptions=_said_of_indexer("index_topk"))


def _with_keys(layer: LayerShape, matrices: tuple[Matrix, ...], dim: int) -> LayerShape:
    """Return a layer with an indexer, which keeps a key of each token beside all heads'."""
    per_head = dim // layer.cache.num_heads  # the ranks that divide heads divide it too
    cache = replace(layer.cache, values_per_head=layer.cache.values_per_head + per_head)
    return replace(layer, matrices=(*layer.matrices, *matrices), cache=cache)


def _said_of_indexer(key: str) -> tuple[str, str]:
    return (
        "an indexer's keys are counted in the type of the cache, where some engines keep 8 bits",
        f"attention is timed as if it read every token: the choice of {key} is not",
    )


def _with_index_branch(shape: ModelShape, config: ConfigReader) -> ModelShape:
    """Return a model some of whose layers choose blocks of tokens by queries and keys of their own.

    Raises ModelFileError if it does not say which layers do.
    """
    said = config.get("sparse_attention_config")
    said = said if isinstance(said, Mapping) else {}
    sizes = ConfigReader(said, f"{config.where}: sparse_attention_config")
    heads = sizes.integer("sparse_num_index_heads")
    dim, hidden = sizes.integer("sparse_index_dim"), shape.hidden_size
    chosen = said.get("sparse_attention_freq")
    if type(chosen) is not list or len(chosen) != len(shape.layers):
        sizes.fail("sparse_attention_freq must say 0 or 1 for each of the layers")
    matrices = (
        Matrix("self_attn.index_q_proj", "attention", heads * dim, hidden, ways=heads),
        Matrix("self_attn.index_k_proj", "attention", dim, hidden),
        Matrix("self_attn.index_norms", "norms", 2 * dim, linear=False),
    )
    layers = tuple(
        _with_keys(layer, matrices, dim) if one else layer
        for layer, one in zip(shape.layers, chosen, strict=True)
    )
    return replace(shape, layers=layers, assumptions=_said_of_indexer("sparse_attention_config"))


def _with_latent_experts(shape: ModelShape, config: ConfigReader) -> ModelShape:
    """Return a model whose chosen experts read and write vectors of another width.

    Two matrices of a layer lead there and back. Shared experts have the model's own width.
    """

    def narrowed(matrix: Matrix) -> Matrix:
        if not matrix.name.startswith("mlp.experts."):
            return matrix
        if matrix.name.endswith("down_proj"):
            return replace(matrix, rows=latent)
        return replace(matrix, columns=latent)

    latent, hidden = config.integer("moe_latent_size"), shape.hidden_size
    there = Matrix("mlp.fc1_latent_proj", "experts", latent, hidden)
    back = Matrix("mlp.fc2_latent_proj", "experts", hidden, latent)

    def with_both(matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        if not any(matrix.name.startswith("mlp.experts.") for matrix in matrices):
            return matrices
        return (*map(narrowed, matrices), there, back)

    layers = tuple(replace(layer, matrices=with_both(layer.matrices)) for layer in shape.layers)
    return replace(shape, layers=layers, mtp=with_both(shape.mtp))


# What plans alone count, by a key that the family's row names as one that is not read.
_COUNTED_APART = {
    "index_topk": _with_indexer,  # attention reads this number of tokens
    "sparse_attention_config": _with_index_branch,  # attention reads chosen blocks
    _OF_UNLIKE: _with_unlike_layers,
    "swa_num_key_value_heads": _with_heads_of_windows,  # layers with windows have other heads
    "moe_latent_size": _with_latent_experts,  # experts compute in that width
}


def shape_of_gguf(metadata: Mapping[str, Any], raw: Mapping[str, Tensor], where: str) -> ModelShape:
    """Return the shape that a GGUF file of a family that runs describes, whether it runs or not.

    Raises:
        ModelFileError: a value is missing, out of range, or says a size that is not understood.
    """
    name = ConfigReader(metadata, where).text("general.architecture")
    if name not in GGUF_FAMILIES:
        ConfigReader(metadata, where).fail(
            f"architecture {reprlib.repr(name)} is not understood: give the model's config.json"
        )
    meta, family = family_of_gguf(metadata, raw, where)
    of_sizes = _of_sizes(family)
    gguf = config_of_gguf(meta, of_sizes, raw)
    arch = arch_of(gguf.config, of_sizes, of_sizes.read(gguf.metadata), raw, **gguf.overrides)
    _refuse_other_sizes(meta, family, HARMLESS_IN_GGUF)
    return shape_of_arch(arch, name, fused_qkv=family.fused_qkv)


def _refuse_other_sizes(config: ConfigReader, family: Family, harmless: Set[str]) -> None:
    """Raise ModelFileError for a key that was not read and that by its name says a size."""
    config.read_keys.update(config.prefix + k for one in family.facts.values() for k in one.keys)
    unread = {
        key.removeprefix(config.prefix): value
        for key, value in config.values.items()
        if key.startswith(config.prefix) and key not in config.read_keys and _says_size(key)
    }
    require(config, {key: value for key, value in family.required.items() if key in unread})
    known = harmless | {*family.ignored_keys, *family.required, *_WEIGHTS_ALONE, *MTP_KEYS}
    for key, value in unread.items():
        if value not in (None, False, 0, "", [], {}) and key not in known:
            config.fail(
                f"{config.prefix}{key} is {reprlib.repr(value)}, which may change the model's size "
                f"and is not understood; nothing is guessed"
            )


def _of_sizes(family: Family) -> Family:
    """Return what a family says of sizes: no more of it is read."""
    facts = {
        name: reader
        for name, reader in family.facts.items()
        if name.startswith("layer.")
        or (name.rpartition(".")[2] not in _ARITHMETIC and name not in _OF_CHOICE)
    }
    if family.plain_head_norms:  # which no file has
        facts.pop("mixer.qk_norm", None)
    return replace(family, facts=facts | {"norm_eps": const(1.0)})


def _says_size(key: str) -> bool:
    key = key.replace(".", "_")
    return bool(_SIZE.search(key)) and not _NO_SIZE.fullmatch(key)
