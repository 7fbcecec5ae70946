"""Each kernel against its twin in float64; draws token by token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ridgeline.backends.cuda import twins
from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.measure.inputs import draws, experts, heads_inputs, texts
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.packed import pack
from ridgeline.core.params import SamplingParams

_ERROR = {"f32": 1e-5, "bf16": 1e-2}
_ATTENTION: tuple[dict[str, Any], ...] = (
    {}, {"window": 70}, {"softcap": 30.0}, {"has_sinks": True}, {"has_slopes": True},
)  # fmt: skip
_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
)  # fmt: skip
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")
# A prompt, a long text's next token, a piece of a prompt, tokens at borders of blocks.
_MIXED = [(0, 70), (600, 601), (40, 75), (5, 6), (127, 129), (0, 1)]
_SINGLES = [(700, 701), (15, 16), (256, 257), (0, 1)]


def measure(part: Part) -> None:
    """Compare all kernels."""
    part.run(_cases(part))


def _cases(part: Part) -> Iterator[Case]:
    heads = [(32, 8, 128), (28, 4, 128), (32, 32, 64), (9, 3, 64), (8, 1, 256)]
    heads = [(8, 2, 16), (4, 4, 16)] if part.is_tiny else heads
    for i, how in enumerate(_ATTENTION):
        for of in heads[:1] if i else heads:
            name = f"attend {_named(of)} {' '.join(how)}".rstrip()
            yield name, partial(_attend, part, name, of, how)
    for of in heads:
        for norm in (0, 1, 2) if of == heads[0] else (0,):
            yield f"rope {_named(of)}", partial(_rope, part, of, norm)
    yield "norms", partial(_norms, part)
    yield "gates", partial(_gates, part)
    yield "copies of blocks", partial(_copies, part)
    for rows in (1, 5) if part.is_tiny else (1, 7, 16, 64, 100, 256, 300, 2048):
        yield f"products {rows}", partial(_products, part, rows)
    for tokens in (3, 40) if part.is_tiny else (1, 64, 700):
        yield f"experts {tokens}", partial(_experts, part, tokens)
    for vocabulary in (1000,) if part.is_tiny else (1000, 128256):
        for how in _DRAWS:
            yield f"draw {vocabulary} {how}", partial(_draw, part, vocabulary, how)


def _named(heads: tuple[int, int, int]) -> str:
    return "{}/{} x {}".format(*heads)


def _attend(part: Part, name: str, heads: tuple[int, int, int], how: dict[str, Any]) -> None:
    for what, pieces in (("mixed", _MIXED), ("single tokens", _SINGLES)):
        of = texts(part, heads, pieces, **how)
        found = part.ops.attend(*of.given())
        part.near(f"{name}, {what}", found, of.exact(), _ERROR[part.dtype_name])


def _rope(part: Part, heads: tuple[int, int, int], qk_norm: int) -> None:
    H, K, D = heads
    ours = heads_inputs(part, HeadSpec(H=H, K=K, D=D, half=D // 2, scale=D**-0.5, qk_norm=qk_norm))
    exact = {
        name: given.clone() if torch.is_tensor(given) else given for name, given in ours.items()
    }
    exact |= {"qkv": ours["qkv"].double(), "cache": ours["cache"].double()}
    q, q_exact = part.ops.rope_and_cache(**ours), twins.rope_and_cache(**exact)
    live = (ours["table_rows"] >= 0) & (ours["poison"] == 0)  # all others may be anything
    what, most = f"{_named(heads)} norm {qk_norm}", _ERROR[part.dtype_name]
    part.near(f"rope {what}, queries", q[live], q_exact[live], most)
    part.near(f"rope {what}, cache", ours["cache"], exact["cache"], most)
    is_same = bool(torch.equal(ours["poison"], exact["poison"]))
    part.say(f"rope {what}, poison", ok=is_same and int(ours["poison"].sum()) == 1)


def _norms(part: Part) -> None:
    rows, width = (5, 128) if part.is_tiny else (300, 4096)
    x = part.normal(rows, width, dtype=torch.float32)
    weight, bias = part.normal(2, width, dtype=torch.float32)
    delta, f64, most = part.normal(rows, width), torch.float64, _ERROR[part.dtype_name]
    for kind in ("rms", "layer"):
        found = part.ops.norm(x, weight, bias, 1e-5, kind, part.dtype)
        part.near(
            f"norm {kind}", found, twins.norm(x.double(), weight, bias, 1e-5, kind, f64), most
        )
        for post in (None, (weight, bias)):
            ours, exact = x.clone(), x.double()
            found = part.ops.add_norm(ours, delta, 0.5, post, weight, bias, 1e-5, kind, part.dtype)
            wanted = twins.add_norm(exact, delta.double(), 0.5, post, weight, bias, 1e-5, kind, f64)
            what = f"add_norm {kind}{', post' if post else ''}"
            part.near(what, found, wanted, most)
            part.near(f"{what}, residual", ours, exact, 1e-5)


def _gates(part: Part) -> None:
    inner = part.normal(*((5, 256) if part.is_tiny else (300, 8192)))
    for activation in _ACTIVATIONS:
        for gated in (True,) if activation == "swiglu_clamped" else (True, False):
            found = part.ops.gate(inner, activation, gated, 1.0)
            wanted = twins.gate(inner.double(), activation, gated, 1.0)
            what = f"gate {activation}{'' if gated else ', no gate'}"
            part.near(what, found, wanted, _ERROR[part.dtype_name])


def _copies(part: Part) -> None:
    blocks = part.normal(9, 4096 + 16)
    wanted = blocks.clone()
    old, new = (torch.tensor(ids, device=part.device) for ids in ([3, 5, 8], [5, 0, 1]))
    wanted[new] = wanted[old]
    part.ops.copy_blocks(blocks, old, new)
    part.say("copies of blocks", ok=bool(torch.equal(blocks, wanted)))


def _products(part: Part, rows: int) -> None:
    N, K = (192, 128) if part.is_tiny else (2048, 4096)
    most = _ERROR[part.dtype_name]
    weight = part.normal(N, K, scale=K**-0.5)
    x, bias = part.normal(rows, K), part.normal(N, dtype=torch.float32)
    exact = x.double() @ weight.double().T
    part.near(f"product {rows}", part.ops.product(x, weight, None), exact, most)
    wide = part.ops.product(x, weight, bias, torch.float32)
    part.near(f"product {rows}, bias, float32", wide, exact + bias.double(), most)
    for bits in (8, 4):
        packed = pack(weight, bits)
        exact = x.double() @ packed.wide().to(part.dtype).double().T
        found = part.ops.packed_product(x, packed, bias)
        part.near(f"int{bits} product {rows}", found, exact + bias.double(), most)


def _experts(part: Part, num_tokens: int) -> None:
    x, gate_up, down, met = experts(part, num_tokens)
    inner = part.ops.grouped_product(x, gate_up, None, met, True)
    wanted = twins.grouped_product(x.double(), gate_up.double(), None, met, True)
    part.near(f"experts {num_tokens}, first", inner, wanted, _ERROR[part.dtype_name])
    made = part.ops.grouped_product(inner, down, None, met, False)
    wanted = twins.grouped_product(inner.double(), down.double(), None, met, False)
    part.near(f"experts {num_tokens}, second", made, wanted, _ERROR[part.dtype_name])


def _draw(part: Part, vocabulary: int, how: dict[str, Any]) -> None:
    given = draws(part, SamplingParams(**how), 8 if part.is_tiny else 32, vocabulary)
    has_filters = bool(how.get("top_k") or how.get("top_p"))
    call = partial(part.ops.draw, *given, has_filters=has_filters)
    picked, finite = call()
    wanted, _ = twins.draw(*given)
    ok = torch.equal(picked, wanted) and bool((finite == 1).all())
    named = " ".join(f"{name} {value}" for name, value in how.items())
    part.say(f"draw of {vocabulary}, {named}", ok=ok, us=1e6 * part.seconds(call, repeats=3))
