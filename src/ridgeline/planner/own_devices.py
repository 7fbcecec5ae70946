"""Devices that a user describes: one by flags, any number by a file.

What they lack of a device of the catalogue is left open: without arithmetic or bandwidth memory is
planned, and no time.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.model.cost.hardware import Device, parse_own_devices
from ridgeline.planner.memory.flags import MINE, PlanFlags


def own_devices(flags: PlanFlags) -> dict[str, Device]:
    """Return the user's devices by what they are called, in lower case.

    Raises ValueError for a damaged file, and OSError if it cannot be read.
    """
    own: dict[str, Device] = {}
    if flags.devices is not None:
        text = Path(flags.devices).read_text(encoding="utf-8-sig")
        own = parse_own_devices(text, flags.devices)
        if not own:
            raise ValueError(f"--devices {flags.devices}: no device stands in it")
    if (num_bytes := flags.size("memory")) is not None:
        own[MINE] = _mine(num_bytes, flags.bandwidth, flags.tflops)
    return own


def _mine(num_bytes: int, gb_per_s: float | None, tflops: float | None) -> Device:
    peaks = {} if tflops is None else dict.fromkeys(("bf16", "f16"), tflops * 1e12)
    return Device(
        id=MINE,
        name="device of yours",
        kind="gpu",
        usable_bytes=num_bytes,
        memory_known="seen",
        memory="",
        read_bytes_per_s=(gb_per_s or 0.0) * 1e9,
        peak_ops_per_s=peaks,
        measured_ops_per_s={},
        source="the flags",
        confidence="high",
    )
