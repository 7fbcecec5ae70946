"""Workers and the barrier: threads that spin briefly, then sleep until they are woken.

All threads run the same compiled step, each with its number. Inside it they wait at barriers a
third of a microsecond apart, where only spinning is quick enough; but spinning is wasted while
another process has the core of a thread that is waited for, and an engine without work must cost
nothing. So every wait spins for about 50 microseconds and then sleeps in the kernel (Linux futex;
elsewhere short naps).

While another process keeps a core busy, a thread that shares it is away for milliseconds at a time,
and the 150 barriers per token of batch 1 wait for it. One thread fewer is faster then:
``AdaptiveThreads``.

The words of ``sync``, each in a cache line of its own: arrivals at the barrier, the barrier's
generation, its sleepers; the call's number, its sleepers; and a flag that ends the workers. The
call's number has the threads that take part in its lower half.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from llvmlite import ir

from ridgeline.backends.cpu.kernels.ir import I32, I64, Function, Value
from ridgeline.backends.cpu.kernels.isa import spin_hint
from ridgeline.backends.cpu.kernels.kernel import Kernel

STEP = Kernel("step", ("args", "thread"))  # emitted by ``step``
BARRIER = Kernel("barrier", ("sync", "threads"))
_WORKER, _RUN = Kernel("worker", ("args", "thread")), Kernel("run", ("args",))
SYNC_BYTES = 384
_ARRIVALS, _GENERATION, _SLEEPERS, _CALL, _CALL_SLEEPERS, _QUIT = range(0, SYNC_BYTES, 64)
MOST_THREADS = (1 << 16) - 1  # the lower half of the call's word says how many take part
# Most rows of steps that ``AdaptiveThreads`` compares: above, threads seldom meet.
ADAPTIVE_ROWS = 16
_SPINS = 2000  # pauses; some 50 microseconds
_CALL_SPINS = 50_000  # between steps: Python needs a millisecond to prepare the next one
_WINDOW, _IRREGULAR = 16, 1.5  # steps that are looked at; their mean over their least
_FORGETTING = 1.002  # of the quickest step, each time: contexts grow, and clocks change
_FIRST_PATIENCE, _LAST_PATIENCE = 64, 1024  # steps until the other size is tried again
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 128, 129, (1 << 31) - 1  # both private to the process


def emit_threads(module: ir.Module, is_x86: bool, futex_number: int | None) -> None:
    """Emit ``barrier``, ``worker`` and ``run``, which call ``step``.

    The first arguments are ``sync`` and ``threads``.
    ``futex_number`` is that of the system call, None where there is none.
    """
    wait = _SpinWait(is_x86, futex_number)
    fn = BARRIER.begin(module)
    sync, threads = fn.args
    with fn.when(threads > 1):
        generation = _read(fn, sync + _GENERATION)
        before = fetch_add(fn, sync + _ARRIVALS, 1)
        is_last = before.equals(threads.signed(I32) - 1)
        with fn.when(is_last):
            _write(fn, sync + _ARRIVALS, fn.value(0, I32))
            _write(fn, sync + _GENERATION, generation + 1)
            wait.wake(fn, sync + _GENERATION, sync + _SLEEPERS)
        with fn.when(is_last.equals(0)):
            wait.until_changed(fn, sync + _GENERATION, generation, sync + _SLEEPERS, _SPINS)
    fn.finish()

    fn = _WORKER.begin(module)
    args, thread = fn.args
    sync = fn.load(args, I64, 8)
    last_call, alive = fn.var(fn.value(0, I32)), fn.var(fn.value(1, I32))
    with fn.loop_while(lambda: alive.get() > 0):
        wait.until_changed(fn, sync + _CALL, last_call.get(), sync + _CALL_SLEEPERS, _CALL_SPINS)
        # A thread that takes part cannot miss a call, as the others wait; one that rests may.
        last_call.set(_read(fn, sync + _CALL))
        alive.set(1 - _read(fn, sync + _QUIT))
        with fn.when((alive.get() > 0) & ((last_call.get() & MOST_THREADS) > thread.signed(I32))):
            STEP.call(fn, args=args, thread=thread)
    fn.finish()

    fn = _RUN.begin(module)
    (args,) = fn.args
    sync, threads = fn.load(args, I64, 8), fn.load(args + 8, I64, 8)
    call = (_read(fn, sync + _CALL) | MOST_THREADS) + 1  # the next, its lower half empty
    _write(fn, sync + _CALL, call + threads.signed(I32))
    quits = _read(fn, sync + _QUIT)
    with fn.when((threads > 1) | (quits > 0)):
        wait.wake(fn, sync + _CALL, sync + _CALL_SLEEPERS)
    with fn.when(quits.equals(0)):
        STEP.call(fn, args=args, thread=0)
    fn.finish()


class Workers:
    """Python threads that live inside compiled code, beside the thread that calls ``run``."""

    def __init__(self, worker: Callable[[int, int], None], args_address: int, threads: int):
        """Start ``threads - 1`` threads in ``worker(args, number)``."""
        self._threads = [
            threading.Thread(target=worker, args=(args_address, number), daemon=True)
            for number in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, run: Callable[[int], None], args_address: int, sync_address: int) -> None:
        """End the threads; nothing may run."""
        ctypes.c_int32.from_address(sync_address + _QUIT).value = 1
        run(args_address)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


class AdaptiveThreads:
    """How many threads steps of few rows should use: all, or all but one for a while.

    It knows only how long steps took, each beside the quickest of as many rows. If some take much
    longer than others, another process may have a core: then one thread fewer is tried, and kept
    while that is faster. Each trial of the other size that fails makes the next one come later.
    """

    def __init__(self, threads: int) -> None:
        """Begin with all."""
        self.size = self._all = threads
        self._quickest_s: dict[int, float] = {}  # by rows; what was long ago counts for less
        self._ratios: list[float] = []  # of the latest steps, to the quickest
        self._other: float | None = None  # mean ratio of the size that was left for a trial
        self._patience, self._left = _FIRST_PATIENCE, 0

    def note(self, num_rows: int, time_s: float) -> None:
        """Say how long a step of this many rows took with ``size`` threads.

        In a trial both sizes are compared with the same times, so steps of rows that were not seen
        before say nothing.
        """
        if self._all == 1:
            return
        quickest_s = self._quickest_s.get(num_rows, time_s)
        if self._other is None:
            quickest_s = self._quickest_s[num_rows] = min(quickest_s * _FORGETTING, time_s)
        elif num_rows not in self._quickest_s:
            return
        self._left -= 1
        self._ratios = [*self._ratios[1 - _WINDOW :], time_s / quickest_s]
        if len(self._ratios) < _WINDOW:
            return
        mean = sum(self._ratios) / _WINDOW
        if self._other is not None:
            failed, self._other = mean >= self._other, None
            self._patience = min(2 * self._patience, _LAST_PATIENCE) if failed else _FIRST_PATIENCE
            self._left = self._patience
            if failed:
                self._change()
        elif self._left <= 0 and (self.size < self._all or mean > _IRREGULAR):
            self._other = mean
            self._change()

    def _change(self) -> None:
        self.size = self._all - 1 if self.size == self._all else self._all
        self._ratios = []


class _SpinWait:
    """How a thread waits on this system."""

    def __init__(self, is_x86: bool, futex_number: int | None) -> None:
        self._is_x86 = is_x86
        self._futex_number = futex_number

    def until_changed(
        self, fn: Function, word: Value, old: Value, sleepers: Value, spins: int
    ) -> None:
        """Return when ``word`` is no longer ``old``: spin, then sleep."""
        left = fn.var(fn.value(spins, I32))

        def spinning() -> Value:
            return _read(fn, word).equals(old) & (left.get() > 0)

        with fn.loop_while(spinning):
            spin_hint(fn, self._is_x86)
            left.set(left.get() - 1)
        with fn.loop_while(lambda: _read(fn, word).equals(old)):
            fetch_add(fn, sleepers, 1)
            self._sleep(fn, word, old)
            fetch_add(fn, sleepers, -1)

    def wake(self, fn: Function, word: Value, sleepers: Value) -> None:
        """Wake the threads that sleep on ``word``, which was changed before."""
        if self._futex_number is not None:
            with fn.when(_read(fn, sleepers) > 0):
                self._futex(fn, word, _FUTEX_WAKE, fn.i64(_EVERYONE))

    def _sleep(self, fn: Function, word: Value, old: Value) -> None:
        if self._futex_number is None:
            fn.intrinsic("usleep", I32, fn.value(50, I32))
        else:
            self._futex(fn, word, _FUTEX_WAIT, old.signed(I64))  # returns if it has changed

    def _futex(self, fn: Function, word: Value, operation: int, value: Value) -> None:
        assert self._futex_number is not None
        zero = fn.i64(0)
        number, code = fn.i64(self._futex_number), fn.i64(operation)
        fn.intrinsic("syscall", I64, number, word, code, value, zero, zero, zero)


# Sequentially consistent, all of them: a sleeper announces itself before it looks again, and a
# waker changes the word before it looks for sleepers. They are few.


def _pointer(fn: Function, address: Value) -> ir.Value:
    return fn.builder.inttoptr(address.raw, ir.PointerType())


def _read(fn: Function, address: Value) -> Value:
    return Value(fn, fn.builder.load_atomic(_pointer(fn, address), "seq_cst", 4, typ=I32))


def _write(fn: Function, address: Value, value: Value) -> None:
    fn.builder.atomic_rmw("xchg", _pointer(fn, address), value.raw, "seq_cst")


def fetch_add(fn: Function, address: Value, number: int) -> Value:
    """Add to a word that threads share; return what it was, 32 bits."""
    amount = ir.Constant(I32, number)
    old = fn.builder.atomic_rmw("add", _pointer(fn, address), amount, "seq_cst")
    return Value(fn, old)
