"""Bytes and floating-point operations (FLOPs) of a model and of any step, from ModelArch alone.

Plain formulas in SI units; a multiply-add is 2 FLOPs. Counted are the matrix products (linear
layers, output head, attention scores and weighted values), which are all but a percent or so;
norms, rotary embedding, softmax and sampling are not. This module knows nothing of machines, and so
nothing of time.

A chunk is ``num_tokens`` new tokens of one sequence, the first at position ``start``; keys and
values of the positions before are in the cache. Decoding is a chunk of one token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ridgeline.model.shape.model import Attention, ModelArch
from ridgeline.model.shape.recurrent import Recurrent, num_matrix_weights

STATE_VALUE_BYTES = 4  # of recurrent layers: always float32


class Features(NamedTuple):
    """What a step computes, in counts.

    Attributes:
        num_tokens: rows that go through the layers; drafts are among them.
        num_seqs: sequences.
        num_rows: rows of which the output head is computed.
        num_positions: keys and values that attention reads, for each sequence; the mean of layers.
        num_pairs: pairs of a query and a key that it sees; the mean of layers.
    """

    num_tokens: int
    num_seqs: int
    num_rows: int
    num_positions: float
    num_pairs: float


def weight_params(arch: ModelArch) -> int:
    """Return the number of weights; an embedding that is also the head counts once."""
    return sum(math.prod(shape) for shape in arch.matrix_shapes().values())


def weight_bytes(arch: ModelArch, bytes_per_param: float) -> int:
    """Return the bytes of all weights; quantised formats have fractions (Q4_1 has 20 / 32)."""
    return round(weight_params(arch) * bytes_per_param)


def kv_bytes_per_token(arch: ModelArch, bytes_per_value: float) -> int:
    """Return the cache bytes of one token: a key and a value per layer, KV head and channel.

    A layer that reads another's keys and values has none, and latent attention one latent.
    """
    owners = (mixer for mixer in arch.attentions if mixer.kv_of is None)
    return round(sum(mixer.cache_size for mixer in owners) * bytes_per_value)


def state_bytes_per_seq(arch: ModelArch) -> int:
    """Return the bytes of one sequence's state, however long it is: of all recurrent layers."""
    return arch.num_state_values * STATE_VALUE_BYTES


def kv_read_bytes(arch: ModelArch, start: int, num_tokens: int, bytes_per_value: float) -> int:
    """Return the cache bytes that a chunk reads, each position once per layer.

    A layer sees the ``start + num_tokens`` positions so far, but with a window ``w`` only those
    that some token of the chunk sees: ``w - 1`` before its first token, and the chunk.
    """
    values = 0
    for mixer in arch.attentions:
        window = mixer.window
        before = start if window is None else min(start, window - 1)
        values += (before + num_tokens) * mixer.cache_size
    return round(values * bytes_per_value)


def linear_flops(arch: ModelArch, num_tokens: int) -> int:
    """Return the FLOPs of all layers' linear maps: 2 per weight and token. Without the head.

    Of experts only those that a token goes to count. What makes a layer's input counts too.
    """
    weights = 0
    for layer in arch.layers:
        for mixer in (layer.attention, layer.recurrent):
            weights += 0 if mixer is None else _mixer_weights(mixer, arch.hidden_size)
        weights += layer.ffn.active_weights(arch.hidden_size)
        weights += 3 * layer.input_size * arch.hidden_size
    return 2 * num_tokens * weights


def _mixer_weights(mixer: Attention | Recurrent, hidden_size: int) -> int:
    if isinstance(mixer, Attention) and mixer.latent is not None:
        shapes = mixer.shapes(hidden_size).values()
        return sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    if isinstance(mixer, Attention):
        gate = mixer.q_size if mixer.gated else 0
        keys_and_values = (len(mixer.projections) - 1) * mixer.kv_size
        return (2 * mixer.q_size + keys_and_values + gate) * hidden_size
    return num_matrix_weights(mixer, hidden_size)


def attention_flops(arch: ModelArch, start: int, num_tokens: int) -> int:
    """Return the FLOPs of all layers' attention for a chunk: see ``layer_attention_flops``."""
    return sum(layer_attention_flops(mixer, start, num_tokens) for mixer in arch.attentions)


def layer_attention_flops(attention: Attention, start: int, num_tokens: int) -> int:
    """Return the FLOPs of one layer's attention, over the keys that each token really sees.

    Per query head and visible key: twice the key's channels for the score, twice the value's for
    the weighted sum.
    """
    window = attention.window
    per_key = 2 * attention.num_heads * (attention.key_dim + attention.value_dim)
    if not attention.causal:
        keys = num_tokens * min(start + num_tokens, 2 * (window or start + num_tokens) - 1)
        return per_key * keys
    return per_key * visible_pairs(start, num_tokens, window)


def head_flops(arch: ModelArch, num_rows: int) -> int:
    """Return the FLOPs of the output head: 2 per weight and row of logits."""
    return 2 * num_rows * arch.vocab_size * arch.hidden_size


def visible_pairs(start: int, num_tokens: int, window: int | None) -> int:
    """Return the pairs of a token and a key that it sees, of ``num_tokens`` from ``start`` on."""
    return _visible_keys(start + num_tokens, window) - _visible_keys(start, window)


def _visible_keys(num_tokens: int, window: int | None) -> int:
    """Return the sum over a sequence's first tokens of the keys each sees: 1, 2, ... window."""
    growing = num_tokens if window is None else min(num_tokens, window)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * (window or 0)
