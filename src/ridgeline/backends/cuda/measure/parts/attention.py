"""How fast attention is, beside torch's own on contiguous keys, which is easier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F

from ridgeline.backends.cuda.measure.inputs.attention import texts
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.measure.shapes import Shape, models

_BEYOND_CACHE_BYTES = 8 << 30  # of keys and values of all layers together
_DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (64, 8192), (4, 32768))


def measure(part: Part) -> None:
    """Measure single tokens with long contexts, and prompts."""
    part.run(_cases(part), need_s=5)


def _cases(part: Part) -> Iterator[Case]:
    shapes = models(part, "llama3-8b", "qwen2.5-7b")
    for name, shape in shapes.items():
        for length in (64,) if part.is_tiny else (2048, 8192):
            yield f"prefill {name} {length}", partial(_prefill, part, name, shape, length)
        for batch, context in ((2, 64),) if part.is_tiny else _DECODES:
            what = f"decode {name} {batch} x {context}"
            yield what, partial(_decode, part, what, shape, batch, context)


def _decode(part: Part, what: str, shape: Shape, batch: int, context: int) -> None:
    num_bytes = 2 * shape.kv_heads * shape.head_dim * context * batch * part.dtype.itemsize
    layers = 2 if part.is_tiny else min(16, max(2, _BEYOND_CACHE_BYTES // num_bytes))
    of = texts(part, shape.of_heads, [(context - 1, context)] * batch, layers=layers)
    given = [of.given(layer=layer) for layer in range(layers)]
    took_s = part.seconds(lambda: [part.ops.attend(*one) for one in given], layers)
    keys, values = of.contiguous()
    q = of.q[:, :, None]
    peer_s = part.peer_seconds(
        lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    )
    part.say(
        what,
        us=took_s * 1e6,
        tb_per_s=num_bytes / took_s / 1e12,
        sdpa_us=peer_s and peer_s * 1e6,
        num_bytes=num_bytes,
    )


def _prefill(part: Part, name: str, shape: Shape, length: int) -> None:
    of = texts(part, shape.of_heads, [(0, length)])
    flops = 2 * length * length * shape.heads * shape.head_dim  # the mask leaves half of all pairs
    given = of.given()
    took_s = part.seconds(lambda: part.ops.attend(*given))
    keys, values = of.contiguous()
    q = of.q.transpose(0, 1)[None].contiguous()
    peer_s = part.peer_seconds(
        lambda: F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    )
    part.say(
        f"prefill {name} {length}",
        tflops_per_s=flops / took_s / 1e12,
        sdpa_tflops_per_s=peer_s and flops / peer_s / 1e12,
    )
