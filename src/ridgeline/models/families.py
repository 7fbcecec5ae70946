"""Model families: from names in files to canonical names and structural facts.

Two literal tables say all that a family's name implies; everything else is read from the file.
A feature that the file needs and the decoder lacks is refused by name here, so that no backend ever
computes a model other than the one in the file. This module opens no file and decodes no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.models.facts import Facts
from ridgeline.models.rope_scaling import rope_from_config, rope_from_gguf
from ridgeline.models.tensors import Tensor
from ridgeline.physics.arch import Attention, Layer, Mlp, ModelArch

_MAX_LAYERS = 4096

# Canonical name -> name in the file. Several parts of one file tensor are stacked by rows, in the
# order of ModelArch.matrix_shapes: that is all that "fused" means.
_HF_OUTER = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_HF_FUSED = _HF_LAYER | {
    "q": "self_attn.qkv_proj.weight",
    "k": "self_attn.qkv_proj.weight",
    "v": "self_attn.qkv_proj.weight",
    "gate": "mlp.gate_up_proj.weight",
    "up": "mlp.gate_up_proj.weight",
}
_GGUF_OUTER = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_GGUF_FUSED = _GGUF_LAYER | {
    "q": "attn_qkv.weight",
    "k": "attn_qkv.weight",
    "v": "attn_qkv.weight",
    "gate": "ffn_up.weight",
    "up": "ffn_up.weight",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's name implies.

    Attributes:
        layer: canonical name within a layer to the file's.
        qkv_bias: the q, k and v projections always have a bias.
        qk_norm: heads of q and k are normalised.
        windowed: the file's sliding window is applied.
        default_window: the window where the config does not mention one.
        window_switch: the window needs ``use_sliding_window`` and spares the lower layers.
        default_head_dim: channels per head where the config is silent; 0 divides the width.
        interleaved: rows of q and k are stored for rotating neighbours instead of halves.
    """

    layer: Mapping[str, str]
    qkv_bias: bool = False
    qk_norm: bool = False
    windowed: bool = False
    default_window: int | None = None
    window_switch: bool = False
    default_head_dim: int = 0
    interleaved: bool = False


HF_FAMILIES = {
    "LlamaForCausalLM": Family(_HF_LAYER),
    "MistralForCausalLM": Family(_HF_LAYER, windowed=True, default_window=4096),
    "Phi3ForCausalLM": Family(_HF_FUSED, windowed=True),
    "Qwen2ForCausalLM": Family(
        _HF_LAYER, qkv_bias=True, windowed=True, default_window=4096, window_switch=True
    ),
    "Qwen3ForCausalLM": Family(
        _HF_LAYER,
        qk_norm=True,
        windowed=True,
        default_window=4096,
        window_switch=True,
        default_head_dim=128,
    ),
}
GGUF_FAMILIES = {
    "llama": Family(_GGUF_LAYER, windowed=True, interleaved=True),
    "phi3": Family(_GGUF_FUSED, windowed=True),
    # Converters copy a window that these models' configs switch off.
    "qwen2": Family(_GGUF_LAYER, qkv_bias=True),
    "qwen3": Family(_GGUF_LAYER, qk_norm=True),
}

# Switches that change what a model computes; each is refused when it is set.
_HF_REFUSED = (
    "mlp_bias",
    "quantization_config",
    "num_local_experts",
    "num_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_GGUF_REFUSED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "attention.sliding_window_pattern",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
)
_GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def model_from_config(
    values: Mapping[str, Any], raw: Mapping[str, Tensor], where: str
) -> tuple[ModelArch, dict[str, Tensor]]:
    """Return the architecture and the canonical tensors of a Hugging Face directory.

    Args:
        values: config.json.
        raw: tensors under the file's names.
        where: the directory, for messages.

    Raises:
        ModelFileError: something is missing, out of range, misshapen or not supported.
    """
    config = Facts(values, where)
    named = config.get("architectures")
    name = named[0] if type(named) is list and named else named
    family = HF_FAMILIES.get(name) if type(name) is str else None
    if family is None:
        config.fail(f"architecture {name!r} is not supported; supported: {', '.join(HF_FAMILIES)}")
    _refuse(config, _HF_REFUSED)
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        config.fail(f"hidden_act {activation!r} is not supported; supported: silu")

    num_layers = _num_layers(config, "num_hidden_layers")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    rope, max_position = rope_from_config(config, head_dim)
    attention_bias = config.flag("attention_bias", False)
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope=rope,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias and not family.qkv_bias,
        qk_norm="head" if family.qk_norm else "",
    )
    mlp = Mlp(config.integer("intermediate_size"))
    arch = ModelArch(
        layers=_layers(attention, mlp, _windows(config, family, num_layers)),
        hidden_size=hidden_size,
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )
    buffers = [name for name in raw if name.endswith(".rotary_emb.inv_freq")]
    head = ["lm_head.weight"] if arch.tied_embeddings else []
    prefix = "model.layers.{}."
    return arch, _bind(config, arch, raw, _HF_OUTER, prefix, family, [*buffers, *head])


