"""The time of a step on a device that is not here: a rounded roofline with six fitted constants.

    seconds = o layers (1 + 2 [tp > 1]) + a sequences
              + roof(products / (F e_c), weights / (B e_m))
              + roof(attention / (F e_a), cache / (B e_m)),    roof(x, y) = (x^p + y^p)^(1/p)

There are two roofs, as products and attention run one after the other: while the weights are
multiplied, no cache is read. Bytes and flops come from a model's shape, F and B from the catalogue.
``o`` is what a layer costs however little it does, ``a`` what a sequence costs in each step
(sampling, scheduling, its part of attention), ``e_c``, ``e_a`` and ``e_m`` are what kernels reach
in products, in attention and of the memory, ``p`` rounds the corner (after Williams, Waterman and
Patterson, "Roofline", 2009). Constants were fitted to published figures of one engine on one
generation of devices and carry their own error, so a time is always an interval.
A first token takes a server more than its step: time for the request itself, and for a share of the
prompts of clients that begin at the same time.
What ranks send each other is added where the link is known. It names no device and opens no file.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.model.cost.costs import STATE_VALUE_BYTES, Features
from ridgeline.model.cost.format_bytes import Storage
from ridgeline.model.cost.hardware import Device
from ridgeline.model.cost.shapes import Matrix, ModelShape

_ALL = "all"  # the row of an engine's constants for generations without figures of their own
_OTHER = "other"  # the row of engines without figures of their own
_HOP_S = 1e-5  # from one stage of a pipeline to the next (AIConfigurator's figure)
_TYPICAL_REACH = 0.78  # of a dense peak that was not measured: the median of those measured


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Constants of an engine on a generation of devices.

    Attributes:
        engine: whose figures they were fitted to.
        generation: of devices; "all" for the rest.
        layer_s: seconds that a layer takes for nothing (``o``).
        memory, compute: parts of bandwidth and arithmetic that kernels reach (``e_m``, ``e_c``).
        attention: part of arithmetic that attention reaches (``e_a``).
        seq_s: seconds that a sequence takes in each step (``a``).
        power: rounds the corner between both (``p``).
        request_s: seconds that a server takes for a request before its first token, besides steps.
        queue_share: of the prompts that are there when all clients begin at once, how much a
            first token waits for in the mean.
        num_points: published figures behind them.
        error: mean of abs(log(actual / predicted)) of figures that were left out.
        factor_90: nine in ten figures that were left out are within this factor.
        first_factor_90: the same, of times to the first token.
        source: of the figures.
    """

    engine: str
    generation: str
    layer_s: float
    memory: float
    compute: float
    attention: float
    seq_s: float
    power: float
    request_s: float
    queue_share: float
    num_points: int
    error: float
    factor_90: float
    first_factor_90: float
    source: str


