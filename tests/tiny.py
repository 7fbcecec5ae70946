"""Tiny random models in memory, one for each structure that a backend must know, and the same
computed the plain way: one sequence, no cache, no batch, float64, a loop over positions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.interface import Setup
from ridgeline.model.files.tensors import Checkpoint, Tensor
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, ModelArch, Rope
from tests.latent import LAYERS as LATENT_LAYERS
from tests.latent import latent_attention
from tests.plain_network import act, network, norm_of
from tests.recurrent import MIXERS, recurred

Arrays = dict[str, NDArray[np.float32]]

_ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(theta=1e4, dim=8))
PLAIN = ModelArch(
    layers=(Layer(_ATTENTION, Mlp(40)),) * 2,
    hidden_size=24,
    vocab_size=50,
    max_position=1024,
    norm_eps=1e-5,
)


def new_setup(**settings: Any) -> Setup:
    """Settings for a runner of a tiny model; what is not given has small values."""
    return replace(Setup("f32", "f32", 16, 1, 64, 8, max_num_batched_tokens=64), **settings)


def changed(arch: ModelArch, windows: tuple[int | None, ...] = (), **facts: Any) -> ModelArch:
    """The same with other facts, of the model or of every layer; ``windows`` gives their number."""
    layers = arch.layers
    if windows:
        mixers = [replace(layers[0].known_attention, window=window) for window in windows]
        layers = tuple(replace(layers[0], mixer=mixer) for mixer in mixers)
    for name in list(facts):
        for part, kind in (("mixer", Attention), ("ffn", Mlp)):
            if name in kind.__dataclass_fields__:
                fact = {name: facts.pop(name)}
                changes = [{part: replace(getattr(layer, part), **fact)} for layer in layers]
                layers = tuple(
                    replace(layer, **change) for layer, change in zip(layers, changes, strict=True)
                )
                break
    return replace(arch, layers=layers, **facts)


def standing(arch: ModelArch, norms: Any) -> ModelArch:
    """The same with norms elsewhere."""
    return replace(arch, layers=tuple(replace(layer, norms=norms) for layer in arch.layers))


_LONG = Rope(
    theta=1e4,
    dim=8,
    divisors=(1.0, 1.5, 2.0, 3.0),
    long_divisors=(2.0, 3.0, 5.0, 9.0),
    attention_factor=1.2,
    original_max_position=32,
)
ARCHS = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True),
    "qkv bias": changed(PLAIN, qkv_bias=True),
    "all biases": changed(PLAIN, qkv_bias=True, o_bias=True),
    "qk norm": changed(PLAIN, qk_norm="head", norm_eps=1e-2),
    "window": changed(PLAIN, windows=(5, 5)),
    "mixed windows": changed(PLAIN, windows=(None, 1)),
    "partial rope": changed(PLAIN, rope=Rope(theta=1e3, dim=4)),
    "scaled rope": changed(PLAIN, rope=replace(_LONG, long_divisors=())),
    "long rope": changed(PLAIN, rope=_LONG),
    "one kv head": changed(PLAIN, num_kv_heads=1),
    "partial rope, one kv head": changed(PLAIN, num_kv_heads=1, rope=Rope(theta=1e3, dim=4)),
    "as many kv heads": changed(PLAIN, num_kv_heads=4),
    "norms behind": standing(changed(PLAIN, qk_norm="width"), "behind"),
    "norms around": changed(
        standing(PLAIN, "around"),
        activation="gelu_tanh",
        embed_scale=24**0.5,
        scale=0.25,
        softcap=2.0,
        logit_softcap=3.0,
    ),
    "beside": changed(standing(PLAIN, "beside"), norm="layer", logit_scale=0.25, activation="gelu"),
    "beside, own": standing(changed(PLAIN, norm="layer", norm_bias=True), "beside, own"),
    "two ropes": replace(
        changed(PLAIN, residual_scale=0.6),
        layers=(
            replace(PLAIN.layers[0], mixer=replace(_ATTENTION, rope=None)),
            replace(PLAIN.layers[0], mixer=replace(_ATTENTION, rope=Rope(1e3, 8), window=5)),
        ),
    ),
    "experts": replace(PLAIN, layers=(replace(PLAIN.layers[0], ffn=Experts(5, 2, 40)),) * 2),
    "many experts": replace(
        PLAIN,
        layers=(replace(PLAIN.layers[0], ffn=Experts(20, 3, 32, normalised=False, scale=2.5)),) * 2,
    ),
    "slopes": changed(
        PLAIN,
        rope=None,
        slopes=(0.5, 0.25, 0.1, 0.02),
        windows=(None, 7),
        embed_norm=True,
        norm="layer",
        norm_bias=True,
    ),
    "experts one by one": replace(
        PLAIN,
        layers=(
            replace(
                PLAIN.layers[0],
                ffn=Experts(19, 2, 40, normalised=False, router="sparsemixer", jitter=0.3),
            ),
        )
        * 2,
    ),
    "experts without gates": replace(
        PLAIN,
        layers=(
            Layer(
                _ATTENTION,
                Experts(
                    5,
                    2,
                    40,
                    "relu2",
                    shared=Mlp(20, "relu2", gated=False),
                    gated=False,
                    router="sigmoid",
                    choice_bias=True,
                ),
            ),
            Layer(_ATTENTION, Mlp(0)),
            Layer(_ATTENTION, Mlp(40, "relu2", gated=False)),
        ),
    ),
    "sinks": replace(
        PLAIN,
        layers=tuple(
            Layer(
                replace(_ATTENTION, qkv_bias=True, o_bias=True, sinks=True, window=window),
                Experts(5, 2, 40, activation="swiglu_clamped", bias=True),
            )
            for window in (6, None)
        ),
    ),
    "kinds": replace(
        PLAIN,
        layers=(
            PLAIN.layers[0],
            Layer(
                replace(_ATTENTION, num_kv_heads=1, head_dim=20, rope=Rope(1e3, 20), window=5),
                Experts(5, 2, 24),
            ),
            Layer(replace(_ATTENTION, rope=None, qk_norm="head"), Mlp(70, "gelu"), "around"),
            Layer(
                replace(_ATTENTION, num_heads=2, num_kv_heads=2),
                Experts(20, 3, 40, shared=Mlp(16), shared_gated=True),
            ),
        ),
    ),
    "learnt positions": changed(
        PLAIN,
        rope=None,
        norm="layer",
        norm_bias=True,
        position_rows=1026,
        position_offset=2,
        qkv_bias=True,
        o_bias=True,
        gated=False,
        activation="relu",
        bias=True,
        head_bias=True,
    ),
}
# The last keeps no keys and values.
RECURRENT = {
    name: replace(
        PLAIN,
        layers=(
            Layer(mixer, Mlp(40)),
            PLAIN.layers[0],
            Layer(mixer, Mlp(0)),
            Layer(mixer, Mlp(40)),
        ),
    )
    for name, mixer in MIXERS.items()
} | {
    "gated attention": replace(
        PLAIN,
        layers=(
            Layer(MIXERS["delta rule"], Mlp(40)),
            Layer(replace(_ATTENTION, gated=True), Mlp(40)),
        ),
    ),
    "shared expert": replace(
        PLAIN,
        layers=(
            Layer(MIXERS["delta rule"], Experts(5, 2, 40, shared=Mlp(16), shared_gated=True)),
            PLAIN.layers[0],
        ),
    ),
    "beside attention": replace(
        PLAIN,
        layers=(
            Layer(
                replace(_ATTENTION, in_scale=0.8, out_scale=1.3),
                Mlp(40, gate_scale=0.7, out_scale=1.2),
                beside=MIXERS["state space"],
            ),
        )
        * 2,
    ),
    "states alone": replace(PLAIN, layers=(Layer(MIXERS["state space"], Mlp(0)),) * 3),
    "heads by turns": replace(
        PLAIN, layers=(Layer(replace(MIXERS["delta rule"], by_turns=True), Mlp(40)),) * 2
    ),
}

_HEADS = (replace(_ATTENTION, window=5, qk_norm="head", v_norm=True, scale=1.0),)
_HEADS += (
    replace(
        _HEADS[0],
        window=None,
        num_kv_heads=1,
        head_dim=16,
        rope=Rope(1e5, 16, (1.0, 1.5, *(math.inf,) * 6)),
    ),
)
# Of Gemma 4: heads by layer, layers that read the keys and values of others, an input per layer;
# and experts beside a dense network, where keys are the values.
BY_LAYER = {
    "shared keys and values": replace(
        PLAIN,
        layers=tuple(
            Layer(
                replace(_HEADS[kind], kv_of=kv_of),
                Mlp(40 if kv_of is None else 80, "gelu_tanh"),
                "around",
                input_size=6,
                out_scale=True,
            )
            for kind, kv_of in ((0, None), (1, None), (0, None), (1, 1), (0, 2), (1, 1))
        ),
        embed_scale=24**0.5,
        logit_softcap=3.0,
        tied_embeddings=True,
    ),
    "experts beside": replace(
        PLAIN,
        layers=tuple(
            Layer(
                replace(_HEADS[kind], v_is_k=kind == 1),
                Experts(5, 2, 40, "gelu_tanh", own_scales=True, beside=Mlp(24, "gelu_tanh")),
                "around",
                out_scale=True,
            )
            for kind in (0, 1, 0)
        ),
    ),
    "keys and values of layer 0": replace(
        PLAIN,
        layers=(
            Layer(replace(_ATTENTION, qkv_bias=True), Mlp(40)),
            Layer(replace(_ATTENTION, qkv_bias=True, kv_of=0), Mlp(40)),
        ),
    ),
}


LATENT = {name: replace(PLAIN, layers=layers) for name, layers in LATENT_LAYERS.items()}
_HEADLESS = {"tied_embeddings": True, "has_head": False}
ENCODERS = {
    "encoder": changed(
        standing(PLAIN, "within"),
        causal=False,
        rope=None,
        norm="layer",
        norm_bias=True,
        position_rows=1024,
        qkv_bias=True,
        o_bias=True,
        gated=False,
        activation="gelu",
        bias=True,
        pooling="mean",
        **_HEADLESS,
    ),
    "encoder with windows": changed(
        PLAIN, windows=(5, None), causal=False, pooling="cls", **_HEADLESS
    ),
}
ENCODERS["encoder with biases by distance"] = changed(
    ENCODERS["encoder"], num_kv_heads=PLAIN.layers[0].mixer.num_heads, bias_buckets=32
)
_BARE = changed(PLAIN, windows=(None, 5, 5), causal=False, norm="layer", **_HEADLESS)
ENCODERS["encoder with a bare first layer"] = replace(
    _BARE, layers=(replace(_BARE.layers[0], norms="before mlp"), *_BARE.layers[1:])
)


def random_arrays(arch: ModelArch, seed: int = 0) -> Arrays:
    """Weights of a size that keeps values lively: norms near 1, the rest near 1 / sqrt(in)."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in arch.matrix_shapes().items():
        values = rng.normal(0, 1, shape)
        if name.endswith(("norm", "scale", "scales")):  # their biases are as small as other biases
            values = 1 + values / 4
        elif name.endswith("sinks"):  # as large as scores
            values *= 2
        elif name.endswith(("gate_bias", "up_bias")) and "clamped" in arch.layers[0].ffn.activation:
            values *= 5  # beyond what is clamped, now and then
        elif name != "embed" or arch.tied_embeddings:
            values *= 2 / np.sqrt(shape[-1])
        arrays[name] = values.astype(np.float32)
    return arrays


