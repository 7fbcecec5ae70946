"""Ctrl-C between steps: half a commit would leave an inconsistent state. Knows nothing of steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Keeps SIGINT back from ``hold`` to ``release``, and otherwise passes it on at once.

    The handler stays from step to step: changing it twice in each step takes a twentieth of the
    time that a small model needs for one token (docs/log). May be entered again, and in any thread;
    it does something only in the main one, where signals arrive. One thread at a time may hold. A
    handler that other code sets meanwhile stays.
    """

    def __init__(self) -> None:
        """Do nothing yet."""
        self._num_entered = 0
        self._counting = threading.Lock()
        self._is_held = self._is_pending = False
        self._before: object = None  # whose handler it was; None while it is not ours

    def __enter__(self) -> None:
        with self._counting:
            self._num_entered += 1
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._receive) or signal.SIG_DFL

    def __exit__(self, *error: object) -> None:
        with self._counting:
            self._num_entered -= 1
        is_main = threading.current_thread() is threading.main_thread()
        if self._num_entered == 0 and is_main and self._before is not None:
            if signal.getsignal(signal.SIGINT) == self._receive:
                signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]
            self._before = None

    def hold(self) -> None:
        """From now on keep the signal back."""
        self._is_held = True

    def release(self) -> None:
        """Pass on a signal that came meanwhile, to the handler that is set now."""
        self._is_held = False
        if self._is_pending:
            self._is_pending = False
            signal.raise_signal(signal.SIGINT)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._is_pending = True
        elif callable(self._before):
            self._before(signum, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
