"""What people ask before they run something: what it needs, how long it will take, and why."""

from __future__ import annotations

from ridgeline.planner.plan import Plan, plan
from ridgeline.planner.wishes import Wishes

__all__ = ["Plan", "Wishes", "plan"]
