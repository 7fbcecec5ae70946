"""The flags of ``plan`` that name a device, for commands that simulate one."""

from __future__ import annotations

from ridgeline.cli.flags import UsageError
from ridgeline.planner import PlanFlags
from ridgeline.planner.memory.flags import OF_DEVICE

ON_HELPS = {
    "on": "Simulate this device of `ridgeline plan` instead: 4090, h100, m4-max, a MIG slice such "
    "as h100-sxm/2g.20gb, or mine: the device that --memory, --bandwidth and --tflops describe.",
    "tensor_parallel_size": "With --on: number of devices that share each layer. Default: as few "
    "as hold the model.",
    "engine": "With --on: engine whose memory rules and times apply: ridgeline, vllm, sglang, "
    "trtllm or llamacpp. Default: as for plan.",
}


def check_device(plan_flags: PlanFlags) -> None:
    """Raise UsageError for a flag that says something of a device where none is named."""
    usual = PlanFlags()
    for name in OF_DEVICE:
        if not plan_flags.names_device and getattr(plan_flags, name) != getattr(usual, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is about a device: name one with --on")
