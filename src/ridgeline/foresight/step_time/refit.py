"""A model of time fitted again to steps that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.foresight.step_time.calibration import Calibration, Factors
from ridgeline.foresight.step_time.least_squares import cross_validated, fit
from ridgeline.foresight.step_time.sampler import Measured, Samples
from ridgeline.version import __version__


def fitted(
    before: Calibration, samples: Samples, order: Sequence[Measured], source: str, at_s: float
) -> Calibration:
    """Fit again: return a calibration of the same model.

    Args:
        before: stands in where a server has no samples.
        samples: what to fit to.
        order: steps as they came, for the factors of the seconds between.
        source: what it will be called.
        at_s: now, in seconds since 1970.
    """
    knots = before.times.knots
    steps, after = tuple(samples.steps()), tuple(samples.after())
    prior = before.times if source == "served" else None  # a server may never see some shapes
    times = fit(steps, after, knots, windows=before.times.windows, prior=prior)
    error = cross_validated(steps, knots)
    factors = Factors()
    for sample in order:
        factors.add(sample.seconds, times.seconds(sample.features))
    return replace(
        before,
        source=source,
        measured_at=round(at_s, 3),
        version=__version__,
        times=times,
        step_error=round(error, 4),
        factors=tuple(factors.kept),
        samples=steps,
        after=after,
    )
