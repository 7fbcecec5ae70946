"""What the parts of ``ridgeline bench gpu`` share: the device, the clock, where findings go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda import device as devices
from ridgeline.backends.cuda import twins
from ridgeline.backends.cuda.runner import errors_named
from ridgeline.machine import DeviceLost

Case = tuple[str, Callable[[], None]]  # what it is called, and what measures it


class Part:
    """A part under way.

    Attributes:
        is_tiny: shapes are small, and all is computed by twins on the CPU.
        device: where tensors lie.
        dtype: of weights and activations: twins on a CPU compute in float32.
        dtype_name: the same, as ``--dtype`` calls it.
        ops: kernels, or twins.
        processors: that programs can be spread over.
    """

    def __init__(self, name: str, seconds: float) -> None:
        """Begin a part in which no case starts after ``seconds``."""
        self.name, self._end_s = name, time.monotonic() + seconds
        self.is_tiny = devices.uses_twins()
        self.device = torch.device("cpu" if self.is_tiny else "cuda:0")
        self.dtype = torch.float32 if self.is_tiny else torch.bfloat16
        self.dtype_name = "f32" if self.is_tiny else "bf16"
        self.ops: Any = twins
        self.processors = 2
        if self.is_tiny:
            torch.set_num_threads(1)
        else:
            from ridgeline.backends.cuda import kernels

            self.ops = kernels
            found = torch.cuda.get_device_properties(self.device)
            self.processors = found.multi_processor_count
        torch.manual_seed(0)

    def say(self, what: str, **values: Any) -> None:
        """Print a finding. One with ``ok`` is a check; what is None could not be measured."""
        known = {name: value for name, value in values.items() if value is not None}
        print(json.dumps({"part": self.name, "what": what, **known}), flush=True)

    def near(self, what: str, found: Tensor, wanted: Tensor, most: float) -> None:
        """Check that two arrays differ by at most a share of the second one's length."""
        length = wanted.double().norm().clamp(min=1e-30)
        error = float((found.double() - wanted.double()).norm() / length)
        self.say(what, error=error, most=most, ok=error <= most)

    def same_bits(self, what: str, is_same: bool, **values: Any) -> None:
        """Check that bits are equal; of twins it is only told, as torch's sums follow the batch."""
        self.say(what, same_bits=is_same, ok=is_same or self.is_tiny, **values)

    def run(self, cases: Iterable[Case], need_s: float = 3.0, *, are_ours: bool = True) -> None:
        """Measure cases one after another while there is time; one that fails ends nothing else.

        What others cannot is no failure of ours.
        """
        left_out = []
        for name, measure in cases:
            if self._end_s - time.monotonic() < need_s and not self.is_tiny:
                left_out.append(name)
                continue
            try:
                with errors_named(), torch.inference_mode():
                    measure()
            except DeviceLost as reason:
                self.say(name, failed=str(reason), ok=False)
                raise
            except Exception as reason:
                why = f"{type(reason).__name__}: {reason}"[:300]
                self.say(name, failed=why, ok=False if are_ours else None)
        if left_out:
            self.say("left out", cases=left_out)

    def seconds(self, call: Callable[[], Any], calls: int = 1, repeats: int = 10) -> float:
        """Return the median time of one of the ``calls`` that ``call`` makes, in a CUDA graph."""
        call()
        if self.is_tiny:
            begin_s = time.perf_counter()
            call()
            return (time.perf_counter() - begin_s) / calls
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times_ms = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end))
        return float(sorted(times_ms)[repeats // 2]) / 1e3 / calls

    def peer_seconds(self, call: Callable[[], Any]) -> float | None:
        """Return the time of a call of others' code; None if it cannot do that here."""
        try:
            return self.seconds(call)
        except Exception:
            return None

    def host_seconds(self, call: Callable[[], Any], calls: int) -> float:
        """Return the time of a call seen from the host, which waits for the device at the end."""
        self.synchronize()
        begin_s = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return (time.perf_counter() - begin_s) / calls

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if not self.is_tiny:
            torch.cuda.synchronize()

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return random numbers on the device, of the part's type unless another is given."""
        out = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return out.normal_(0, scale)
