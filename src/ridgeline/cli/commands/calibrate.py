"""``ridgeline calibrate``: measure a model here, so that simulations and forecasts are right."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated

import typer

from ridgeline import LLM
from ridgeline.cli.commands.models import Model
from ridgeline.cli.flags import flags
from ridgeline.engine.calibration import (
    calibrate,
    measure_and_save_roof,
    rates,
    save_calibration,
    stored_roof,
)
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import count_bar
from ridgeline.system.report import of_pairs
from ridgeline.system.terminal import console, drawn


@flags("options", Options)
def calibrate_command(
    model: Model,
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure.")] = 60.0,
    *,
    options: Options,
) -> None:
    """Measure how long steps take here. It takes a minute; run nothing else meanwhile.

    Where this machine's roof is not known yet it is measured too: ten seconds more.
    simulate, bench foresight and servers read it from then on. Servers keep it up to date.
    """
    options = replace(options, speculative_config="off")  # drafts are rows like others
    with (
        LLM(model, **{f.name: getattr(options, f.name) for f in fields(options)}) as llm,
        count_bar("Measuring", note="seconds") as report,
    ):
        calibration = calibrate(llm, seconds, report)
        path = save_calibration(default_home(), calibration)
        lines = list(rates(calibration, llm))
    if stored_roof(default_home()) is None:
        with count_bar("Measuring the roof", note="rounds") as report:
            measure_and_save_roof(default_home(), report)
    interval = calibration.interval()
    error = f"{calibration.step_error or 0:.1%} of a step, in the mean"
    lines.append(
        ("error", f"{error}, of {len(calibration.samples):,} steps that it was not fitted to")
    )
    if len(calibration.factors) > 1:
        speeds = f"{1 / interval.high:.2f} to {1 / interval.low:.2f}"
        lines.append(("speed", f"{speeds} of the mean, in two seconds each"))
    lines.append(("kept in", str(path)))
    console().print(drawn(of_pairs(lines), whole=(0,)))
    console().print(f"next: ridgeline simulate {model} --request-rate 2")
