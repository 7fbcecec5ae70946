"""Which model of time holds for a model here: what was measured of it, or else a roofline.

Where no model was measured, a roofline stands in, and it says so: with the rates of this machine's
roof, if that was measured, else with assumed ones.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from ridgeline.backends import BACKENDS
from ridgeline.engine.calibration.store import calibration_path, kept_calibration, kept_roof
from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.foresight.step_time.features import StepTime, windows_of
from ridgeline.foresight.step_time.roof import COMPUTE_SHARE, MEMORY_SHARE, KeptRoof
from ridgeline.model.cost import costs
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import processor_name
from ridgeline.version import __version__

# Assumed of a processor that was not measured; of each thread, up to the most.
_READ_BYTES_PER_S, _MOST_BYTES_PER_S = 12e9, 100e9
_OPS_PER_S = 150e9
LAYER_S = 25e-6  # meeting of threads, norms, the cache
_AFTER_S, _AFTER_PER_ROW_S = 1e-4, 2e-6


def known(home: Path | None, model: Path, arch: ModelArch, config: EngineConfig) -> Calibration:
    """Return the newest calibration of what will run, if ``home`` has one; else an assumed one."""
    return all_known(home, model, arch, config)[0]


def all_known(
    home: Path | None, model: Path, arch: ModelArch, config: EngineConfig
) -> list[Calibration]:
    """Return what was measured of what will run and what servers learnt, the newest first.

    If ``home`` has neither, it is an assumed one.
    """
    if home is None:
        return [assume(model, arch, config)]
    wanted = assume(model, arch, config, kept_roof(home))
    paths = (calibration_path(home, replace(wanted, source=one)) for one in ("measured", "served"))
    found = [one for path in paths if (one := kept_calibration(path)) and one.is_of(wanted)]
    weights_bytes, kv_bytes = wanted.weights_bytes, wanted.kv_bytes_per_token
    found = [
        replace(one, weights_bytes=weights_bytes, kv_bytes_per_token=kv_bytes) for one in found
    ]
    return sorted(found, key=lambda one: one.measured_at, reverse=True) or [wanted]


def assume(
    model: Path, arch: ModelArch, config: EngineConfig, roof: KeptRoof | None = None
) -> Calibration:
    """Return what can be said of a model that was not measured here, where the roof is as given."""
    weights_bytes, kv_bytes = bytes_of(arch, config)
    return Calibration(
        model=model.name,
        arch=hashlib.sha256(repr(arch).encode()).hexdigest()[:10],
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        backend=config.backend,
        threads=config.threads,
        processor=processor_name(),
        source="assumed",
        measured_at=0.0,
        version=__version__,
        times=_roofline(arch, config, roof),
        step_error=None,
        total_error=None,
        factors=(),
        samples=(),
        after=(),
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes,
    )


def bytes_of(arch: ModelArch, config: EngineConfig) -> tuple[int, int]:
    """Return the bytes of all weights in memory, and of a token in the cache."""
    whole = replace(config, groups=())  # in one group a token has all layers
    footprint = BACKENDS[config.backend].footprint(arch, whole)
    return config.weights_bytes, footprint.kv_bytes_per_token


def _roofline(arch: ModelArch, config: EngineConfig, roof: KeptRoof | None) -> StepTime:
    """Return the model of time of a roof's rates; of assumed ones without it.

    A step computes and reads at the same time, but not perfectly: the two times are added as the
    sides of a right angle (Williams et al., "Roofline", 2009, with the corner rounded).
    """
    read_per_s = min(config.threads * _READ_BYTES_PER_S, _MOST_BYTES_PER_S)
    ops_per_s = config.threads * _OPS_PER_S
    if roof is not None and config.backend == "cpu":  # whose kernels the roof was measured with
        form = config.dtype if config.dtype in ("bf16", "f32") else "int8"
        read_per_s = MEMORY_SHARE * roof.read_bytes_per_s(config.threads)
        ops_per_s = COMPUTE_SHARE * roof.ops_per_s(form, config.threads)
    weights_bytes, kv_bytes = bytes_of(arch, config)
    weights_s = weights_bytes / read_per_s

    def step_s(num_tokens: int) -> float:
        ops_s = costs.linear_flops(arch, num_tokens) / ops_per_s
        return arch.num_layers * LAYER_S + math.hypot(weights_s, ops_s)

    knots = BACKENDS[config.backend].step_knots()
    last_s, more_s = step_s(knots[-1]), step_s(2 * knots[-1])
    return StepTime(
        knots,
        tuple(step_s(knot) for knot in knots),
        per_token_s=(more_s - last_s) / knots[-1],
        per_seq_s=0.0,
        per_row_s=costs.head_flops(arch, 1) / ops_per_s,
        per_position_s=kv_bytes / read_per_s,
        per_pair_s=costs.attention_flops(arch, 0, 1) / ops_per_s,
        after_s=_AFTER_S,
        after_per_row_s=_AFTER_PER_ROW_S,
        windows=windows_of(arch),
    )
