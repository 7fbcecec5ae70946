"""Whether a row keeps its bits in any batch, and a text its bits however it is cut.

``CLAIMS`` has a check for each operation that sums; "correct" compares all others to the bit
(``cases.EXACT``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.measure.cases.attention import Heads, kinds_of_heads
from ridgeline.backends.cuda.measure.cases.layers import ACTIVATIONS
from ridgeline.backends.cuda.measure.inputs.adapters import adapters, plan_of
from ridgeline.backends.cuda.measure.inputs.attention import heads_inputs, texts
from ridgeline.backends.cuda.measure.inputs.layers import (
    experts,
    experts_name,
    pack_experts,
    state_inputs,
    states_plan,
)
from ridgeline.backends.cuda.measure.part import Case, Part
from ridgeline.backends.cuda.measure.shapes import models
from ridgeline.backends.cuda.model.experts import meet, meet_heads
from ridgeline.backends.cuda.packed import pack
from ridgeline.backends.cuda.step.graphs import SIZES

_CUTS = ((1299, 1300), (1290, 1300), (600, 1300), (37, 1101), (0, 3))
F32 = torch.float32


def measure(part: Part) -> None:
    """Compare rows alone with the same rows in batches of all sizes, at three places."""
    part.run(_cases(part), need_s=5)


def _cases(part: Part) -> Iterator[Case]:
    for claims in CLAIMS.values():
        yield from claims(part)


def _attentions(part: Part) -> Iterator[Case]:
    for name, heads, how in kinds_of_heads(part):
        yield name, partial(_attention, part, name, heads, how)


def _attention(part: Part, name: str, heads: Heads, how: dict[str, Any]) -> None:
    whole = texts(part, heads, [(0, 1300)], **how)
    wanted = part.ops.attend(*whole.given())
    for start, end in _CUTS:
        actual = part.ops.attend(*whole.piece(start, end).given())
        is_same = torch.equal(actual, wanted[start:end])
        part.same_bits(f"{name}, tokens {start} to {end} alone", is_same)


def _by_matrix(part: Part, claim: Callable[..., None]) -> Iterator[Case]:
    for name, shape in models(part).items():
        for matrix, size in shape.matrices().items():
            what = f"{name} {matrix}"
            yield f"{what} {claim.__name__}", partial(claim, part, what, size)


def _product(part: Part, name: str, size: tuple[int, int]) -> None:
    weight, rows = _matrix(part, size)
    _rows_alone(part, f"{name}, ours", lambda x: part.ops.product(x, weight, None), rows)
    bad = _differing(lambda x: torch.nn.functional.linear(x, weight), rows, _sizes(part))
    part.say(f"{name}, torch", same_bits=not bad)  # what a library would do: nothing depends on it


def _packed(part: Part, name: str, size: tuple[int, int]) -> None:
    weight, rows = _matrix(part, size)
    for bits in (8, 4):
        packed = pack(weight, bits)
        call = partial(_packed_rows, part, packed)
        _rows_alone(part, f"{name}, int{bits}", call, rows)


def _packed_rows(part: Part, packed: Any, x: Tensor) -> Tensor:
    out: Tensor = part.ops.packed_product(x, packed, None)
    return out


def _matrix(part: Part, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    N, K = size
    return part.normal(N, K, scale=K**-0.5), part.normal(max(_sizes(part)), K)


def _groups(part: Part) -> Iterator[Case]:
    for bits in (0, 4) if part.is_tiny else (0, 8, 4):
        yield experts_name(bits), partial(_experts, part, bits)
    yield "matrices of heads", partial(_heads, part)


def _experts(part: Part, bits: int) -> None:
    x, *weights, met = experts(part, max(_sizes(part)))
    gate_up, down = (pack_experts(weight, bits) for weight in weights)
    chosen = torch.empty_like(met.order)
    of_pair = torch.arange(len(met.order), device=part.device)
    chosen[met.order] = torch.searchsorted(met.offsets, of_pair, right=True) - 1
    chosen = chosen.reshape(len(x), -1)

    def products(rows: Tensor) -> Tensor:  # each row has its token's number behind it
        tokens = rows[:, -1].long()
        here = meet(chosen[tokens], len(met.offsets) - 1)
        inner = part.ops.grouped_product(x[tokens], gate_up, None, here, True)
        out: Tensor = part.ops.grouped_product(inner, down, None, here, False)
        return out.reshape(len(rows), -1)

    numbers = torch.arange(len(x), device=part.device, dtype=torch.float64)[:, None]
    _rows_alone(part, experts_name(bits), products, numbers)


def _heads(part: Part) -> None:
    heads, outputs, inputs = (6, 20, 12) if part.is_tiny else (128, 512, 128)
    weight = part.normal(heads, outputs, inputs)

    def products(rows: Tensor) -> Tensor:
        met = meet_heads(len(rows), heads, part.device)
        given = rows.reshape(len(rows), heads, inputs).transpose(0, 1).reshape(-1, inputs)
        out: Tensor = part.ops.grouped_product(given, weight, None, met, False)
        return out.reshape(len(rows), -1)

    _rows_alone(part, "matrices of heads", products, part.normal(max(_sizes(part)), heads * inputs))


def _low_rank(part: Part) -> Iterator[Case]:
    yield "adapters", partial(_adapters, part)


def _adapters(part: Part) -> None:
    loaded, sizes, inputs = adapters(part)
    x = part.normal(max(_sizes(part)), inputs)

    def products(rows: Tensor) -> Tensor:  # each has its token's number, which chooses its adapter
        tokens = rows[:, 0].long()
        slots = (tokens + 1) % (len(loaded) + 1)
        out = x.new_zeros((len(rows), sum(sizes)))
        met = meet(slots[:, None], len(loaded))
        part.ops.add_low_rank(out, x[tokens], met, plan_of(part, loaded, slots), 0, sizes)
        return out

    numbers = torch.arange(len(x), device=part.device, dtype=torch.float64)[:, None]
    _rows_alone(part, "adapters", products, numbers)


def _rowwise(part: Part) -> Iterator[Case]:
    """Yield the operations that have a program for each row or value."""
    width = 40 if part.is_tiny else 4096
    weight = part.normal(width, dtype=F32)
    for kind in ("rms", "layer"):
        call = partial(_norm, part, weight, kind)
        yield f"norm {kind}", partial(_of_rows, part, f"norm {kind}", call, width)
        call = partial(_add_norm, part, weight, kind)
        yield f"add_norm {kind}", partial(_of_rows, part, f"add_norm {kind}", call, width)
    for activation in ACTIVATIONS:
        call = partial(_gate, part, activation)
        yield f"gate {activation}", partial(_of_rows, part, f"gate {activation}", call, width)


def _norm(part: Part, weight: Tensor, kind: str, x: Tensor) -> Tensor:
    out: Tensor = part.ops.norm(x, weight, None, 1e-5, kind, part.dtype)
    return out


def _add_norm(part: Part, weight: Tensor, kind: str, x: Tensor) -> Tensor:
    stream = x.float() * 2
    post = (weight, None)
    out: Tensor = part.ops.add_norm(stream, x, 0.5, post, weight, None, 1e-5, kind, part.dtype)
    return torch.cat([out.float(), stream], 1)


def _gate(part: Part, activation: str, x: Tensor) -> Tensor:
    out: Tensor = part.ops.gate(x, activation, True, 0.7)
    return out


def _of_rows(part: Part, what: str, call: Callable[[Tensor], Tensor], width: int) -> None:
    _rows_alone(part, what, call, part.normal(max(_sizes(part)), width))


def _ropes(part: Part) -> Iterator[Case]:
    for qk_norm in (0, 1, 2):
        yield f"rope norm {qk_norm}", partial(_rope, part, f"rope norm {qk_norm}", qk_norm)


def _rope(part: Part, what: str, qk_norm: int) -> None:
    H, K, D = (4, 2, 12) if part.is_tiny else (32, 8, 128)
    given = heads_inputs(part, HeadSpec(H=H, K=K, D=D, half=D // 2, scale=1.0, qk_norm=qk_norm))

    def queries(rows: Tensor) -> Tensor:
        count = len(rows)
        blocks = given["cache"].new_zeros((1, *given["cache"].shape[1:]))
        zeros = torch.zeros(count, dtype=torch.int32, device=part.device)
        where = {"positions": zeros + 3, "table_rows": zeros, "tables": zeros[:1, None]}
        own = {"qkv": rows, "cache": blocks, "poison": zeros.clone(), **where}
        out: Tensor = part.ops.rope_and_cache(**given | own)
        return out.flatten(1)

    _rows_alone(part, what, queries, part.normal(max(_sizes(part)), (H + 2 * K) * D))


def _recurrences(part: Part) -> Iterator[Case]:
    for op, behind in (("convolve", ()), ("scan", ()), ("remember", (False,))):
        yield f"{op} of a text cut", partial(_recurrence, part, op, behind)


def _recurrence(part: Part, op: str, behind: tuple[bool, ...]) -> None:
    """Compare a text read whole, beside another one, with the same text read in pieces."""
    count = 40
    given, states = state_inputs(part, op, count + 5 + 2)
    per_token = {"convolve": 1, "scan": 5, "remember": 5}[op]
    rows, weights = given[:per_token], given[per_token:]
    together = states.clone()
    plan = states_plan(part, ((9, count, 2), (0, 5, 0)))
    wanted = getattr(part.ops, op)(*rows, *weights, together, *behind, plan)[:count]
    for pieces in ((39, 1), (1,) * 5 + (35,), (7, 33)):
        alone, outputs, first = states.clone(), list[Tensor](), 0
        for number, size in enumerate(pieces):
            if number:  # the state that the piece before wrote
                alone[4] = alone[5]
            here = states_plan(part, ((9, size, 2),))
            taken = [one[first : first + size] for one in rows]
            taken = [torch.cat([one, one.new_zeros((2, *one.shape[1:]))]) for one in taken]
            out = getattr(part.ops, op)(*taken, *weights, alone, *behind, here)
            outputs.append(out[:size])
            first += size
        is_same = torch.equal(torch.cat(outputs), wanted) and torch.equal(alone[5], together[5])
        part.same_bits(f"{op} of a text in {len(pieces)} pieces", is_same, pieces=pieces)


def _sizes(part: Part) -> Sequence[int]:
    return (1, 2, 40) if part.is_tiny else SIZES


def _rows_alone(part: Part, what: str, call: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    sizes = _sizes(part)
    bad = _differing(call, rows, sizes)
    part.same_bits(what, not bad, sizes=len(sizes), bad=bad[:6])


def _differing(
    call: Callable[[Tensor], Tensor], rows: Tensor, sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Return sizes and places at which the first row has other bits than alone."""
    alone, bad = call(rows[:1])[0], []
    for size in sizes:
        for place in sorted({0, size // 2, size - 1}):
            batch = rows[:size].clone()
            batch[[0, place]] = batch[[place, 0]]
            if not torch.equal(call(batch)[place], alone):
                bad.append((size, place))
    return bad


CLAIMS: Mapping[str, Callable[[Part], Iterator[Case]]] = {
    "attend": _attentions,
    "product": partial(_by_matrix, claim=_product),
    "packed_product": partial(_by_matrix, claim=_packed),
    "grouped_product": _groups,
    "add_low_rank": _low_rank,
    "norm, add_norm, gate": _rowwise,
    "rope_and_cache": _ropes,
    "convolve, scan, remember": _recurrences,
}
