"""Which GPU the backend computes on, and what is wrong where there is none.

It imports torch where it is asked for a device: a machine without torch can say so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from ridgeline.backends.interface import MemoryUse

_LEAST_TORCH = (2, 9)
_LEAST_CAPABILITY = (8, 0)  # bf16 products
KEPT_SHARE = 0.02  # of the device's memory stays free, for what others begin to use
CONTEXT_BYTES = 600 << 20  # of what the driver and graphs take
_CPU = "take --backend cpu"
# Of CUDA's driver: compute capability, multiprocessors, their clock, the memory's clock and width.
_RATES = (75, 76, 16, 13, 36, 37)
# Dense 16-bit operations of a multiprocessor in a cycle, by capability (NVIDIA's white papers).
_OPS_PER_CYCLE = {
    (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192,
    (12, 0): 1024, (12, 1): 1024,
}  # fmt: skip

Version = tuple[int, int]


class DeviceFacts(NamedTuple):
    """Which of the things that the backend needs are installed.

    Attributes:
        torch: its version; None if it is not installed.
        has_triton: whether Triton is installed.
        cuda: the version of CUDA that torch was built for; None for a build without it.
        driver: the newest version of CUDA that the driver knows; None if there is no driver.
        gpu: the first GPU's name; None if there is none.
        capability: its compute capability.
    """

    torch: str | None = None
    has_triton: bool = False
    cuda: Version | None = None
    driver: Version | None = None
    gpu: str | None = None
    capability: Version = (0, 0)


def facts() -> DeviceFacts:
    """Return these facts. torch is imported only if it can be of use."""
    stack = DeviceFacts(has_triton=_has("triton"), driver=_driver())
    if not _has("torch"):
        return stack
    try:
        stack = stack._replace(torch=version("torch"))
    except PackageNotFoundError:  # a folder of that name
        return stack
    if _version(stack.torch) < _LEAST_TORCH:
        return stack
    import torch

    if torch.version.cuda:
        stack = stack._replace(cuda=_version(torch.version.cuda))
        if not what_is_missing(stack._replace(gpu="", capability=_LEAST_CAPABILITY)):
            stack = _with_gpu(stack, torch)
    return stack


def _with_gpu(stack: DeviceFacts, torch: Any) -> DeviceFacts:
    if not torch.cuda.is_available():
        return stack
    capability = torch.cuda.get_device_capability(0)
    return stack._replace(gpu=torch.cuda.get_device_name(0), capability=capability)


def what_is_missing(stack: DeviceFacts) -> str | None:
    """Return in one line why there is no device, and the way out; None if there is one."""
    if stack.torch is None:
        return "torch is not installed: pip install 'ridgeline[gpu]'"
    if _version(stack.torch) < _LEAST_TORCH:
        return (
            f"torch {stack.torch} is too old: it must be {dotted(_LEAST_TORCH)} or newer: pip "
            f"install --upgrade 'ridgeline[gpu]'"
        )
    if stack.cuda is None:
        return (
            f"torch {stack.torch} is a build without CUDA: pip uninstall torch, then pip install "
            f"'ridgeline[gpu]'; without a GPU, {_CPU}"
        )
    if not stack.has_triton:
        return (
            f"Triton is not installed, which torch brings on Linux alone: pip install triton, or "
            f"{_CPU}"
        )
    if stack.driver is None:
        return (
            f"no NVIDIA driver was found: if nvidia-smi lists a GPU, let this process see it "
            f"(containers need --gpus all); else {_CPU}"
        )
    if stack.driver[0] < stack.cuda[0]:
        return (
            f"the NVIDIA driver knows CUDA {dotted(stack.driver)}, and torch {stack.torch} needs "
            f"{dotted(stack.cuda)}: update the driver, or install a torch built for CUDA "
            f"{stack.driver[0]}"
        )
    if stack.gpu is None:
        return (
            f"no GPU is visible: nvidia-smi lists the installed ones, and "
            f"CUDA_VISIBLE_DEVICES may hide them; without one, {_CPU}"
        )
    if stack.capability < _LEAST_CAPABILITY:
        return (
            f"{stack.gpu} has compute capability {dotted(stack.capability)}, but "
            f"{dotted(_LEAST_CAPABILITY)} (Ampere) is the minimum: {_CPU}"
        )
    return None


def problem() -> str | None:
    """Return why there is no device to compute on, with the way out; None if there is one."""
    return what_is_missing(facts())


def check(*, on_cpu: bool = False) -> None:
    """Raise ValueError, with the way out, unless there is a device to compute on.

    Computing on the CPU, ``on_cpu``, takes torch alone.
    """
    if on_cpu and _has("torch"):
        return
    if why := problem():
        raise ValueError(f"--backend cuda: {why}")


def check_count(ranks: int) -> None:
    """Raise ValueError unless there is a device for each rank."""
    if ranks == 1:
        return
    import torch

    if ranks > (count := torch.cuda.device_count()):
        raise ValueError(f"--tensor-parallel-size {ranks}: this machine has {count} GPUs")


def budget_bytes() -> int:
    """Return the device memory that can be used."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    return int(free_bytes - KEPT_SHARE * total_bytes - CONTEXT_BYTES)


