"""Backends by name: each has the face that ``backends.interface`` describes, and hides the rest."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.backends import cpu, reference
from ridgeline.backends.interface import Backend

# The first is the meaning of "auto".
BACKENDS: Mapping[str, Backend] = {"cpu": cpu, "reference": reference}