def parse_efficiencies(text: str) -> tuple[Efficiency, ...]:
    """Return the rows of ``data/efficiency.csv``. Raises ValueError for a damaged one."""
    efficiencies = []
    for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        try:
            efficiencies.append(
                Efficiency(
                    engine=row["engine"],
                    generation=row["generation"],
                    layer_s=float(row["o_us"]) * 1e-6,
                    memory=float(row["e_m"]),
                    compute=float(row["e_c"]),
                    attention=float(row["e_a"]),
                    seq_s=float(row["seq_us"]) * 1e-6,
                    power=float(row["p"]),
                    request_s=float(row["request_ms"]) * 1e-3,
                    queue_share=float(row["queue_share"]),
                    num_points=int(row["num_points"]),
                    error=float(row["loo_error"]),
                    factor_90=float(row["factor_90"]),
                    first_factor_90=float(row["first_factor_90"]),
                    source=row["source"],
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"efficiency.csv, line {number}: {error}") from error
    return tuple(efficiencies)


def efficiency_of(device: Device, engine: str, rows: tuple[Efficiency, ...]) -> Efficiency:
    """Return the constants of an engine on a device: of its generation, else of all generations.

    Engines without a row take what was fitted to all others. An error is of what was left out: of
    models, of generations, or of engines; of a new generation it is no less than of any known one.
    """
    known = {(row.engine, row.generation): row for row in rows}
    own = known.get((engine, device.generation))
    if own is not None:
        return own
    alike = [row for row in rows if row.engine == engine] or rows
    worst, of_first = (
        max(alike, key=lambda row: row.factor_90), max(row.first_factor_90 for row in alike)
    )  # fmt: skip
    return replace(
        known.get((engine, _ALL), known[_OTHER, _ALL]),
        error=worst.error, factor_90=worst.factor_90, first_factor_90=of_first,
    )  # fmt: skip


class ExpertWork(NamedTuple):
    """Matrices of which a token meets a share: their bytes on a rank, and that share."""

    num_bytes: float
    share: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a model computes and reads on one of ``tp`` ranks, per count.

    Attributes:
        num_layers: all of them, over all stages.
        hidden_size: width of the residual stream.
        layer_bytes: weights that every step reads.
        experts: weights of which a step reads what its tokens meet.
        head_bytes: of the output head.
        token_flops, row_flops, pair_flops: of a token, a row of the head, a query and a key.
        position_bytes: cache that attention reads for a position.
        seq_bytes: state that a step reads and writes for a sequence.
        windows: (window, share of layers that have it); states count as a window of one.
    """

    num_layers: int
    hidden_size: int
    layer_bytes: float
    experts: tuple[ExpertWork, ...]
    head_bytes: float
    token_flops: float
    row_flops: float
    pair_flops: float
    position_bytes: float
    seq_bytes: float
    windows: tuple[tuple[int, float], ...]


def work_of(shape: ModelShape, storage: Storage, kv_value_bytes: float, tp: int = 1) -> StepWork:
    """Return what one rank computes and reads. Mixed layers are taken at their mean."""
    layer_bytes = head_bytes = token_flops = row_flops = 0.0
    experts: dict[float, float] = {}
    for name, matrix in shape.matrices():
        size, flops = _of_matrix(storage, name, matrix, tp)
        if matrix.group == "head" or (matrix.group == "embedding" and shape.is_tied):
            head_bytes += size
            row_flops += flops
        elif matrix.group == "embedding":
            continue  # a row of it is looked up
        elif matrix.copies > 1:
            share = matrix.active / matrix.copies
            experts[share] = experts.get(share, 0.0) + size
            token_flops += flops
        else:
            layer_bytes += size
            token_flops += flops
    caches = [layer.cache for layer in shape.layers]
    states = sum(cache.state_values / min(tp, cache.num_heads) for cache in caches)
    return StepWork(
        num_layers=len(shape.layers),
        hidden_size=shape.hidden_size,
        layer_bytes=layer_bytes,
        experts=tuple(ExpertWork(size, share) for share, size in sorted(experts.items())),
        head_bytes=head_bytes,
        token_flops=token_flops,
        row_flops=row_flops,
        pair_flops=sum(_pair_flops(layer.matrices, tp) for layer in shape.layers),
        position_bytes=sum(cache.values_per_token(tp) for cache in caches) * kv_value_bytes,
        seq_bytes=2 * STATE_VALUE_BYTES * states,
        windows=_windows(shape),
    )


def _of_matrix(storage: Storage, name: str, matrix: Matrix, tp: int) -> tuple[float, float]:
    """Return bytes and flops of a token, on one rank."""
    kept, ways = storage.of(name, matrix), min(tp, matrix.ways)
    size = (kept.values_bytes(matrix) + kept.scales_bytes(matrix)) / ways
    return size, 2 * matrix.num_active_params / ways if matrix.columns > 1 else 0.0


def _pair_flops(matrices: tuple[Matrix, ...], tp: int) -> float:
    """Return the flops of a query and a key: a product of each head, and as much for its value."""
    outputs = (m for m in matrices if m.name == "self_attn.o_proj" and m.columns > 1)
    return sum(4 * m.columns / min(tp, m.ways) for m in outputs)


def _windows(shape: ModelShape) -> tuple[tuple[int, float], ...]:
    sizes = [1 if layer.cache.state_values else layer.cache.window for layer in shape.layers]
    windows = [size for size in sizes if size is not None]
    return tuple((size, windows.count(size) / len(sizes)) for size in sorted(set(windows)))


def reached_ops_per_s(device: Device, form: str) -> float | None:
    """Return what products of a type reach at most: measured, or the peak times what others reach.

    None where the device has no units for the type.
    """
    if form in device.measured_ops_per_s or form not in device.peak_ops_per_s:
        return device.measured_ops_per_s.get(form)
    known = [(device.measured_ops_per_s[f], device.peak_ops_per_s[f])
             for f in device.measured_ops_per_s if f in device.peak_ops_per_s]  # fmt: skip
    reach = max(measured / peak for measured, peak in known) if known else _TYPICAL_REACH
    return device.peak_ops_per_s[form] * reach


def ops_per_s(device: Device, storage: Storage) -> tuple[float, float]:
    """Return what the device reaches in products of the weights, and in attention.

    Formats that only weights have are widened to 16 bits first. NVFP4 is one of them where there
    are no units for 4 bits. Raises ValueError for a device
    of which no arithmetic is known.
    """
    wide = reached_ops_per_s(device, "bf16") or reached_ops_per_s(device, "f16")
    if wide is None:
        raise ValueError(f"{device.id}: nothing is known of its arithmetic")
    name = storage.linear.name.partition(" ")[0]
    form = "fp4" if name == "nvfp4" else name  # of mxfp4 only weights have 4 bits
    narrow = reached_ops_per_s(device, form) if form in ("fp8", "int8", "fp4") else None
    if name == "f32":
        single = device.measured_ops_per_s.get("f32", wide / 2)
        return single, single
    return max(wide, narrow or 0.0), wide


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """A model of time (``foresight.simulator.run.Times``) of a replica of ``tp`` x ``pp`` devices.

    Stages of a pipeline work on ``pp`` parts of a step side by side, so each part goes through all
    layers with a ``pp``-th of the step's tokens.

    Attributes:
        work: of one rank.
        efficiency: the constants.
        ops_per_s, attention_ops_per_s, read_bytes_per_s: of one device.
        link_bytes_per_s: between devices; 0 where it is not known, or not needed.
        tp, pp: how the model is divided.
        factor: all times are multiplied by it.
    """

    work: StepWork
    efficiency: Efficiency
    ops_per_s: float
    attention_ops_per_s: float
    read_bytes_per_s: float
    link_bytes_per_s: float = 0.0
    tp: int = 1
    pp: int = 1
    factor: float = 1.0

    @property
    def windows(self) -> tuple[tuple[int, float], ...]:
        """The windows of the model's layers."""
        return self.work.windows

    def parts(self, counts: Features) -> Mapping[str, float]:
        """Return the seconds of a step by what they go into, were each alone."""
        work, efficiency = self.work, self.efficiency
        tokens = max(1.0, counts.num_tokens / self.pp)
        rows, seqs = counts.num_rows / self.pp, counts.num_seqs / self.pp
        positions, pairs = counts.num_positions / self.pp, counts.num_pairs / self.pp
        read = work.layer_bytes + (work.head_bytes if counts.num_rows else 0.0)
        read += sum(part.num_bytes * (1 - (1 - part.share) ** tokens) for part in work.experts)
        cached = work.position_bytes * positions + work.seq_bytes * seqs
        bytes_per_s = self.read_bytes_per_s * efficiency.memory
        linear = work.token_flops * tokens + work.row_flops * rows
        attention_s = work.pair_flops * pairs / self.attention_ops_per_s
        layers = work.num_layers * (3 if self.tp > 1 else 1)
        sent = 0.0
        if self.tp > 1 and self.link_bytes_per_s:
            # Two sums over all ranks a layer, in a ring, of 16-bit values.
            ring = 2 * (self.tp - 1) / self.tp
            sent = 2 * work.num_layers * ring * 2 * work.hidden_size * tokens
            sent /= self.link_bytes_per_s
        return {
            "overhead": efficiency.layer_s * layers + _HOP_S * (self.pp - 1),
            "weights": read / bytes_per_s,
            "cache": cached / bytes_per_s,
            "compute": linear / self.ops_per_s / efficiency.compute,
            "attention": attention_s / efficiency.attention,
            "sequences": efficiency.seq_s * seqs,
            "link": sent,
        }

    def seconds(self, counts: Features) -> float:
        """Return the seconds of a step."""
        parts, power = self.parts(counts), self.efficiency.power
        products = _roof(parts["compute"], parts["weights"], power)
        attention = _roof(parts["attention"], parts["cache"], power)
        beside = parts["overhead"] + parts["sequences"] + parts["link"]
        return self.factor * (beside + products + attention)

    def scaled(self, factor: float) -> DeviceTime:
        """Return the model of a device on which all takes ``factor`` times as long."""
        return replace(self, factor=factor * self.factor)

    def after(self, num_rows: int, num_ended: int) -> float:
        """Return 0: what comes between steps is in the overhead."""
        return 0.0


def _roof(compute_s: float, read_s: float, power: float) -> float:
    """Return the time of kernels that compute and read side by side."""
    return float((compute_s**power + read_s**power) ** (1 / power))


def device_time(
    shape: ModelShape, storage: Storage, kv_value_bytes: float, device: Device,
    efficiency: Efficiency, tp: int = 1, pp: int = 1,
) -> DeviceTime:  # fmt: skip
    """Return the model of time of a model on devices of a kind. Raises ValueError as ops_per_s."""
    products, attention = ops_per_s(device, storage)
    return DeviceTime(
        work_of(shape, storage, kv_value_bytes, tp),
        efficiency,
        ops_per_s=products,
        attention_ops_per_s=attention,
        read_bytes_per_s=device.read_bytes_per_s,
        link_bytes_per_s=device.link_bytes_per_s if tp > 1 else 0.0,
        tp=tp,
        pp=pp,
    )