def rest_of_device(
    device: str, named_bytes: int, allocated_bytes: int, reserved_bytes: int, used_bytes: int
) -> dict[str, MemoryUse]:
    """Return the device memory that no named line counts, so that the lines add up to the total.

    Args:
        device: its name.
        named_bytes: of tensors that have a line.
        allocated_bytes: of all tensors, those of graphs among them.
        reserved_bytes: that torch took of the device.
        used_bytes: of the device by all processes, as it reports itself.
    """
    sizes = {
        "scratch.graphs": allocated_bytes - named_bytes,
        "torch.reserve": reserved_bytes - allocated_bytes,
        "device.context": used_bytes - reserved_bytes,
    }
    return {
        name: MemoryUse(max(size, 0), max(size, 0), device=device) for name, size in sizes.items()
    }


def ops_per_byte() -> float | None:
    """Return how many 16-bit operations the first GPU computes while it reads a byte.

    None where there is no GPU, or its generation is not known.
    """
    return rates_ratio(*(_attribute(number) for number in _RATES))


def rates_ratio(
    major: int, minor: int, num_sms: int, clock_khz: int, memory_khz: int, bus_bits: int
) -> float | None:
    """Return dense operations a second over bytes a second, by what a driver says of a GPU.

    Memory transfers twice in a cycle. None for a generation that is not known.
    """
    ops = _OPS_PER_CYCLE.get((major, minor))
    if ops is None or not memory_khz * bus_bits:
        return None
    return ops * num_sms * clock_khz / (2 * memory_khz * bus_bits / 8)


def _attribute(number: int) -> int:
    """Return an attribute of the first GPU, asked without torch; 0 if there is none."""
    value, gpu = ctypes.c_int(), ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0
    if library.cuInit(0) or library.cuDeviceGet(ctypes.byref(gpu), 0):
        return 0
    failed = library.cuDeviceGetAttribute(ctypes.byref(value), number, gpu)
    return 0 if failed else value.value


def has_driver() -> bool:
    """Whether there is an NVIDIA driver; torch is not imported."""
    return _driver() is not None


def describe() -> str:
    """Return what it computes with, in a few words."""
    stack = facts()
    return what_is_missing(stack) or f"{stack.gpu}, torch {stack.torch}"


def _driver() -> Version | None:
    """Return the newest version of CUDA that the NVIDIA driver knows, asked without torch."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(text: str | None) -> Version:
    """Return the first two numbers of a version."""
    major, minor, *_ = [*(text or "0").split("."), "0"]
    return int(major), int(minor)


def dotted(number: Version) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, number))
