"""What the parts of ``ridgeline bench gpu`` share: device, clock, and output of findings."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.runner import errors_named
from ridgeline.backends.cuda.step.graphs import captured
from ridgeline.system.machine import DeviceLost

Case = tuple[str, Callable[[], None]]  # what it is called, and what measures it
# Of numbers beside those in float64, as a share of their length.
_ERROR_OF_SUM = 1e-3  # in the matrix unit, which rounds sums towards zero
_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Part:
    """A part under way, or a worker's share of it.

    Each case is announced when it begins and when it ends. If this process is lost, another one can
    go on after that case (``bench.gpu.parts``).

    Attributes:
        is_tiny: shapes are small, and all is computed by twins on the CPU.
        device: where tensors lie.
        dtype: of weights and activations: twins on a CPU compute in float32.
        dtype_name: the same, as ``--dtype`` calls it.
        ops: kernels, or twins.
        processors: that programs can be spread over.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        skip: Collection[str] = (),
        worker: int = 0,
        workers: int = 1,
        *,
        is_tiny: bool,
    ) -> None:
        """Begin a part in which no case starts after ``seconds``.

        Args:
            name: of the part.
            seconds: from now on.
            skip: cases that are known already.
            worker: which of ``workers`` this one is; they take cases by turns.
            workers: that share the cases.
            is_tiny: see the class.
        """
        self.name, self._end_s = name, time.monotonic() + seconds
        self._skip, self._worker, self._workers = frozenset(skip), worker, workers
        self._depth, self._is_lost = 0, False
        self.is_tiny = is_tiny
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
            properties = torch.cuda.get_device_properties(self.device)
            self.processors = properties.multi_processor_count
        torch.manual_seed(0)

    def say(self, what: str, **values: Any) -> None:
        """Print a finding. One with ``ok`` is a check; None means that it could not be measured."""
        present = {name: value for name, value in values.items() if value is not None}
        print(json.dumps({"part": self.name, "what": what, **present}), flush=True)

    def near(self, what: str, actual: Tensor, wanted: Tensor, most: float | None = None) -> None:
        """Check that two arrays differ by at most a share of the second one's length.

        By default it is what the type of ``actual`` rounds, or a sum of products of narrow numbers.
        """
        if most is None:
            is_narrow = self.dtype != torch.float32 and actual.dtype == torch.float32
            most = _ERROR_OF_SUM if is_narrow else _ERROR[actual.dtype]
        length = wanted.double().norm().clamp(min=1e-30)
        error = float((actual.double() - wanted.double()).norm() / length)
        self.say(what, error=error, most=most, ok=error <= most)

    def equal(self, what: str, actual: Tensor | Sequence[Tensor], wanted: Any) -> None:
        """Check that arrays are equal; NaN equals NaN."""
        pairs = [(actual, wanted)] if torch.is_tensor(actual) else zip(actual, wanted, strict=True)
        bad = sum(int((~torch.isclose(a, b, 0, 0, equal_nan=True)).sum()) for a, b in pairs)
        self.say(what, ok=not bad, bad=bad or None)

    def same_bits(self, what: str, is_same: bool, **values: Any) -> None:
        """Check that bits are equal; for twins only report it, as torch's sums follow the batch."""
        self.say(what, same_bits=is_same, ok=is_same or self.is_tiny, **values)

    def run(self, cases: Iterable[Case], need_s: float = 3.0, *, are_ours: bool = True) -> None:
        """Measure cases one after another while there is time; one that fails ends nothing else.

        What others' code cannot do does not count as a failure. A case may run cases itself.
        """
        left_out = []
        for i, (name, measure) in enumerate(cases):
            is_mine = self._depth or i % self._workers == self._worker
            if not is_mine or name in self._skip:
                continue
            if self._end_s - time.monotonic() < need_s and not self.is_tiny:
                left_out.append(name)
                continue
            self._tell(begins=name)
            self._measure(name, measure, are_ours=are_ours)
            self._tell(ends=name)
        if left_out:
            self.say("left out", cases=left_out)

    def _measure(self, name: str, measure: Callable[[], None], *, are_ours: bool) -> None:
        """Measure a case with random numbers of its own; the loss of a device is reported once."""
        torch.manual_seed(zlib.crc32(name.encode()))
        self._depth += 1
        try:
            with errors_named(), torch.inference_mode():
                measure()
        except DeviceLost as reason:
            if not self._is_lost:
                self._is_lost = True
                self.say(name, failed=str(reason)[:300], ok=False)
                self._tell(ends=name)
            raise
        except Exception as reason:
            why = f"{type(reason).__name__}: {reason}"[:300]
            self.say(name, failed=why, ok=False if are_ours else None)
        finally:
            self._depth -= 1

    def _tell(self, **what: str) -> None:
        print(json.dumps({"part": self.name, **what}), flush=True)

    def seconds(self, call: Callable[[], Any], calls: int = 1, repeats: int = 10) -> float:
        """Return the median time of one of the ``calls`` that ``call`` makes, in a CUDA graph."""
        call()
        if self.is_tiny:
            begin_s = time.perf_counter()
            call()
            return (time.perf_counter() - begin_s) / calls
        graph, _ = captured(call)
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
