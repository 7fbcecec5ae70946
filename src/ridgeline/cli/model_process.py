"""``python -m ridgeline.cli.model_process``: a process that a router starts before it needs it.

It imports what serving needs, which takes longer than loading a small model, prints an empty line,
and waits for one with its orders: JSON with ``variables``, the flags as environment variables, and
``arguments`` of the command line. It ends when its parent does, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ridgeline.system.process import end_with_parent


def main() -> None:
    """Wait for orders, and carry them out."""
    end_with_parent(signal.SIGTERM)
    import ridgeline.serve.main
    import ridgeline.trust.stages  # noqa: F401  (the command imports both where it needs them)
    from ridgeline.cli.main import main as run

    print(flush=True)  # it is ready
    line = sys.stdin.readline()
    if not line:  # the router has ended
        return
    orders = json.loads(line)
    os.environ.update(orders["variables"])
    sys.argv[1:] = orders["arguments"]
    run()


if __name__ == "__main__":
    main()
