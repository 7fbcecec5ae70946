"""What will be needed, before anything runs: memory plans for any model on any device."""

from __future__ import annotations

from ridgeline.planner.plan import Plan, plan
from ridgeline.planner.wishes import Wishes

__all__ = ["Plan", "Wishes", "plan"]
