"""What people ask before they run something: what it needs, how long it will take, and why."""

from __future__ import annotations

from ridgeline.planner.capacity.load import LoadFlags, OfferedLoad, Slo
from ridgeline.planner.memory.flags import PlanFlags
from ridgeline.planner.plan import Plan, plan

__all__ = ["LoadFlags", "OfferedLoad", "Plan", "PlanFlags", "Slo", "plan"]
