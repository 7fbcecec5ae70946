"""How long steps usually take, fitted to the very run that is looked at.

With it computing alone, computing beside others and a slow machine can be told apart without a
calibration. It foresees nothing of another run.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.core.records import Record
from ridgeline.foresight.explain.explain import Json, Predict
from ridgeline.foresight.step_time.features import Reach, StepTime, of_record, reach_of
from ridgeline.foresight.step_time.least_squares import fit
from ridgeline.foresight.step_time.sampler import Measured, Samples, Watcher
from ridgeline.foresight.trace import Recorded, step_of

_LEAST = 50  # steps; fewer say nothing
_MOST = 1500  # more say nothing new
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def usual_times(records: Iterable[Record]) -> tuple[StepTime, Reach]:
    """Return the model of time that explains a whole run best, and up to which steps it is known.

    Raises ValueError if the run is too short.
    """
    watcher = Watcher(Samples(), ())
    measured = [sample for record in records if (sample := watcher.take(record))]
    reach = reach_of(sample.features for sample in measured)
    if reach is None or len(measured) < _LEAST:
        raise ValueError(
            f"the trace has {len(measured)} steps that say how long steps take: at least {_LEAST} "
            "are needed"
        )
    thinned = measured[:: -(-len(measured) // _MOST)]
    return fit(thinned, watcher.samples.after(), _KNOTS), reach


def usual_steps(recorded: Recorded) -> Predict | None:
    """Return how long steps usually take, from some of a run's; None if there are too few."""
    steps = map(step_of, recorded.some(_MOST))
    measured = [
        Measured(of_record(step), step.schedule_s + step.execute_s)
        for step in steps
        if step.sampled and not step.errors
    ]
    if len(measured) < _LEAST:
        return None
    return predictor(fit(measured, (), _KNOTS))


def predictor(times: StepTime) -> Predict:
    """Return what an explanation asks a model of time: the seconds of a step, by its record."""

    def predict(step: Json) -> float:
        return times.seconds(of_record(step_of(step), times.windows))

    return predict
