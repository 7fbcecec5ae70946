"""Hypothesis profiles, so that every run tries the same examples; Ctrl-C and widths as usual."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,  # times vary with the machine, and no behaviour depends on them
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "mutants",  # where a failure is what is hoped for, the smallest example is of no interest
    settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("ci")

# A shell lets what it starts in the background ignore Ctrl-C, which tests send. Their children
# inherit that, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tables are as wide as what they are written to allows. A worker of xdist says 80 to all.
os.environ.pop("COLUMNS", None)
