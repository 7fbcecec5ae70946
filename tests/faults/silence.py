"""How long a server's event loop is silent, in processor time: ``ridgeline`` with a beat in it.

Between two beats, a millisecond apart, the process has little to compute; where the loop is busy
with one thing, or another thread keeps the interpreter to itself, the next beat comes late, and the
process has computed for so long. A machine that does something else meanwhile does not count.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
import time
from pathlib import Path

PROGRAM = ("-m", __name__)  # of Python, in place of ridgeline's own
_BEAT_S = 0.001
_VARIABLE = "RIDGELINE_TEST_SILENCE"


class Silence:
    """The longest silence of a process, in a file that two processes have mapped."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.variables = {_VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(paths)}

    @property
    def longest_s(self) -> float:
        return float(struct.unpack("d", self._map[:])[0])

    @longest_s.setter
    def longest_s(self, value: float) -> None:
        self._map[:] = struct.pack("d", value)


def _beat(loop: asyncio.AbstractEventLoop, silence: Silence, before_s: float) -> None:
    now_s = time.process_time()
    silence.longest_s = max(silence.longest_s, now_s - before_s)
    loop.call_later(_BEAT_S, _beat, loop, silence, now_s)


def main() -> None:
    """Run the command line with a beat in each loop that runs for ever."""
    from ridgeline.cli.main import main as command_line

    silence = Silence(Path(os.environ.pop(_VARIABLE)))
    run_forever = asyncio.BaseEventLoop.run_forever

    def with_beat(loop: asyncio.BaseEventLoop) -> None:
        loop.call_soon(_beat, loop, silence, time.process_time())
        run_forever(loop)

    asyncio.BaseEventLoop.run_forever = with_beat  # type: ignore[method-assign]
    sys.exit(command_line())


if __name__ == "__main__":
    main()
