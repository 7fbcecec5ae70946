"""Hypothesis profiles: every run of the tests tries the same examples."""

from __future__ import annotations

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