def model_from_gguf(
    metadata: Mapping[str, Any], raw: Mapping[str, Tensor], where: str
) -> tuple[ModelArch, dict[str, Tensor]]:
    """Return the architecture and the canonical tensors of a GGUF file.

    Args:
        metadata: the file's keys and values.
        raw: tensors under the file's names.
        where: the file, for messages.

    Raises:
        ModelFileError: something is missing, out of range, misshapen or not supported.
    """
    name = Facts(metadata, where).text("general.architecture")
    meta = Facts(metadata, where, prefix=f"{name}.")
    if name not in GGUF_FAMILIES:
        meta.fail(f"architecture {name!r} is not supported; supported: {', '.join(GGUF_FAMILIES)}")
    family = GGUF_FAMILIES[name]
    _refuse(meta, _GGUF_REFUSED)
    if "token_embd.weight" not in raw:
        meta.fail("tensor 'token_embd.weight' is missing")

    num_layers = _num_layers(meta, "block_count")
    hidden_size = meta.integer("embedding_length")
    num_heads = meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        meta.fail(f"{name}.attention.value_length differs from key_length, which is not supported")
    window = meta.integer("attention.sliding_window", 0, low=0) if family.windowed else 0
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(meta, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope=rope_from_gguf(meta, head_dim, raw),
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in raw,
        o_bias="blk.0.attn_output.bias" in raw,
        qk_norm="head" if family.qk_norm else "",
    )
    mlp = Mlp(meta.integer("feed_forward_length"))
    arch = ModelArch(
        layers=_layers(attention, mlp, (window or None,) * num_layers),
        hidden_size=hidden_size,
        vocab_size=raw["token_embd.weight"].shape[0],
        max_position=meta.integer("context_length"),
        norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in raw,
    )
    return arch, _bind(meta, arch, raw, _GGUF_OUTER, "blk.{}.", family, _GGUF_ROPE_TENSORS)


def _refuse(facts: Facts, keys: tuple[str, ...]) -> None:
    for key in keys:
        value = facts.get(key)
        if isinstance(value, np.ndarray) or value:  # an array has no truth value of its own
            facts.fail(f"{facts.prefix}{key} is set, which is not supported")


def _num_layers(facts: Facts, key: str) -> int:
    num_layers = facts.integer(key)
    if num_layers > _MAX_LAYERS:
        facts.fail(f"{facts.prefix}{key} is {num_layers}, more than {_MAX_LAYERS}")
    return num_layers


def _num_kv_heads(facts: Facts, key: str, num_heads: int) -> int:
    num_kv_heads = facts.integer(key, num_heads)
    if num_heads % num_kv_heads:
        facts.fail(f"{num_heads} heads cannot share {num_kv_heads} key and value heads evenly")
    return num_kv_heads


def _layers(attention: Attention, mlp: Mlp, windows: tuple[int | None, ...]) -> tuple[Layer, ...]:
    """Return layers that differ in their window alone; equal ones are the same object."""
    kinds = {window: Layer(replace(attention, window=window), mlp) for window in set(windows)}
    return tuple(kinds[window] for window in windows)


def _windows(config: Facts, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: a token at ``p`` sees positions above ``p - window``."""
    if (
        family.window_switch and not config.flag("use_sliding_window", False)
    ) or not family.windowed:
        window = None
    elif "sliding_window" not in config.values:
        window = family.default_window
    else:
        window = config.integer("sliding_window", 0, low=0) or None
    first = config.integer("max_window_layers", 28, low=0) if family.window_switch else 0
    kinds: Any = config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if type(kinds) is not list or len(kinds) != num_layers or any(k not in known for k in kinds):
        config.fail(f"layer_types must name one of {', '.join(known)} for each of the layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _bind(
    facts: Facts,
    arch: ModelArch,
    raw: Mapping[str, Tensor],
    outer: Mapping[str, str],
    layer_prefix: str,
    family: Family,
    ignored: Iterable[str],
) -> dict[str, Tensor]:
    """Return the canonical tensors, shapes checked; refuse what is missing or left over."""
    shapes = arch.matrix_shapes()
    stacked: dict[str, list[str]] = {}  # name in the file -> its parts
    for name in shapes:
        if name in outer:
            in_file = outer[name]
        else:
            _, index, part = name.split(".")
            in_file = layer_prefix.format(index) + family.layer[part]
        stacked.setdefault(in_file, []).append(name)

    tensors: dict[str, Tensor] = {}
    for in_file, parts in stacked.items():
        num_rows = sum(shapes[part][0] for part in parts)
        wanted = (num_rows, *shapes[parts[0]][1:])
        if in_file not in raw:
            facts.fail(f"tensor {in_file!r} of shape {wanted} is missing")
        tensor = raw[in_file]
        if tensor.shape != wanted:
            facts.fail(f"tensor {in_file!r} has shape {tensor.shape}, wanted {wanted}")
        begin = 0
        for part in parts:
            end = begin + shapes[part][0]
            whole = len(parts) == 1
            tensors[part] = tensor if whole else tensor.rows(slice(begin, end), f"{in_file}/{part}")
            begin = end

    left_over = sorted(raw.keys() - stacked.keys() - set(ignored))
    if left_over:
        facts.fail(f"tensor {left_over[0]!r} is not part of this architecture as supported")
    if family.interleaved:
        _rotate_halves(arch, tensors)
    return {name: tensors[name] for name in shapes}


def _rotate_halves(arch: ModelArch, tensors: dict[str, Tensor]) -> None:
    """Reorder rows of q and k in place so that rope pairs channel ``i`` with ``i + dim / 2``.

    Rows are whole blocks, so they move while quantised; scores do not depend on channel order.
    """
    for i, layer in enumerate(arch.layers):
        rope, head_dim = layer.mixer.rope, layer.mixer.head_dim
        if rope is None:
            continue
        order = np.arange(head_dim)
        order[: rope.dim] = order[: rope.dim].reshape(-1, 2).T.reshape(-1)
        for name in (f"layers.{i}.{part}" for part in ("q", "k", "q_bias", "k_bias")):
            if name in tensors:
                heads = np.arange(0, tensors[name].shape[0], head_dim)
                tensors[name] = tensors[name].reordered((heads[:, None] + order).reshape(-1))
