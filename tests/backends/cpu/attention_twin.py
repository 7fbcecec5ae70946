"""Attention said again in numpy, a row at a time, in the order that the kernels promise.

``layout`` reads the cache's records from their description; everything else works on plain arrays
``[tokens, heads, channels]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ridgeline.backends.cpu.layout.shapes import AttentionLayout
from tests.backends.cpu.machine import Array, halves
from tests.backends.cpu.twins import F32, NOTHING, exp, fma, to_bytes, to_whole

LOWEST = F32(-1e30)
LEVELS = [-121, -95, -76, -60, -46, -32, -19, -6, 6, 19, 32, 46, 60, 76, 95, 121]
BORDERS = [-108, -85, -68, -53, -39, -25, -12, 0, 13, 26, 40, 54, 69, 86, 109]  # to what is above
MOST = {"f16": F32(65504), "f32": np.finfo(np.float32).max}


@dataclass
class Cached:
    """Keys and values as the cache keeps them: numbers, and for int8 a scale of each token."""

    k: Array  # [tokens, kv heads, channels]
    v: Array
    k_scale: Array | None = None  # [tokens, kv heads, spans]
    v_scale: Array | None = None  # [tokens, kv heads]

    @property
    def keys(self) -> Array:
        """What the keys stand for."""
        if self.k_scale is None:
            return self.k.astype(np.float64)
        span = self.k.shape[2] // self.k_scale.shape[2]
        return self.k * self.k_scale.astype(np.float64).repeat(span, axis=2)


def rotated(heads: AttentionLayout, x: Array, norm: Array, cos: Array, sin: Array) -> Array:
    """Norm, if any, and rope, of ``[tokens, heads, channels]``; or rope, and the norm behind it."""
    if heads.attention.qk_norm and not heads.attention.norm_turned:
        x = _normed(heads, x, norm)
    a, b, rest = np.split(x, [heads.half, 2 * heads.half], axis=2)
    c, s = cos[:, None], sin[:, None]
    turned = np.concatenate([a * c - b * s, b * c + a * s, rest], axis=2)
    return _normed(heads, turned, norm) if heads.attention.norm_turned else turned


def _normed(heads: AttentionLayout, x: Array, norm: Array) -> Array:
    vectors = x.reshape(*x.shape[:2], -1, 16)
    total = vectors[:, :, 0] * vectors[:, :, 0]
    for i in range(1, vectors.shape[2]):
        total = fma(vectors[:, :, i], vectors[:, :, i], total)
    mean = halves(total) * F32(1 / heads.num_channels)
    return x * (F32(1) / np.sqrt(mean + F32(heads.eps)))[..., None] * norm


def spans_to_bytes(heads: AttentionLayout, x: Array) -> tuple[Array, Array]:
    """Bytes of ``[..., channels]``, and the scales of spans ``[..., spans]``."""
    quantised, scale = to_bytes(x.reshape(*x.shape[:-1], -1, heads.span))
    return quantised.reshape(x.shape), scale


def turned(heads: AttentionLayout, x: Array) -> Array:
    """A Hadamard matrix times heads ``[..., channels]``, block by block, not scaled."""
    distance = 1
    while distance < heads.size & -heads.size:
        pairs = x.reshape(-1, 2, distance)
        a, b = pairs[:, 0], pairs[:, 1]
        x = np.stack([a + b, a - b], axis=1).reshape(x.shape)
        distance *= 2
    return x


def cached(heads: AttentionLayout, k: Array, v: Array) -> Cached:
    """What the cache keeps of keys and values."""
    if heads.kv_cache_dtype != "int8" and heads.is_quantised:
        (k, k_scale), (v, v_scale) = spans_to_bytes(heads, k), to_bytes(turned(heads, v))
        places = np.searchsorted(BORDERS, v, side="right")
        return Cached(k, np.array(LEVELS, np.int8)[places], k_scale, v_scale)
    if heads.kv_cache_dtype == "int8":
        (k, k_scale), (v, v_scale) = spans_to_bytes(heads, k), to_bytes(v)
        return Cached(k, v, k_scale, v_scale)
    narrow = np.float16 if heads.kv_cache_dtype == "f16" else np.float32
    most = MOST[heads.kv_cache_dtype]
    return Cached(*(np.clip(x, -most, most).astype(narrow) for x in (k, v)))


def layout(heads: AttentionLayout, records: Array, table: list[int], length: int) -> Cached:
    """The first ``length`` tokens of a sequence, from records ``[blocks, kv heads, bytes]``."""
    d, k, v, scales = heads.size, [], [], []
    for block in table:
        data = records[block]
        if heads.is_quantised:
            bytes_k = data[:, : 16 * d].reshape(-1, d // 4, 16, 4).transpose(2, 0, 1, 3)
            k.append((bytes_k.reshape(16, -1, d).astype(np.int16) - 128).astype(np.int8))
            if heads.kv_cache_dtype == "int8":
                bytes_v = data[:, 16 * d : 32 * d].reshape(-1, 4, d, 4).transpose(1, 3, 0, 2)
                v.append(bytes_v.reshape(16, -1, d).view(np.int8))
            else:
                both = data[:, 16 * d : 24 * d].reshape(-1, 4, d // 16, 8, 4)
                places = np.stack([both & 15, both >> 4], axis=3)  # of channels, then 8 further on
                by_token = places.transpose(1, 5, 0, 2, 3, 4).reshape(16, -1, d)
                v.append(np.array(LEVELS, np.int8)[by_token])
            own = data[:, -64 * (1 + d // heads.span) :].copy()
            scales.append(own.view(np.float32).reshape(len(data), -1, 16))
        else:
            kind = np.float16 if heads.kv_cache_dtype == "f16" else np.float32
            both = data.copy().view(kind).reshape(-1, 2, 16 * d)
            k.append(both[:, 0].reshape(-1, d, 16).transpose(2, 0, 1))
            v.append(both[:, 1].reshape(-1, 16, d).transpose(1, 0, 2))
    joined = [np.concatenate(part)[:length] for part in (k, v)]
    if not heads.is_quantised:
        return Cached(*joined)
    by_token = np.concatenate([part.transpose(2, 0, 1) for part in scales])[:length]
    return Cached(*joined, by_token[:, :, 1:], by_token[:, :, 0])


class Biases(Protocol):
    """What was kept out of keys, the rope tables ``[positions, half]`` that turn it, and sinks."""

    key_bias: Array
    pairs: Array
    cos: Array
    sin: Array
    sinks: Array


def attend(
    heads: AttentionLayout,
    q: Array,
    cache: Cached,
    position: int,
    window: int | None,
    biases: Biases,
) -> Array:
    """What the query ``[heads, channels]`` at a position sees, ``[heads, channels]``."""
    low = 0 if window is None else max(0, position - window + 1)
    begin, end = low // 16 * 16, position // 16 * 16 + 16
    visible = np.zeros((end - begin) // 16 * 16, bool)
    visible[low - begin : position + 1 - begin] = True
    seen = slice(begin, position + 1)
    return np.stack(
        [_attend_head(heads, h, q[h], cache, seen, visible, biases) for h in range(len(q))]
    )


def _attend_head(
    heads: AttentionLayout,
    head: int,
    q: Array,
    cache: Cached,
    seen: slice,
    visible: Array,
    biases: Biases,
) -> Array:
    softmax_scale, kv_head = F32(heads.num_channels**-0.5), head // heads.group
    k, v = (part[seen, kv_head] for part in (cache.k, cache.v))
    scores = np.zeros(len(visible), np.float32)  # what is behind the last token is not visible
    if heads.is_quantised:
        assert cache.k_scale is not None
        bytes_q, q_scale = spans_to_bytes(heads, q)
        total = np.zeros(len(k), np.float32)
        for span, scale in enumerate(cache.k_scale[seen, kv_head].T):
            part = slice(span * heads.span, (span + 1) * heads.span)
            integers = k[:, part].astype(np.int32) @ bytes_q[part].astype(np.int32)
            product = integers.astype(np.float32) * scale
            total = fma(product, q_scale[span] * softmax_scale, total)
        if heads.splits_key_bias:
            count, *pairs = biases.pairs[kv_head]
            first, second = np.split(q[: 2 * heads.half] * softmax_scale, 2)
            a, b = np.split(biases.key_bias[kv_head], 2)
            cosines, sines = fma(second, b, first * a), second * a - first * b
            for pair in pairs[:count]:
                total = fma(biases.cos[seen, pair], cosines[pair], total)
                total = fma(biases.sin[seen, pair], sines[pair], total)
        scores[: len(k)] = total
    else:
        scaled, total = q * softmax_scale, np.zeros(len(k), np.float32)
        for channel in range(heads.size):
            total = fma(k[:, channel].astype(np.float32), scaled[channel], total)
        scores[: len(k)] = total
    if heads.attention.slopes:  # the last that is seen is the query's own position
        before = np.arange(len(visible), dtype=np.float32) - F32(len(k) - 1)
        scores = fma(before, F32(heads.attention.slopes[head]), scores)
    top = max(scores[visible].max(), biases.sinks[head] if heads.attention.sinks else LOWEST)
    p = np.where(visible, exp(scores - top), F32(0))
    lanes = np.zeros(16, np.float32)
    for block in p.reshape(-1, 16):
        lanes = lanes + block
    if heads.attention.sinks:
        lanes[0] += exp(biases.sinks[head : head + 1] - top)[0]
    denominator = halves(lanes)
    if heads.is_quantised:
        assert cache.v_scale is not None
        out = _weigh_bytes(p, v, cache.v_scale[seen, kv_head], denominator)
        if heads.kv_cache_dtype == "int8":
            return out
        return turned(heads, out) * F32(1 / (heads.size & -heads.size))
    out = np.zeros(heads.size, np.float32)
    for token in range(len(v)):
        out = fma(v[token].astype(np.float32), p[token], out)
    return out * (F32(1) / denominator)


def _weigh_bytes(p: Array, v: Array, scale: Array, denominator: Array) -> Array:
    weighted = np.zeros_like(p)
    weighted[: len(v)] = p[: len(v)] * scale
    largest = weighted.max()
    steps = F32(65535) / largest if largest > NOTHING else F32(0)
    sixteen_bits = to_whole(weighted, F32(steps))[: len(v)]
    high, low = ((part @ v.astype(np.int32)) for part in (sixteen_bits >> 8, sixteen_bits & 255))
    joined = fma(high.astype(np.float32), F32(256), low.astype(np.float32))
    return joined * (largest * F32(1 / 65535) / denominator)
