"""A model on the one device that a simulation is asked for, and what is asked of devices by name.

Everything comes from the flags of ``ridgeline plan``, and means the same as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.model.cost.format_bytes import format_named
from ridgeline.model.cost.hardware import Device
from ridgeline.planner.capacity.latency_model import LatencyModel, latency_model_of
from ridgeline.planner.catalogue import HERE, find_devices, user_devices
from ridgeline.planner.memory.flags import AUTO, MINE, PlanFlags
from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.planner.memory.own_engine import OWN
from ridgeline.planner.memory.placement import Placement, cannot_compute, place, refusal, sentence


class DeviceReplica(NamedTuple):
    """A model on as many devices of a kind as hold it.

    Attributes:
        placement: how it is divided, and what its cache has room for.
        clock: how long steps take.
        notes: what a name was taken for, where that was a guess.
    """

    placement: Placement
    latency_model: LatencyModel
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The device's id, behind the number of devices if there are several."""
        device, num = self.placement.device, self.placement.num_devices
        return f"{num} x {device.id}" if num > 1 else device.id


def on_device(spec: ModelSpec, flags: PlanFlags) -> DeviceReplica:
    """Return a model on the device that the flags name.

    Raises:
        ValueError: they name no device, or several; its speed is not known; the model does not fit
            on it; or a flag contradicts it.
        OSError: the file of own devices cannot be read.
    """
    own = user_devices(flags)
    named = flags.on or ",".join(own)
    chosen = find_devices(named, own)
    if len(chosen.devices) != 1:
        raise ValueError(f"--on {named} names {len(chosen.devices)} devices: name one")
    check_speeds(chosen.devices)
    (device,), _ = able_devices(spec, chosen.devices, flags)
    placement = place(spec, device, flags, default_ranks=AUTO)
    if not placement.ledger.fits:
        raise ValueError(f"{spec.name} {sentence(placement)}")
    return DeviceReplica(placement, latency_model_of(spec, placement), tuple(chosen.notes))


def able_devices(
    spec: ModelSpec, devices: Sequence[Device], flags: PlanFlags
) -> tuple[list[Device], list[str]]:
    """Return the devices that can compute what was asked for, and what is said of the others.

    Raises ValueError if none can.
    """
    able, left_out = _with_bf16(devices, flags)
    if flags.engine != OWN:
        return able, left_out
    why = {device.id: refusal(spec, device, flags) for device in able}
    if all(why.values()):
        raise ValueError(why[able[0].id])
    refused: dict[str, list[str]] = {}
    for name, reason in why.items():
        if reason:
            refused.setdefault(reason, []).append(name)
    left_out += [f"left out: {', '.join(names)}: {reason}" for reason, names in refused.items()]
    return [device for device in able if not why[device.id]], left_out


def _with_bf16(devices: Sequence[Device], flags: PlanFlags) -> tuple[list[Device], list[str]]:
    is_asked = flags.dtype != AUTO and format_named(flags.dtype).name == "bf16"
    unable = [one for one in devices if is_asked and cannot_compute(one, "bf16")]
    if not unable:
        return list(devices), []
    names = ", ".join(device.id for device in unable)
    if len(unable) == len(devices):
        raise ValueError(f"--dtype bf16: {names} cannot compute bf16; --dtype f16 is as large")
    return [d for d in devices if d not in unable], [f"left out, as they have no bf16: {names}"]


def check_speeds(devices: Sequence[Device]) -> None:
    """Raise ValueError for a device of which too little is known to say how long steps take."""
    for device in (one for one in devices if one.id != HERE):
        if not device.read_bytes_per_s or not (device.peak_ops_per_s or device.measured_ops_per_s):
            how = "--bandwidth and --tflops" if device.id == MINE else "read_gb_per_s, bf16_tflops"
            raise ValueError(f"{device.id}: how long steps take depends on its speed: give {how}")