def checkpoint(arch: ModelArch, arrays: Arrays | None = None) -> Checkpoint:
    """The arrays (or random ones) as a reader would hand them out."""
    tensors = {
        name: Tensor(name, "F32", a.shape, np.atleast_2d(a).view(np.uint8))
        for name, a in (arrays or random_arrays(arch)).items()
    }
    return Checkpoint(Path("tiny"), arch, tensors, (2,), 1, (), None, {})


def plain_logits(
    arch: ModelArch, arrays: Arrays, tokens: tuple[int, ...], max_model_len: int
) -> NDArray[np.float64]:
    """Logits after each token, ``[tokens, vocab]``."""
    head = arrays["embed" if arch.tied_embeddings else "head"].astype(np.float64)
    logits = plain_states(arch, arrays, tokens, max_model_len) @ head.T
    if arch.head_bias:
        logits += arrays["head_bias"]
    return _capped(arch.logit_scale * logits, arch.logit_softcap)


def plain_states(
    arch: ModelArch, arrays: Arrays, tokens: tuple[int, ...], max_model_len: int
) -> NDArray[np.float64]:
    """Final states of each token, normed, ``[tokens, hidden]``."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    x = w["embed"][list(tokens)] * arch.embed_scale
    if arch.embed_norm:
        x = norm_of(x - x.mean(axis=-1, keepdims=True), w["embedding_norm"], arch)
        x = x + w["embedding_norm_bias"]
    inputs, kept = _inputs(arch, w, x, tokens), dict[int, Any]()
    if arch.position_rows:
        x = x + w["positions"][arch.position_offset :][: len(tokens)]
    for i in range(arch.num_layers):
        layer = {n.removeprefix(f"layers.{i}."): a for n, a in w.items()}

        def norm(
            x: NDArray[np.float64], name: str, layer: dict[str, NDArray[np.float64]] = layer
        ) -> NDArray[np.float64]:
            if name not in layer:
                return x
            if arch.norm == "layer":
                x = x - x.mean(axis=-1, keepdims=True)
            return norm_of(x, layer[name], arch) + layer.get(f"{name}_bias", 0.0)

        seen = norm(x, "attn_norm")
        x = seen if arch.layers[i].norms == "within" else x
        mixer, recurrent = arch.layers[i].attention, arch.layers[i].recurrent
        made = np.zeros_like(seen)
        if mixer is not None:
            attended = _attention(arch, layer, mixer.in_scale * seen, i, max_model_len, kept)
            made += mixer.out_scale * attended
        if recurrent is not None:
            made += recurred(recurrent, layer, seen, arch.norm_eps)
        x = x + arch.residual_scale * norm(made, "attn_post_norm")
        if arch.layers[i].norms == "beside, own":
            seen = norm(x - arch.residual_scale * made, "mlp_norm")
        elif arch.layers[i].norms != "beside":
            seen = norm(x, "mlp_norm")
        x = seen if arch.layers[i].norms == "within" else x
        if arch.layers[i].ffn.size:
            made = network(arch, layer, seen, i, partial(norm, x))
            x = x + arch.residual_scale * norm(made, "mlp_post_norm")
        if inputs is not None:
            own = act(arch.layers[i].ffn.activation, x @ layer["input_gate"].T) * inputs[:, i]
            x = x + norm(own @ layer["input_proj"].T, "input_post_norm")
        x = x * layer.get("out_scale", 1.0)
    if arch.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    return norm_of(x, w["norm"], arch) + w.get("norm_bias", 0.0)


def _inputs(
    arch: ModelArch,
    w: dict[str, NDArray[np.float64]],
    x: NDArray[np.float64],
    tokens: tuple[int, ...],
) -> NDArray[np.float64] | None:
    """The own inputs of all layers, ``[tokens, layers, channels]``."""
    if "inputs" not in w:
        return None
    size = arch.layers[0].input_size
    shape = (len(x), arch.num_layers, size)
    made = (x @ w["inputs_proj"].T / arch.hidden_size**0.5).reshape(shape)
    rows = w["inputs"][list(tokens)].reshape(shape) * size**0.5
    return (norm_of(made, w["inputs_norm"], arch) + rows) / 2**0.5


def _capped(x: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    return cap * np.tanh(x / cap) if cap else x


def _bucket(ahead: int) -> int:
    """The bucket, of 32, of a key that many tokens ahead."""
    far = abs(ahead)
    if far >= 8:
        far = min(15, 8 + int(math.log(far / 8) / math.log(128 / 8) * 8 + 1e-9))
    return far + 16 * (ahead > 0)


def _attention(
    arch: ModelArch,
    layer: dict[str, NDArray[np.float64]],
    x: NDArray[np.float64],
    i: int,
    upto: int,
    kept: dict[int, Any],
) -> NDArray[np.float64]:
    """``kept`` has keys and values by the number of their layer."""
    mixer = arch.layers[i].known_attention
    if mixer.latent is not None:
        return latent_attention(mixer, layer, x, lambda v, p: _rotated(mixer.rope, v, p, upto))

    def project(name: str, heads: int) -> NDArray[np.float64]:
        file = "k" if name == "v" and mixer.v_is_k else name
        out = x @ layer[file].T + (layer[f"{file}_bias"] if mixer.qkv_bias else 0)
        if name != "v" and mixer.qk_norm == "width":
            out = norm_of(out, layer[f"{name}_norm"], arch)
        out = out.reshape(len(x), heads, mixer.head_dim)
        if name != "v":
            out = norm_of(out, layer[f"{name}_norm"], arch) if mixer.qk_norm == "head" else out
            for position in range(len(x)):
                for head in range(heads):
                    out[position, head] = _rotated(mixer.rope, out[position, head], position, upto)
        return out

    q = project("q", mixer.num_heads)
    if mixer.kv_of is None:
        v = project("v", mixer.num_kv_heads)
        v = norm_of(v, np.ones(mixer.head_dim), arch) if mixer.v_norm else v
        kept[i] = project("k", mixer.num_kv_heads), v
    k, v = kept[i if mixer.kv_of is None else mixer.kv_of]
    window = mixer.window or len(x)
    out = np.empty_like(q)
    for position in range(len(x)):
        end = position + 1 if mixer.causal else position + window
        seen = slice(max(0, position - window + 1), end)
        for head in range(mixer.num_heads):
            kv_head = head * mixer.num_kv_heads // mixer.num_heads
            scores = k[seen, kv_head] @ q[position, head] * mixer.score_scale
            scores = _capped(scores, mixer.softcap)
            if mixer.slopes:
                scores = scores - mixer.slopes[head] * (position - np.arange(len(x))[seen])
            if mixer.bias_buckets:
                ahead = np.arange(len(x))[seen] - position
                scores = scores + [layer["relative_bias"][_bucket(int(d)), head] for d in ahead]
            weights = np.exp(scores)
            lost = np.exp(layer["sinks"][head]) if mixer.sinks else 0.0
            out[position, head] = weights @ v[seen, kv_head] / (weights.sum() + lost)
    out = out.reshape(len(x), -1)
    if mixer.gated:
        out /= 1 + np.exp(-(x @ layer["q_gate"].T))
    return out @ layer["o"].T + (layer["o_bias"] if mixer.o_bias else 0)


def _rotated(
    rope: Rope | None, channels: NDArray[np.float64], position: int, upto: int
) -> NDArray[np.float64]:
    if rope is None:
        return channels
    half = rope.dim // 2
    is_long = rope.long_divisors and upto > rope.original_max_position
    divisors = (rope.long_divisors if is_long else rope.divisors) or (1.0,) * half
    out = channels.copy()
    for pair in range(half):
        angle = position / rope.theta ** (2 * pair / rope.dim) / divisors[pair]
        turn = complex(np.cos(angle), np.sin(angle)) * rope.attention_factor
        turned = complex(channels[pair], channels[pair + half]) * turn
        out[pair], out[pair + half] = turned.real, turned.imag
    return out
